"""Whole runs whose pushes are sparse, of adapters alone, or staged: servers hold the learner's bits after each of them.

What a server holds is compared with the folders that the learner writes of each version, which no push goes into.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.pipeline import run
from tests.kit.engines.noted_pushes import GLOO, expected_sums, noted
from tests.kit.engines.vllm import needs_vllm, vllm
from tests.kit.models import save_tiny_model
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

FORMS = {
    "delta": ["weight_sync.delta=true", "model.dtype=bfloat16", "learner.lr=1e-5", "staleness.max=0"],
    "adapter": ["weight_sync.lora=adapter", "model.lora.rank=4", "learner.lr=1e-2", "staleness.max=0"],
    "staging": ["weight_sync.double_buffer=device", "staleness.max=1"],  # so that a push meets answers that run
}
ROUNDING = {"delta": 2**-8, "adapter": 1e-4, "staging": 1e-4}
"""Allowed mean difference between logprobs of server and learner at one version. In bfloat16 both round their logits,
which are below 1 in an untrained model: 2^-8 is the distance of two such numbers at most. Measured: 8e-4 and 2e-7."""
STEPS = 3


def configured(smoke_yaml: Path, folder: Path, engine: str, form: str, *more: str) -> Config:
    return load_config(smoke_yaml, [
        f"run.dir={folder}", f"run.steps={STEPS}", f"rollout.engine={engine}", "eval.num_prompts=0",
        "weight_sync.bucket_bytes=65536", "task.reward=tests.e2e.test_old_kv:vowels", *FORMS[form], *more,
    ])  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("form", "engine"), [("delta", "sglang"), ("adapter", "hf"), ("staging", "sglang")])
def test_servers_hold_the_bits_of_each_version_of_a_run(
    smoke_yaml: Path, tmp_path: Path, form: str, engine: str
) -> None:
    config = configured(
        smoke_yaml, tmp_path, engine, form, f"weight_sync.transport={GLOO}", "checkpoint.models_every_steps=1"
    )
    assert config.weight_sync.verify_every > 0
    run(config)
    pushes = noted(config.run_dir)
    assert sorted(pushes) == [1, 2, 3]
    dtype, seen = torch.bfloat16 if form == "delta" else torch.float32, set()
    for version, sums in pushes.items():
        tensors = load_file(config.run_dir / "models" / f"step_{version}" / "model.safetensors")
        expected = expected_sums(engine, tensors, dtype)
        served = sums["rollout/0"]
        assert {name: served.get(name) for name in expected} == expected
        assert set(served) - set(expected) <= {"lm_head.weight"}  # tied, so that folders have it once
        seen.add(tuple(expected.values()))
    assert len(seen) == STEPS
    check_records(config, form, sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize)


@pytest.mark.parametrize(("engine", "form"), [vllm("delta")])
def test_vllm_samples_with_the_learners_weights_after_such_pushes(
    smoke_yaml: Path, tmp_path: Path, form: str, engine: str
) -> None:
    """On a CPU vLLM packs its weights, so that they can't be compared bit by bit."""
    needs_vllm()
    save_tiny_model("tiny-qwen3", tmp_path / "model", seed=0)  # its heads are what vLLM's kernels take
    config = configured(smoke_yaml, tmp_path, engine, form, f"model.path={tmp_path / 'model'}")
    run(config)
    tensors = load_file(config.run_dir / "model" / "model.safetensors")
    itemsize = 2 if form == "delta" else 4
    check_records(config, form, sum(tensor.numel() for tensor in tensors.values()) * itemsize)


def check_records(config: Config, form: str, whole_bytes: int) -> None:
    """Check what a run has logged of its pushes; `whole_bytes` are those of a push of all weights."""
    records = [record for record in logged(config.run_dir) if "staleness/max" in record]
    assert len(records) == STEPS
    mismatches = [record["parity/precision/mean_abs"] for record in records if "parity/precision/mean_abs" in record]
    assert len(mismatches) == STEPS or config.staleness.max > 0  # there are none where all tokens are of older versions
    assert mismatches
    assert max(mismatches) < ROUNDING[form]
    pushed = [record["push/bytes"] for record in records]
    if form == "delta":
        shares = [record["push/changed_share"] for record in records]
        assert all(0 < share < 0.5 for share in shares)  # servers got whole weights when they joined
        assert max(pushed) < whole_bytes / 2
    elif form == "adapter":
        assert max(pushed) < whole_bytes / 10
    else:
        assert pushed == [whole_bytes] * STEPS
