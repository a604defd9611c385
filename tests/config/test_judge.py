"""The servers of a judge (judge.path): names, resources, flags, and what they are refused with."""

from __future__ import annotations

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.run.processes.placement import host_demands
from rollout_server.engines.sglang.launch import chat_server_flags

BASE = ("model.path=m", "task.name=reasoning_gym/x")
JUDGE = ("judge.path=j", "placement.judge.servers=2")


def load(*overrides: str) -> Config:
    return load_config(None, [*BASE, *overrides])


def test_judge_servers_get_resources_but_no_weights() -> None:
    config = load(*JUDGE, "placement.judge.tp=2", "placement.rollout={servers: 2}")
    assert config.judge_names == ("judge/0", "judge/1")
    assert config.server_names == ("rollout/0", "rollout/1") and set(config.engine_entries) == {"sglang"}
    (demand,) = host_demands(config, 8)
    assert dict(demand.gpus_of) == {
        "buffer": 0, "rollout/0": 1, "rollout/1": 1, "judge/0": 2, "judge/1": 2, "learner/0": 1
    }  # fmt: skip
    assert (demand.gpus, demand.cpus) == (7, 5)


def test_the_server_has_the_judges_model_and_flags() -> None:
    config = load(*JUDGE, "judge.server_args={context_length: 99}", "placement.judge.tp=4",
        "rollout.gpu_memory_utilization=0.5")
    on_gpu = chat_server_flags(config, on_gpu=True)
    assert on_gpu["model-path"].endswith("/j") and on_gpu["context-length"] == 99
    assert (on_gpu["tp-size"], on_gpu["mem-fraction-static"]) == (4, 0.5)
    assert chat_server_flags(config, on_gpu=False)["device"] == "cpu"
