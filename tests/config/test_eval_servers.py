"""Evaluation servers (placement.eval.servers): names, engines, resources, and what they are refused with."""

from __future__ import annotations

import math

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.errors import ConfigError
from async_rl.run.processes.actors import share_of_cores
from async_rl.run.processes.placement import host_demands, servers_per_gpu

BASE = ("model.path=m", "task.name=reasoning_gym/x", "eval.every_steps=5")


def load(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def test_evaluation_servers_come_after_the_rollout_servers_and_have_the_runs_engine() -> None:
    config = load(
        "placement.eval.servers=2", "placement.rollout={servers: 2, engines: [sglang, vllm]}", "rollout.engine=hf",
        "rollout.server_args={}",
    )
    assert config.server_names == ("rollout/0", "rollout/1", "eval/0", "eval/1")
    assert config.engines == ("sglang", "vllm", "hf", "hf")
    engines = [resolve(config, engine_of(config, name)).rollout.engine for name in config.server_names]
    assert engines == ["sglang", "vllm", "hf", "hf"]
    assert load().server_names == ("rollout/0",)


@pytest.mark.parametrize(("servers", "holds"), [(0, True), (1, False)])
def test_only_an_evaluation_by_rollout_servers_holds_pushes(servers: int, holds: bool) -> None:
    assert load(f"placement.eval.servers={servers}", "eval.pin_version=true").evaluations_hold_pushes == holds
    assert not load(f"placement.eval.servers={servers}").evaluations_hold_pushes


def test_evaluation_servers_get_gpus_and_cores_beside_the_rollout_servers() -> None:
    (demand,) = host_demands(load("placement.eval.servers=1", "placement.rollout={servers: 2, tp: 2}"), 8)
    assert dict(demand.gpus_of) == {
        "buffer": 0.0, "rollout/0": 2, "rollout/1": 2, "eval/0": 2, "learner/0": 1
    }  # fmt: skip
    assert (demand.gpus, demand.cpus) == (7, 4)
    pinned = load("placement={eval: {servers: 1}, pin_cpus: true}")
    assert [share_of_cores(pinned, number, [0, 1, 2]) for number in range(3)] == [[0], [1], [2]]
    assert (pinned.placement.processes_per_node, pinned.placement.servers_per_node) == (3, 2)


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2, 0), (1, 0, 3), (2, 5, 4)])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_servers_of_all_pools_are_dealt_so_that_no_node_has_two_more(nodes: int, counts: tuple[int, ...]) -> None:
    names, (rollout, evals, judges) = ("rollout", "eval", "judge"), (nodes * counts[0], *counts[1:])
    counts = (rollout, evals, judges)
    config = load(
        f"placement.rollout={{nodes: {nodes}, servers: {rollout}}}", f"placement.eval.servers={evals}",
        *([f"placement.judge.servers={judges}", "judge.path=m"] if judges else []),
    )
    dealt = [list(demand.gpus_of) for demand in host_demands(config)[1:]]
    assert max(map(len, dealt)) == math.ceil(sum(counts) / nodes) == config.placement.servers_per_node
    found = [name for pool in names for servers in dealt for name in servers if name.startswith(pool)]
    assert found == [f"{pool}/{number}" for pool, count in zip(names, counts, strict=True) for number in range(count)]


def test_an_evaluation_server_shares_the_only_gpu_and_its_memory() -> None:
    (demand,) = host_demands(load("placement.eval.servers=1"), 1)
    assert dict(demand.gpus_of) == {"buffer": 0.0, "rollout/0": 0.33, "eval/0": 0.33, "learner/0": 0.33}
    assert servers_per_gpu([demand]) == 2
    with pytest.raises(ConfigError, match=r"^placement"):
        host_demands(load("placement.eval.servers=1"), 2)
