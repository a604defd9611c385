"""Servers that share a GPU divide its memory and do not measure it at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from async_rl.base.config import Config, LearnerPlacement, RolloutPlacement
from async_rl.base.config.resolve import resolve
from async_rl.pipeline import start_processes
from async_rl.run.processes import actors
from async_rl.run.processes.placement import HostDemand, Reservation, decide_placement, host_demands, servers_per_gpu
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
    resolved = resolve(asked, decide_placement(asked, Reservation(None, parts, ["h"] * len(parts))))
    assert resolved.rollout.gpu_memory_utilization == asked.rollout.gpu_memory_utilization / servers


class Processes:
    """Records which processes are asked to start together."""

    def __init__(self) -> None:
        self.gathered: list[list[str]] = []
        self.starts = Counter[str]()

    def start(self, name: str, *_: Any, **__: Any) -> Any:
        self.starts[name] += 1

        class Remote:
            def __getattr__(self, _: str) -> Any:
                return self

            def remote(self, *_: Any) -> str:
                return name

        return Remote()

    def gather(self, calls: dict[str, Any], limit: object, what: str) -> dict[str, Any]:
        if what == "the start":
            self.gathered.append(list(calls))
        return dict.fromkeys(calls, "address")


@pytest.mark.parametrize(("gpus", "one_by_one"), [(1, True), (3, False)])
def test_servers_of_one_gpu_start_one_after_the_other(
    gpus: int, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "learner_threads", lambda config: 1)
    processes: Any = Processes()

    class Log:
        def __getattr__(self, _: str) -> Any:
            return self

        def note(self, text: str) -> None: ...

    log: Any = Log()
    start_processes(TWO_SERVERS, processes, log, Reservation(None, bundles(TWO_SERVERS, gpus), ["h"]))
    servers = ["rollout/0", "rollout/1"]
    assert processes.gathered == [["buffer"], *([[s] for s in servers] if one_by_one else [servers]), ["learner/0"]]
