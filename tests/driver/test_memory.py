"""The memory of a run is known before it starts: what does not fit is refused, or told with what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from async_rl.base.config.loading import load_config, read_yaml
from async_rl.base.errors import ConfigError
from async_rl.run.before_start import gpus as host_gpus
from async_rl.run.before_start.dry_run import dry_run
from learner.loop.updater import decide_gradient_checkpointing
from learner.memory.memory_plan import GRAPHS_BYTES, MemoryPlan, RankMemory
from learner.memory.sizes import (
    GIB,
    batch_bytes,
    free_room,
)
from tests.kit.configs import learner_config, make_config
from tests.kit.model_headers import QWEN2_5, save_headers

pytestmark = pytest.mark.processes  # each measures passes of models without data, for about a second

H100_BYTES = 80 * 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-0.5B with four of its layers: headers of weight files without weights."""
    folder = tmp_path_factory.mktemp("headers")
    save_headers(Qwen2Config(**QWEN2_5["0.5B"] | {"num_hidden_layers": 4}), folder)
    return folder


def plan(folder: Path, gpus: int = 1, gpu_bytes: int = H100_BYTES, **sections: Any) -> MemoryPlan:
    return host_gpus.plan_memory(make_config(folder, **sections), gpus, gpu_bytes if gpus else 64 * GIB)


