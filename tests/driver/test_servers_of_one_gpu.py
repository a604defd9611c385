"""Servers that share a GPU divide its memory. tests/driver/test_server_pool.py has how they start."""

from __future__ import annotations

import pytest

from async_rl.base.config import Config, LearnerPlacement, RolloutPlacement
from async_rl.base.config.resolve import resolve
from async_rl.run.processes.placement import HostDemand, decide_placement, host_demands, servers_per_gpu
from tests.kit.placements import TWO_NODES, TWO_PAIRS, placed_on

TWO_SERVERS = placed_on(rollout=RolloutPlacement(servers=2))


def bundles(asked: Config, gpus_there: int) -> list[HostDemand]:
    return [part for demand in host_demands(asked, gpus_there) for part in demand.per_gpu()]


@pytest.mark.parametrize(
    ("asked", "gpus_there", "servers"),
    [
        (TWO_SERVERS, 1, 2), (TWO_SERVERS, 3, 1), (TWO_SERVERS, 0, 1), (placed_on(), 1, 1), (TWO_PAIRS, 2, 1),
        (TWO_NODES, 16, 1), (placed_on(LearnerPlacement(nodes=1), RolloutPlacement(nodes=1)), 2, 1),
    ],
)
def test_servers_of_one_gpu_divide_its_fraction(asked: Config, gpus_there: int, servers: int) -> None:
    parts = bundles(asked, gpus_there)
    assert servers_per_gpu(parts) == servers
    resolved = resolve(asked, decide_placement(asked, parts))
    assert resolved.rollout.gpu_memory_utilization == asked.rollout.gpu_memory_utilization / servers
