"""Every preset and KL term trains a real model, with one optimizer step a batch and with several."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from async_rl.base.config import AlgorithmConfig, Config
from async_rl.base.config.algorithm import PRESETS
from async_rl.base.config.loading import load_config
from async_rl.base.types import Batch
from learner.algorithms.objective import Objective
from learner.loop.updater import Updater
from learner.models.policy import full_parameters
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch

pytestmark = pytest.mark.processes  # together they compute for long

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def algorithm_of(*overrides: str) -> AlgorithmConfig:
    """The section of a loaded configuration: presets are applied where it is loaded."""
    return load_config(QUICKSTART, [f"algorithm.{override}" for override in overrides]).algorithm


def batch_with_baselines() -> Batch:
    batch = make_batch(version=2)
    for group in batch.groups:
        for row in group.rows:
            row.versions[: len(row.versions) // 2] = 1
    groups = [dataclasses.replace(group, start_version=1, baseline_reward=0.4) for group in batch.groups]
    return dataclasses.replace(batch, groups=tuple(groups))


def trained(config: Config) -> dict[str, float]:
    """Metrics of an update, which must have moved the policy."""
    updater = Updater(config, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in full_parameters(updater.policy, torch.float32)}
    metrics = {metric.key: metric.value for metric in updater.update(batch_with_baselines())}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["policy/skipped_steps"] == 0 and metrics["policy/grad_norm"] > 0
    after = dict(full_parameters(updater.policy, torch.float32))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    return metrics


@pytest.mark.parametrize(("preset", "steps"), [("grpo", 1), ("ppo", 1), *((preset, 2) for preset in PRESETS)])
def test_a_preset_trains(preset: str, steps: int, tiny_model_path: Path, one_rank: None) -> None:
    algorithm = algorithm_of(f"preset={preset}", f"epochs={steps}", f"num_minibatches={steps}")
    metrics = trained(learner_config(tiny_model_path, algorithm=algorithm))
    moved = metrics["offpolicy/kl_proximal_learner_k3"]
    assert moved > 1e-6 if steps > 1 else moved < 1e-9
    assert (metrics["offpolicy/masked_fraction"] > 0) == (preset in ("m2po", "icepop", "kpop"))
    assert ("vtrace/reach" in metrics) == (preset == "vtrace")
    assert metrics["by_staleness/0/tokens"] + metrics["by_staleness/1/tokens"] > 0


@pytest.mark.parametrize(("kind", "advantage"), [
    ("k1_reward", "grpo"), ("k2_loss", "grpo"), ("k3_loss", "grpo"), ("k1_reward", "gae"),
])
def test_the_divergence_from_the_reference_is_zero_at_first_and_then_grows(
    kind: str, advantage: str, tiny_model_path: Path, one_rank: None
) -> None:
    algorithm = algorithm_of(f"advantage={advantage}", f"kl={{kind: {kind}, coef: 0.1, target: 0.01}}")
    updater = Updater(learner_config(tiny_model_path, algorithm=algorithm), torch.device("cpu"))
    divergences, coefficients = [], []
    for _ in range(3):
        metrics = {metric.key: metric.value for metric in updater.update(batch_with_baselines())}
        divergences.append(metrics["kl/reference"])
        coefficients.append(metrics["kl/coef"])
    assert divergences[0] == pytest.approx(0.0, abs=1e-9) and divergences[2] > 1e-6
    assert coefficients[:2] == pytest.approx([0.1, 0.098])  # below its target: the coefficient falls


@pytest.mark.parametrize(
    ("overrides", "makes_pass"),
    [
        ([], False), (["advantage=gae"], False), (["advantage=reinforce_pp"], False), (["kl.kind=k1_reward"], False),
        (["old_logprobs=rollout"], False), (["whiten=true"], False), (["epochs=2"], True), (["num_minibatches=2"],
        True),
        (["old_logprobs=rollout", "epochs=2"], True), (["old_logprobs=interpolate", "epochs=2"], False),
        (["correction={kind: token_tis, batch_normalised: true}"], True), (["correction.masks.m2po=0.04"], True),
        (["advantage=gae", "whiten=true"], True), (["whiten=true", "kl.kind=k1_reward"], True),
        (["advantage=reinforce_pp", "kl.kind=k1_reward"], True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_policy_makes_a_pass_at_step_start_in_the_documented_cases(
    overrides: list[str], makes_pass: bool, dropout: float
) -> None:
    """The cases are those of docs/reference/algorithms.md, which lists them below `algorithm.old_logprobs`."""
    model = {"path": "models/x", "lora": {"rank": 4, "dropout": dropout}}
    config = learner_config(algorithm=algorithm_of(*overrides), model=model)
    has_noise = dropout > 0 and config.algorithm.old_logprobs != "interpolate"
    assert Objective(config).computes_proximal == (makes_pass or has_noise)
