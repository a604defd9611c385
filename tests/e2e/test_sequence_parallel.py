"""A run whose learner ranks split every row trains as one rank does, and resumes with rows split or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.base.run_dir.log_ratio_file import FOLDER
from async_rl.pipeline import run
from tests.kit.runs import logged

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]

SPLIT = ("placement.learner.ranks=2", "learner.sequence_parallel=2")
EXACT = ("policy/loss", "critic/loss", "policy/grad_norm", "kl/reference", "reward/mean", "batch/response_tokens")


def configured(smoke_yaml: Path, tmp_path: Path, name: str, *more: str) -> Config:
    """PPO with a KL term, so that policy, critic and reference are all split."""
    return load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.name={name}", "run.steps=4", "rollout.engine=hf", "eval.num_prompts=0",
        "algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.filter_zero_variance=false", "staleness.max=0",
        "algorithm.kl.kind=k2_loss", "checkpoint.every_steps=2", "weight_sync.bucket_bytes=65536", *more,
    ])


def records(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in logged(run_dir) if "policy/loss" in record}


def test_a_run_with_split_rows_trains_as_one_rank_does_and_resumes_either_way(smoke_yaml: Path, tmp_path: Path) -> None:
    whole = configured(smoke_yaml, tmp_path, "whole")
    run(whole)
    split = configured(smoke_yaml, tmp_path, "split", *SPLIT)
    summary = run(split)
    assert {"learner/0", "learner/1"} < set(summary["pools"])
    check_equal(split, whole)
    ratios = {path.name for path in (split.run_dir / FOLDER).iterdir()}
    assert ratios == {f"step_{step}.rank_0.npz" for step in range(1, 5)}  # the second rank has the same rows
    ends = [load_file(config.run_dir / "model" / "model.safetensors") for config in (split, whole)]
    assert_close(*ends, atol=1e-4, rtol=0)

    for source, more in ((split, ()), (whole, SPLIT)):
        resumed = configured(
            smoke_yaml, tmp_path, source.run.name, *more, f"run.resume={checkpoint_folder(source.run_dir, 2)}"
        )
        assert run(resumed)["resumes"] == 1
        check_equal(resumed, whole)


def check_equal(config: Config, whole: Config) -> None:
    expected, got = records(whole.run_dir), records(config.run_dir)
    assert list(got) == list(expected) == [1, 2, 3, 4]
    for step, record in got.items():
        for key in EXACT:
            assert record[key] == pytest.approx(expected[step][key], rel=1e-4, abs=1e-4), (step, key)
        assert record["parity/precision/mean_abs"] < 1e-4