def test_a_rank_holds_its_part_of_weights_gradients_and_moments(folder: Path) -> None:
    parameters = 151_936 * 896 + 4 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 896 + 2 * 128 + 2 * 896) + 896
    for ranks in (1, 4):
        found = plan(folder, 8, placement={"learner": {"ranks": ranks}}).rank_memory()
        parts = {name.removeprefix("policy: "): size for name, size in found.parts.items()}
        assert parts["weights"] == parts["gradients"] == 4 * parameters // ranks
        assert parts["optimizer state"] == 8 * parameters // ranks
        assert found.host == {"checkpoint being written": 12 * parameters // ranks}
        assert found.peak == max(found.peaks.values()) > 16 * parameters // ranks


def test_ranks_that_split_rows_have_their_part_of_activations_embeddings_and_logits(folder: Path) -> None:
    def parts(slices: int, attention: str = "flash_attention_2") -> dict[str, int]:
        learner = {"sequence_parallel": slices, "max_tokens_per_microbatch": 16_384 // slices}
        settings: dict[str, Any] = {"learner": learner, "model": {"attn_implementation": attention}}
        found = plan(folder, 8, placement={"learner": {"ranks": 2}}, **settings).rank_memory()
        return {name.removeprefix("policy: "): size for name, size in found.parts.items()}

    whole, split = parts(1), parts(2)
    assert split["activations"] == whole["activations"] // 2
    assert whole["gathered"] - split["gathered"] == pytest.approx(151_936 * 896, rel=0.01)  # half of them in bfloat16
    assert whole["logits and head"] - split["logits and head"] == 2 * 151_936 * 896  # of 4 bytes; logits fill a chunk
    assert split["optimizer state"] == whole["optimizer state"]
    assert parts(2, "sdpa")["activations"] > parts(1, "sdpa")["activations"] // 2  # each rank has masks of whole rows


def test_what_is_offloaded_is_in_the_hosts_memory(folder: Path) -> None:
    peaks = {}
    for offload in ("none", "moments", "all"):
        found = plan(folder, learner={"offload": offload}).rank_memory()
        peaks[offload] = found.peak
        on_host = {name.removeprefix("policy: ") for name in found.host}
        state = "optimizer state"
        kept = {"none": set(), "moments": {state}, "all": {"weights", "gradients", state}}[offload]
        assert on_host == {"checkpoint being written", *kept}
    moments = plan(folder).rank_memory().parts["policy: optimizer state"]
    assert peaks["none"] - peaks["moments"] == moments and peaks["moments"] - peaks["all"] == moments


def test_an_optimizer_is_counted_with_what_it_keeps(folder: Path) -> None:
    def memory_with(**learner: Any) -> RankMemory:
        return plan(folder, 2, learner=learner).rank_memory()

    adamw = memory_with()
    sgd = memory_with(optimizer="SGD")
    momentum = memory_with(optimizer="SGD", optimizer_params={"momentum": 0.9})
    state = adamw.parts["policy: optimizer state"]
    assert sgd.parts["policy: optimizer state"] == 0
    assert momentum.parts["policy: optimizer state"] == state // 2
    assert adamw.peak - momentum.peak == momentum.peak - sgd.peak == state // 2
    assert sgd.host["checkpoint being written"] == adamw.host["checkpoint being written"] // 3
    assert not [line for line in plan(folder, 2, learner={"optimizer": "SGD"}).table() if "optimizer state" in line]


def test_frozen_weights_have_no_gradient_and_no_state(folder: Path) -> None:
    frozen = plan(folder, 2, model={"frozen": ["model.embed_tokens.*"]}).rank_memory()
    whole = plan(folder, 2).rank_memory()
    for part, each in (("gradients", 4), ("optimizer state", 8), ("weights", 0)):
        assert whole.parts[f"policy: {part}"] - frozen.parts[f"policy: {part}"] == each * 151_936 * 896


def test_auto_checkpoints_only_what_would_not_fit(folder: Path) -> None:
    needed = plan(folder, 2).rank_memory().peak
    assert not plan(folder, 2, round(1.01 * needed)).checkpoints
    tight = plan(folder, 2, round(0.99 * needed))
    assert tight.checkpoints and tight.rank_memory().peak < needed and tight.check() == []
    assert not plan(folder, 2, round(0.99 * needed), learner={"gradient_checkpointing": False}).checkpoints


def test_a_full_micro_batch_that_does_not_fit_is_told_with_what_would(folder: Path) -> None:
    never: dict[str, Any] = {"gradient_checkpointing": False}
    needed = plan(folder, 2, learner=never).rank_memory().peak
    (caution,) = plan(folder, 2, round(0.9 * needed), learner=never).check()
    assert "learner.gradient_checkpointing" in caution and "learner.max_tokens_per_microbatch" in caution
    # what it names does fit
    assert plan(folder, 2, round(0.9 * needed)).check() == []
    smaller = never | {"max_tokens_per_microbatch": 8192}
    assert plan(folder, 2, round(0.9 * needed), learner=smaller).check() == []


def test_a_model_that_no_setting_makes_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^memory:.*learner\.offload"):
        plan(folder, 2, 4 * 10**9).check()


def test_weights_that_are_staged_on_the_gpu_need_what_the_servers_share_leaves(folder: Path) -> None:
    def staged(staging: str, gpu_memory_utilization: float) -> MemoryPlan:
        return plan(folder, 2, rollout={"gpu_memory_utilization": gpu_memory_utilization},
            weight_sync={"double_buffer": staging})

    assert staged("device", 0.6).check() == staged("host", 0.97).check() == []
    found = staged("device", 0.6)
    lines = {" ".join(line.split()[:-2]): float(line.split()[-2]) for line in found.table() if "weights" in line}
    assert lines["staged weights"] == lines["weights"] == pytest.approx(found.weights / 2**20, abs=0.1)
    with pytest.raises(ConfigError, match=r"rollout\.gpu_memory_utilization.*weight_sync\.double_buffer"):
        staged("device", 0.97).check()


def test_a_share_too_small_for_the_weights_and_an_answer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.gpu_memory_utilization.*placement\.rollout\.tp"):
        plan(folder, 1, 24 * 10**9, rollout={"gpu_memory_utilization": 0.01}).check()


def test_in_turns_a_share_too_large_beside_what_the_learner_keeps_is_refused(folder: Path) -> None:
    parameters = 151_936 * 896 + 4 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 896 + 2 * 128 + 2 * 896) + 896
    kept = 12 * parameters + 3 * 2**29  # weights, two moments, the process; no gradients
    extra = 2 * GIB + 14 * make_config(folder).max_running_replies * 151_936
    room = 2 * (kept + extra)  # of which a server has the half

    def check(gpu_bytes: int, **sections: Any) -> None:
        turns: dict[str, Any] = {"placement": {"colocated": True}, "rollout": {"gpu_memory_utilization": 0.5}}
        plan(folder, 1, gpu_bytes, **turns | sections).check_servers()

    check(room)
    with pytest.raises(ConfigError, match=r"3\.\d\d GiB.*rollout\.gpu_memory_utilization to 0\.49"):
        check(room - 100)
    check(room - 100, rollout={"gpu_memory_utilization": 0.49})
    check(room - 100, learner={"offload": "moments"})
    check(room - 100, staleness={"max": 1}, placement={})  # at once the rank has what the servers leave


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (8, 1)])  # of two heads of keys and values in the model
def test_each_gpu_of_a_server_caches_one_head_at_least(folder: Path, tp: int, heads: int) -> None:
    planned = plan(folder, 1 + tp, placement={"rollout": {"tp": tp}})
    assert planned.kv_token == 2 * 4 * heads * 64 * 2  # keys and values, layers, heads, size, bytes of bfloat16


