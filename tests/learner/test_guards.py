"""Limits of a step: KL limits, numbers that aren't finite, dropout, batches without a trained token."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    MasksConfig,
    ModelConfig,
)
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.types import Batch
from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import batch_logprobs, values_of, weights_of

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
LEARNER = LearnerConfig(prompts_per_step=3, lr=3e-2, max_tokens_per_microbatch=40)


def open_updater(path: Path, **algorithm: Any) -> Updater:
    config = learner_config(path, algorithm=AlgorithmConfig(**algorithm), learner=LEARNER, critic=CriticConfig(lr=1e-3))
    return Updater(config, CPU)


def all_weights(updater: Updater) -> dict[str, Tensor]:
    found = weights_of(updater)
    if updater.critic is not None:
        found |= {f"critic.{n}": p.full_tensor().clone() for n, p in updater.critic.named_parameters()}  # type: ignore[attr-defined]
    return found


def kl_by_hand(path: Path, batch: Batch) -> float:
    """k3 of KL(behaviour || policy of the folder), mean over trained tokens."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    terms = []
    for (g, i), ours in batch_logprobs(lm, batch).items():
        row = batch.groups[g].rows[i]
        difference = ours.double().numpy() - row.logprobs
        terms.append((np.exp(difference) - 1 - difference)[row.mask])
    return float(np.concatenate(terms).mean())


@pytest.mark.parametrize("algorithm", [{}, {"epochs": 2, "num_minibatches": 2, "advantage": "gae"}])
def test_a_batch_over_the_kl_limit_is_counted_and_moves_nothing(
    tiny_model_path: Path, one_rank: None, algorithm: dict[str, Any]
) -> None:
    batch = make_batch()
    kl = kl_by_hand(tiny_model_path, batch)
    for limit, skipped in ((0.999 * kl, 1), (1.001 * kl, 0)):
        updater = open_updater(tiny_model_path, skip_batch_kl=limit, **algorithm)
        before = all_weights(updater)
        metrics = values_of(updater.update(batch))
        assert metrics["policy/skipped_batches"] == skipped
        assert ("policy/grad_norm" in metrics) == (not skipped)
        stays = all(torch.equal(tensor, before[name]) for name, tensor in all_weights(updater).items())
        assert stays == bool(skipped)
    assert "policy/skipped_batches" not in values_of(open_updater(tiny_model_path, **algorithm).update(batch))


def test_epochs_end_as_soon_as_the_policy_has_moved_too_far(tiny_model_path: Path, one_rank: None) -> None:
    """The reference takes one step a time and measures how far the next minibatch is from step start."""
    batch = make_batch()
    epochs, limits, expected = 3, [], []
    for taken in range(1, epochs + 1):
        updater = open_updater(tiny_model_path, epochs=taken)
        updater.update(batch)
        limits.append(float(np.mean(kl_moved(tiny_model_path, updater, batch))))
        expected.append(weights_of(updater))
    assert limits[0] < limits[1]
    for stop in (0, 1):  # just under what step `stop + 1` has moved: no further step is taken
        updater = open_updater(tiny_model_path, epochs=epochs, early_stop_kl=0.999 * limits[stop])
        assert values_of(updater.update(batch))["policy/early_stops"] == 1
        for name, tensor in weights_of(updater).items():
            torch.testing.assert_close(tensor, expected[stop][name], atol=0, rtol=0)
    never = open_updater(tiny_model_path, epochs=epochs, early_stop_kl=100.0)
    assert values_of(never.update(batch))["policy/early_stops"] == 0
    assert all(torch.equal(tensor, expected[2][name]) for name, tensor in weights_of(never).items())


def test_a_policy_that_is_stopped_early_lets_the_critic_take_its_steps(tiny_model_path: Path, one_rank: None) -> None:
    batch = make_batch()
    stopped, whole, once = (
        open_updater(tiny_model_path, advantage="gae", num_minibatches=2, epochs=epochs, early_stop_kl=limit)
        for epochs, limit in ((3, 1e-9), (3, 0.0), (1, 0.0))
    )
    metrics = {name: values_of(u.update(batch)) for name, u in (("stopped", stopped), ("whole", whole), ("once", once))}
    assert metrics["stopped"]["policy/early_stops"] == 1
    assert metrics["stopped"]["critic/loss"] == metrics["whole"]["critic/loss"] != metrics["once"]["critic/loss"]
    weights = [all_weights(updater) for updater in (stopped, whole)]
    policy = [name for name in weights[0] if not name.startswith("critic.")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0].keys() - set(policy))
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in policy)


