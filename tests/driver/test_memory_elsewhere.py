"""The memory of a run over several hosts is known before any of them is there: `--dry-run --gpu-gb 80`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from async_rl.base.config import Config, Limit
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.pipeline import check_ranks_memory
from async_rl.run.before_start.dry_run import dry_run
from async_rl.run.processes.actors import LearnerActor, Origin
from async_rl.run.processes.placement import Host, decide_placement, host_demands
from learner.memory.room import GIB
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


def test_gpus_that_are_large_enough_get_a_table_for_each_rank_and_server(two_nodes: Config) -> None:
    text = dry_run(two_nodes, gpu_gb=141)
    memory = [" ".join(line.split()) for line in text.partition("# memory\n")[2].splitlines()]
    assert memory[0] == "# smallest GPU: 131.32 GiB"
    assert memory[1].startswith("# each of 8 learner rank(s): at most 87.")
    assert memory[2] == f"# policy: weights {4 * PARAMETERS / 8 / GIB:.2f} GiB"
    servers = memory.index("# each of 2 rollout server(s):")
    assert memory[servers + 1] == f"# weights {2 * PARAMETERS / 4 / GIB:.2f} GiB"
    assert "# a caution of the inputs" in memory


def test_gpus_that_hold_small_micro_batches_alone_are_told_which(two_nodes: Config) -> None:
    (caution,) = [line for line in dry_run(two_nodes, gpu_gb=80).splitlines() if line.startswith("# memory: ")]
    assert " 87." in caution and "learner.max_tokens_per_microbatch" in caution and "learner.offload" in caution


def test_gpus_that_are_too_small_are_refused_with_what_would_fit(two_nodes: Config) -> None:
    with pytest.raises(ConfigError, match=r"^memory:.*learner\.offload"):
        dry_run(two_nodes, gpu_gb=64)


class Asked:
    """The processes of a run, on hosts whose GPUs have these sizes; what they are asked for is answered at once."""

    def __init__(self, asked: Config, config: Config, gpus: int, **gpu_bytes: int) -> None:
        self._config, self._gpus, self._server_bytes = config, gpus, gpu_bytes.pop("rollout_0")
        self._learner = LearnerActor.__new__(LearnerActor)
        self._learner._config, self._learner._origin = config, Origin("", asked)
        self.actors: dict[str, Any] = {
            name.replace("_", "/"): SimpleNamespace(gpu_bytes=SimpleNamespace(remote=lambda size=size: size))
            for name, size in gpu_bytes.items()
        }
        self.actors["learner/0"].check_memory = SimpleNamespace(remote=self._learner.check_memory)

    def gather(self, calls: dict[str, Any], limit: Limit, what: str) -> dict[str, Any]:
        return calls

    def check(self) -> list[str]:
        """Check the learner's memory, then that of the server, as its start does."""
        processes: Any = self
        found = check_ranks_memory(processes, ["learner/0"], self._config.timeouts.limit("startup_s"), self._gpus)
        learner: Any = self._learner
        learner.check_server_memory(self._server_bytes, self._gpus)
        return found


@pytest.mark.parametrize("servers", [1, 2])
def test_a_start_on_a_cluster_of_one_gpu_is_checked_as_one_that_shares_it(
    servers: int, tmp_path: Path
) -> None:
    save_headers(Qwen2Config(**QWEN2_5["0.5B"]), tmp_path)
    asked = make_config(tmp_path, staleness={"max": 2}, placement={"rollout": {"servers": servers}})
    config = resolve(asked, decide_placement(asked, host_demands(asked, 1)))

    def check(gpus: int) -> list[str]:
        return Asked(asked, config, gpus, learner_0=24 * 10**9, rollout_0=24 * 10**9).check()

    extra = 2 + 14 * config.max_running_replies * 151_936 / GIB  # graphs, and the logits of a server's fullest batch
    has = 24e9 * 0.4 / GIB - extra * servers
    with pytest.raises(ConfigError, match=rf"22\.35 GiB .*{has:.2f} GiB"):
        check(1)
    assert check(1 + servers) == []


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


@pytest.mark.nightly
def test_a_start_on_several_hosts_is_checked_by_its_smallest_gpus(two_nodes: Config) -> None:
    def check(**gpu_bytes: int) -> list[str]:
        return Asked(two_nodes, two_nodes, 16, **gpu_bytes).check()

    gb = 10**9
    assert check(learner_0=141 * gb, rollout_0=141 * gb) == []
    assert check(learner_0=141 * gb, rollout_0=80 * gb) == []  # each is compared with GPUs of its own kind
    (caution,) = check(learner_0=80 * gb, rollout_0=141 * gb)
    assert " 87." in caution and "74.51 GiB" in caution
    with pytest.raises(ConfigError, match=r"^memory:.*learner\.offload"):
        check(learner_0=64 * gb, rollout_0=80 * gb)
    with pytest.raises(ConfigError, match=r"^rollout\.gpu_memory_utilization"):
        check(learner_0=141 * gb, rollout_0=16 * gb)
    assert check(learner_0=0, rollout_0=80 * gb) == []  # a host without GPUs, or whose driver names none


def test_without_a_size_no_memory_of_other_hosts_is_told(two_nodes: Config) -> None:
    text = dry_run(two_nodes)
    assert "# memory\n# not computed: the run spans other hosts; say how large their GPUs are: --gpu-gb 80\n" in text


def test_a_run_on_this_host_takes_no_size(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("async_rl.run.before_start.dry_run.check_inputs", lambda config, task: [])
    with pytest.raises(ConfigError, match="--gpu-gb is for runs over several hosts"):
        dry_run(make_config(model_folder), gpu_gb=80)