def test_on_a_cpu_all_processes_share_the_memory_of_the_host(folder: Path) -> None:
    one = plan(folder, 0)
    two = plan(folder, 0, placement={"learner": {"ranks": 2}, "rollout": {"servers": 2}})
    apart = plan(folder, 0, placement={"rollout": {"servers": 1}, "eval": {"servers": 1}}, eval={"every_steps": 1})
    assert apart.rank_room < one.rank_room
    assert "each of 1 rollout and 1 evaluation server(s):" in apart.table()
    assert not one.on_gpu and 2 * two.rank_room < one.rank_room < 64 * GIB
    assert one.estimate.dtype == torch.float32 and plan(folder).estimate.dtype == torch.bfloat16


def test_activations_of_policy_and_critic_add_up_only_where_the_critic_waits(folder: Path) -> None:
    first, later = (plan(folder, 2, algorithm={"advantage": name}).rank_memory() for name in ("gae", "vtrace"))
    assert first.parts == later.parts
    gathered = 2 * (151_936 * 896 + 896)  # embeddings and last norm in bfloat16, which the policy's pass has gathered
    assert later.peaks["embedding"] - first.peaks["embedding"] == first.parts["policy: activations"] + gathered
    assert later.peak > first.peak


def test_in_turns_a_share_is_checked_however_small_the_model(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_gpus, "gpus_here", lambda: 1.0)
    monkeypatch.setattr(host_gpus, "smallest_gpu_bytes", lambda: 24 * 10**9)

    def check(share: float) -> list[str]:
        turns: dict[str, Any] = {"placement": {"colocated": True}, "rollout": {"gpu_memory_utilization": share}}
        return host_gpus.check_memory(make_config(model_folder, learner={"max_tokens_per_microbatch": 1024}, **turns))

    assert check(0.6) == []
    with pytest.raises(ConfigError, match=r"^memory:.*rollout\.gpu_memory_utilization"):
        check(0.9)  # 20.1 GiB, and 2 and 1.5 for two processes, of 22.35


def test_a_servers_fullest_batch_follows_from_replies_and_vocabulary(folder: Path) -> None:
    """1,024 replies of Qwen's 151,936 words: 2 GiB that no server has yet when the learner measures what is free."""
    small, large = plan(folder), plan(folder, rollout={"max_groups_in_flight": 1000},
        learner={"prompts_per_step": 1000})
    model = small.estimate.networks[0].config
    assert batch_bytes(large.config, model) == 14 * 1024 * 151_936 > 2 * GIB
    more = 1024 - small.config.max_running_replies
    assert large.extra - small.extra == 14 * more * 151_936 and small.extra > GRAPHS_BYTES
    wide = Qwen2Config(vocab_size=1000, hidden_size=3584, intermediate_size=18_944)
    assert batch_bytes(small.config, wide) == 6 * 8192 * 18_944  # prompts take more than logits


def test_a_rank_beside_servers_leaves_room_for_their_fullest_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(folder, staleness={"max": 2}, rollout={"gpu_memory_utilization": 0.5})
    gpu = torch.device("cuda")
    found = {}
    for held in (1, 60):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, held=held: ((80 - held) * GIB, 80 * GIB))
        found[held] = free_room(config, gpu)
    assert found[1] == 79 * GIB
    assert found[60] == 20 * GIB - batch_bytes(config, plan(folder).estimate.networks[0].config)