@pytest.mark.parametrize("m2po", [0.0, 0.5])
def test_dropout_does_not_reach_the_proximal_logprobs(tiny_model_path: Path, one_rank: None, m2po: float) -> None:
    """On fresh data with one optimizer step a batch: weights of 1, whatever the dropout of the gradient's pass."""
    lora = LoraConfig(rank=4, dropout=0.5)
    config = learner_config(
        tiny_model_path, model=ModelConfig(path=str(tiny_model_path), lora=lora), learner=LEARNER,
        algorithm=AlgorithmConfig(correction=CorrectionConfig(masks=MasksConfig(m2po=m2po))),
    )
    updater = Updater(config, CPU)
    for _ in range(2):  # adapters start at zero
        updater.update(make_batch(temperature=1.0))
    batch = make_batch(temperature=1.0)
    for group in batch.groups:
        for row in group.rows:
            tokens = [*group.prompt_tokens.tolist(), *row.tokens.tolist()]
            row.logprobs[:] = updater.probe_logprobs(tokens)[len(group.prompt_tokens) - 1 :]
    metrics = values_of(updater.update(batch))
    assert metrics["parity/precision/mean_abs"] < 1e-5
    assert metrics["offpolicy/ess"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["offpolicy/kl_proximal_learner_k3"] > 1e-3  # the gradient's own pass has dropout


@pytest.mark.parametrize(
    "algorithm",
    [
        {}, {"advantage": "gae", "whiten": True}, {"advantage": "vtrace"}, {"aggregation": "sequence_mean"},
        {"correction": CorrectionConfig(kind="token_tis", batch_normalised=True, masks=MasksConfig(m2po=0.04))},
    ],
)  # fmt: skip
def test_a_batch_without_any_trained_token_raises_nothing(
    tiny_model_path: Path, one_rank: None, algorithm: dict[str, Any]
) -> None:
    batch = make_batch()
    for group in batch.groups:
        for row in group.rows:
            row.mask[:] = False
    metrics = values_of(open_updater(tiny_model_path, **algorithm).update(batch))
    assert metrics["policy/loss"] == 0 == metrics["policy/grad_norm"]
    assert "staleness/max" not in metrics and all(np.isfinite(list(metrics.values())))


def kl_moved(path: Path, updater: Updater, batch: Batch) -> list[float]:
    """k3 of KL(policy of the folder || policy now) at every trained token."""
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    now = copy.deepcopy(start)
    now.load_state_dict(weights_of(updater), strict=False)
    terms: list[float] = []
    before, after = batch_logprobs(start, batch), batch_logprobs(now, batch)
    for (g, i), p in before.items():
        moved = after[g, i].double() - p.double()
        terms += (torch.exp(moved) - 1 - moved)[torch.tensor(batch.groups[g].rows[i].mask)].tolist()
    return terms


@pytest.mark.parametrize("most", [2])
def test_steps_without_finite_numbers_are_skipped_and_so_many_in_a_row_end_the_run(
    tiny_model_path: Path, one_rank: None, most: int
) -> None:
    good, bad = make_batch(), make_batch()
    bad.groups[0].rows[0].logprobs[:] = float("nan")
    bad.groups[0].rows[0].mask[:] = True
    config = learner_config(tiny_model_path, learner=dataclasses.replace(LEARNER, max_skipped_steps=most))
    updater = Updater(config, CPU)
    before = weights_of(updater)
    for _ in range(most - 1):
        metrics = values_of(updater.update(bad))
        assert metrics["policy/skipped_steps"] == 1 and "policy/loss" not in metrics
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(updater).items())
    assert values_of(updater.update(good))["policy/skipped_steps"] == 0
    for _ in range(most - 1):
        updater.update(bad)
    with pytest.raises(AsyncRLError, match=rf"^policy: {most} "):
        updater.update(bad)
    skipping = open_updater(tiny_model_path, skip_batch_kl=1e-9)  # NaN is over no limit: it is counted as what it is
    metrics = values_of(skipping.update(bad))
    assert (metrics["policy/skipped_steps"], metrics["policy/skipped_batches"]) == (1, 0)


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        ("early_stop_kl", {"early_stop_kl": 0.1}), ("skip_batch_kl", {"skip_batch_kl": -1.0}),
        ("skip_batch_kl", {"skip_batch_kl": 1.0, "epochs": 2, "old_logprobs": "interpolate"}),
    ],
)
def test_kl_limits_that_could_not_act_are_refused(key: str, algorithm: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.{key} "):
        AlgorithmConfig(**algorithm)


def test_weights_that_are_not_finite_are_named_at_load(tmp_path: Path, tiny_model_path: Path, one_rank: None) -> None:
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    with torch.no_grad():
        lm.model.layers[0].self_attn.q_proj.weight[1, 2] = torch.nan
    lm.save_pretrained(tmp_path / "model")
    for network in ("policy", "critic"):
        algorithm = AlgorithmConfig(advantage="gae" if network == "critic" else "grpo")
        paths = {"policy": tiny_model_path, "critic": "", network: tmp_path / "model"}
        critic = CriticConfig(path=str(paths["critic"]))
        config = learner_config(Path(paths["policy"]), algorithm=algorithm, critic=critic)
        with pytest.raises(ConfigError, match=r"model.*model\.layers\.0\.self_attn\.q_proj\.we"):
            Updater(config, CPU)


def test_a_step_that_leaves_weights_not_finite_ends_the_run(tiny_model_path: Path, one_rank: None) -> None:
    config = learner_config(tiny_model_path, learner=LearnerConfig(prompts_per_step=3, lr=3e38, weight_decay=100.0))
    updater = Updater(config, CPU)
    with pytest.raises(AsyncRLError, match=r"^policy: .* lm\..*NaN"):
        updater.update(make_batch())


def test_the_parity_of_a_batch_is_that_of_step_start_however_many_steps_it_takes(
    tiny_model_path: Path, one_rank: None
) -> None:
    batch = make_batch(groups=6)
    once, twice = (
        values_of(open_updater(tiny_model_path, num_minibatches=parts, epochs=parts).update(batch)) for parts in (1, 2)
    )
    keys = [key for key in once if key.startswith("parity/precision/")]
    assert once["parity/precision/tokens"] > 50 and "parity/precision/surprise" in keys
    assert {key: twice[key] for key in keys} == pytest.approx({key: once[key] for key in keys}, rel=1e-4, abs=1e-6)
