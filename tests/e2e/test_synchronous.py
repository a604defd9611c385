"""A run with `staleness.max: 0` equals a plain generate-then-train loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from rollout_server.question import Question
from tests.kit.assembled import Run, run_assembled
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.reference_loop import Reference, Step, answers_of

STEPS = 10


def vowels(question: Question, response: str) -> float:
    """A reward that differs between the answers of an untrained model."""
    return sum(letter in "aeiou" for letter in response) / 8


def synchronous(smoke_yaml: Path, tmp_path: Path, *overrides: str) -> Config:
    return load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.steps={STEPS}", "staleness.max=0", "eval.num_prompts=0",
        "task.reward=tests.e2e.test_synchronous:vowels", *overrides,
    ])


def assert_same(config: Config, run: Run, steps: list[Step], reference: Reference) -> None:
    assert len(run.steps) == len(steps) == STEPS
    assert max(step["staleness/max"] for step in run.steps) == 0
    assert sum(step.grad_norm > 0.01 for step in steps) == STEPS  # there is something to learn in every batch
    for got, expected in zip(run.steps, steps, strict=True):
        assert got["policy/loss"] == pytest.approx(expected.loss, abs=1e-5)
        assert got["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-3)
        assert got["policy/entropy"] == pytest.approx(expected.entropy, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(config.run_dir / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for (name, a), b, c in zip(
        trained.named_parameters(), reference.model.parameters(), start.parameters(), strict=True
    ):
        moved, apart = (b - c).norm(), (a - b).norm()
        assert apart < 1e-2 * moved, f"{name}: {apart:.2e} apart after a way of {moved:.2e}"


@pytest.mark.e2e
def test_with_the_hf_engine_batches_and_losses_are_those_of_a_plain_loop(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    config = synchronous(smoke_yaml, tmp_path, "rollout.engine=hf", "weight_sync.transport=disk")
    run = run_assembled(config)
    reference = Reference(config)
    steps = []
    for batch, step in itertools.zip_longest(run.batches, reference.run(STEPS)):
        assert answers_of(batch) == step.answers, f"batch {batch.version}"
        steps.append(step)
    assert_same(config, run, steps, reference)


@pytest.mark.e2e
def test_with_sglang_losses_are_those_of_a_plain_loop_on_its_groups(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread
) -> None:
    config = synchronous(smoke_yaml, tmp_path, *sglang_server.overrides)
    run = run_assembled(config)
    for batch in run.batches:
        assert [group.group_id for group in batch.groups] == list(range(4 * batch.version, 4 * batch.version + 4))
        versions = np.concatenate([r.versions for group in batch.groups for r in group.rows])
        assert set(versions.tolist()) == {batch.version}
    reference = Reference(config)
    assert_same(config, run, [reference.train(answers_of(batch)) for batch in run.batches], reference)
    assert max(step["parity/precision/mean_abs"] for step in run.steps) < 1e-5