def test_the_learner_resolves_auto_by_its_room(
    model_folder: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = learner_config(model_folder)
    assert config.learner.gradient_checkpointing == "auto"
    cpu = torch.device("cpu")
    assert decide_gradient_checkpointing(config, cpu) is False
    monkeypatch.setattr("learner.loop.updater.free_room", lambda config, device: 10_000)
    assert decide_gradient_checkpointing(config, cpu) is True
    for asked in (True, False):
        asks = learner_config(model_folder, learner={"gradient_checkpointing": asked})
        assert decide_gradient_checkpointing(asks, cpu) is asked


def test_a_dry_run_prints_all_settings_only_if_asked_and_then_is_valid_yaml(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.run.before_start.dry_run.check_inputs", lambda config, task: [])
    config = make_config(model_folder, rollout={"engine": "hf"})
    short, whole = dry_run(config), dry_run(config, shows_all=True)
    assert whole.startswith(short) and read_yaml(short)[0] is None
    assert load_config(read_yaml(whole)[0]) == config


@pytest.mark.parametrize(("rules", "buffer", "says"), [
    ({"top_p": 0.95}, {}, "about 7 (temperature 0.6) to 108 (temperature 1), at most 0.86 GB in the journal"),
    ({"top_p": 0.85}, {}, "about 5 (temperature 0.6) to 51 (temperature 1), at most 0.41 GB in the journal"),
    ({"top_p": 0.95, "top_k": 2}, {}, "about 4 (temperature 0.6) to 4 (temperature 1), at most 0.032 GB"),
    ({"min_p": 0.05}, {}, "about 16 (temperature 0.6) to 31 (temperature 1), at most 0.25 GB in the journal"),
    ({"top_p": 0.95}, {"journal_keep_steps": -1}, "at most 2.2 GB in the journal"),
    ({"top_p": 0.95}, {"journal": False}, "about 7 (temperature 0.6) to 108 (temperature 1)\n"),
    ({"top_p": 0.999}, {}, "about 16 (temperature 0.6) or far more (temperature 1)\n"),
])  # fmt: skip
def test_a_dry_run_says_what_the_supports_of_tokens_take(
    rules: dict[str, float], buffer: dict[str, Any], says: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps of 100 x 10 answers with 1000 tokens are 8 million tokens. A small support has 1.5 bytes for each id."""
    monkeypatch.setattr("async_rl.run.before_start.dry_run.check_inputs", lambda config, task: [])
    config = make_config(
        model_folder, rollout={"engine": "hf", "group_size": 10, "max_response_tokens": 1000, **rules},
        learner={"prompts_per_step": 100}, run={"steps": 20}, checkpoint={"every_steps": 4},
        buffer={"journal_keep_steps": 5, **buffer},
    )
    (line,) = (each for each in dry_run(config).splitlines(keepends=True) if "supports, bytes a sampled token" in each)
    assert says in line


@pytest.mark.nightly
def test_seven_billion_parameters_fit_eight_gpus_with_checkpoints_and_not_one(tmp_path: Path) -> None:
    save_headers(Qwen2Config(**QWEN2_5["7B"]), tmp_path)
    node: dict[str, Any] = {"placement": {"learner": {"ranks": 8}, "rollout": {"servers": 8}}}
    eight = plan(tmp_path, 16, **node)  # in GB: 11.4 weights, moments, 4.4 gradients, 3.6 gathered, 4.2 a block, 1.6
    assert eight.checkpoints and eight.check() == [] and 22 * GIB < eight.rank_memory().peak < 27 * GIB
    never = plan(tmp_path, 16, **node, learner={"gradient_checkpointing": False})
    assert 85 * GIB < never.rank_memory().peak < 115 * GIB  # by hand 70 GB for the MLPs' 4 x 18,944 numbers a token
    assert "learner.gradient_checkpointing" in never.check()[0]
    with pytest.raises(ConfigError, match=r"^memory:.*learner ranks"):
        plan(tmp_path, 2).check()
