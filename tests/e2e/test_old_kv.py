"""With `weight_sync.on_update: in_place` an answer goes on from KV of older weights, unlike a recompute."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config.loading import load_config
from rollout_server.question import Question
from tests.kit.assembled import run_assembled

TOKENS = 96


def vowels(question: Question, response: str) -> float:
    """A reward that differs between the answers of an untrained model."""
    return sum(letter in "aeiou" for letter in response) / TOKENS


@pytest.mark.e2e
@pytest.mark.nightly
def test_only_old_kv_separates_in_place_tokens_from_a_recompute(smoke_yaml: Path, tmp_path: Path) -> None:
    """On the hf engine. SGLang's logprobs over mixed KV are the same to 1e-4: test_server_updates.py."""
    config = load_config(smoke_yaml, [
        f"run.dir={tmp_path}", "run.steps=16", "staleness.max=1", "eval.num_prompts=0",
        f"rollout.max_response_tokens={TOKENS}", "learner.lr=1e-3", "task.reward=tests.e2e.test_old_kv:vowels",
        "rollout.engine=hf", "weight_sync.transport=disk",
    ])
    steps = run_assembled(config).steps
    old, fresh = (
        [step.get(f"parity/{name}/mean_abs", math.nan) for step in steps] for name in ("old_kv", "precision")
    )
    assert np.nanmax(fresh) < 1e-4, "engine and learner compute the same where the KV is of one version"
    assert np.nanmean(old) > 10 * np.nanmean(fresh)
