"""Runs that never sample some tokens: engine and learner have one distribution, and ratios are 1 on-policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.model_folder import forbidden_tokens
from tests.kit.assembled import Run, run_assembled
from tests.kit.engines.in_thread import EngineInThread

pytestmark = pytest.mark.e2e

HF = ["rollout.engine=hf", "weight_sync.transport=disk"]
NARROWED = ["rollout.top_p=0.9", "rollout.min_p=0.005"]
STEPS = 3
OFF_POLICY = ("parity/precision/mean_abs", "offpolicy/kl_behaviour_proximal", "offpolicy/kl_behaviour_proximal_k3")


def trained(smoke_yaml: Path, folder: Path, engine: list[str]) -> Run:
    """Train on-policy with the setting; returns the run, after a look at its answers."""
    config = load_config(smoke_yaml, [
        f"run.dir={folder}", f"run.steps={STEPS}", "staleness.max=0", "eval.num_prompts=0", "rollout.group_size=8",
        "rollout.forbid_special_tokens=true", "algorithm.kl.kind=k2_loss", "algorithm.kl.coef=0.01",
        "algorithm.entropy_coef=0.1", *engine,
    ])  # fmt: skip
    forbidden = forbidden_tokens(config)
    assert len(forbidden) == 3, "all special tokens of the tokenizer but the one that ends an answer"
    run = run_assembled(config)
    rows = [row for batch in run.batches for group in batch.groups for row in group.rows]
    tokens = [int(token) for row in rows for token in row.tokens]
    supports = [row.support for row in rows if row.support is not None]
    assert len(supports) == (len(rows) if config.records_support else 0)
    assert all((support.sizes > 0).all() and support.sizes.mean() < 100 for support in supports)
    assert not {int(token) for support in supports for token in support.ids} & set(forbidden)
    assert len(run.steps) == STEPS and len(tokens) > 1000 and not set(tokens) & set(forbidden)
    assert max(step["staleness/max"] for step in run.steps) == 0
    return run


def assert_on_policy(run: Run) -> None:
    for step in run.steps:
        assert all(abs(step[key]) < 1e-5 for key in OFF_POLICY), step
        assert step["offpolicy/is_weight_mean"] == pytest.approx(1, abs=1e-5)
    assert run.steps[0]["kl/reference"] == pytest.approx(0, abs=1e-6), "the reference has the same distribution"
    assert run.steps[-1]["kl/reference"] > 1e-6, "the policy moves"


@pytest.mark.parametrize("narrowed", [[], pytest.param(NARROWED, marks=pytest.mark.nightly)])
def test_ratios_are_1_where_special_and_improbable_tokens_are_not_sampled(
    smoke_yaml: Path, tmp_path: Path, narrowed: list[str]
) -> None:
    assert_on_policy(trained(smoke_yaml, tmp_path, [*HF, *narrowed]))


def test_ratios_are_1_with_sglang_where_such_tokens_are_not_sampled(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread
) -> None:
    assert_on_policy(trained(smoke_yaml, tmp_path, [*sglang_server.overrides, *NARROWED]))
