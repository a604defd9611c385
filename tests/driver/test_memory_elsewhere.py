"""The memory of a run over several hosts is known before any of them is there: `--dry-run --gpu-gb 80`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.run.before_start.dry_run import dry_run
from async_rl.run.processes.placement import Host
from learner.memory.sizes import GIB
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import make_config
from tests.kit.documents import ROOT
from tests.kit.model_headers import QWEN2_5, save_headers

pytestmark = pytest.mark.processes  # each measures passes of models without data

PARAMETERS = 64 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27_648 + 5120 + 2 * 1024 + 2 * 5120) + 5120 + (
    2 * 152_064 * 5120
)
"""The weights of Qwen2.5-32B."""


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """32B parameters on two nodes of eight GPUs, where there is no Ray cluster: weight files of headers alone."""
    def found_none(**_: object) -> None:
        raise ConnectionError

    save_headers(Qwen2Config(**QWEN2_5["32B"], max_position_embeddings=32_768), tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", found_none)
    monkeypatch.setattr("async_rl.run.before_start.dry_run.check_inputs", lambda *_: ["a caution of the inputs"])
    return load_config(ROOT / "configs" / "gsm8k_two_node.yaml", [
        f"model.path={tmp_path / 'model'}", "task.path=", "task.eval_path=", "task.name=reasoning_gym/chain_sum",
        "task.reward=", f"run.dir={tmp_path}",
    ])  # fmt: skip


def test_gpus_that_are_large_enough_get_a_table_and_too_small_ones_are_refused(two_nodes: Config) -> None:
    memory = [" ".join(line.split()) for line in dry_run(two_nodes, gpu_gb=141).splitlines()]
    for weights in (4 * PARAMETERS / 8, 2 * PARAMETERS / 4):  # of each learner rank, and of each server
        assert any(line.endswith(f"weights {weights / GIB:.2f} GiB") for line in memory)
    with pytest.raises(ConfigError, match=r"^memory:.*learner\.offload"):
        dry_run(two_nodes, gpu_gb=64)


def test_a_dry_run_on_a_cluster_of_one_gpu_has_the_share_that_the_start_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_headers(Qwen2Config(**QWEN2_5["0.5B"]), tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.nodes", list)
    monkeypatch.setattr("async_rl.run.before_start.dry_run.check_inputs", lambda config, task: [])
    hosts = [Host(name="10.0.0.1", cpus=16, gpus=1)]
    monkeypatch.setattr("async_rl.run.processes.placement.ray_hosts", lambda: hosts)
    config = make_config(tmp_path, staleness={"max": 2})
    has = 24e9 * 0.4 / GIB - 2 - 14 * config.max_running_replies * 151_936 / GIB
    with pytest.raises(ConfigError, match=rf"22\.35 GiB .*{has:.2f} GiB"):
        dry_run(config, gpu_gb=24)
    hosts[:] = [Host(name="10.0.0.1", cpus=16, gpus=2)]
    assert ", has 22.35 GiB\n" in dry_run(config, gpu_gb=24)
