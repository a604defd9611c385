"""A critic is trained before the policy's pass where its targets are known, so that their activations never meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import values_of, weights_of

pytestmark = pytest.mark.processes  # together they compute for long

PENALTY = {"kind": "k1_reward", "coef": 0.1}
FIRST: list[dict[str, Any]] = [
    {"advantage": "gae"}, {"advantage": "gae", "epochs": 2}, {"advantage": "vtrace", "num_minibatches": 2},
    {"advantage": "vtrace", "whiten": True}, {"advantage": "gae", "kl": PENALTY, "epochs": 2},
]
LATER: list[dict[str, Any]] = [
    {"advantage": "vtrace"}, {"advantage": "gae", "kl": PENALTY},
    {"advantage": "vtrace", "epochs": 2, "old_logprobs": "interpolate"},
]


def open_updater(path: Path, algorithm: dict[str, Any]) -> Updater:
    return Updater(learner_config(path, algorithm=algorithm, critic={"lr": 1e-3}), torch.device("cpu"))


@pytest.mark.parametrize(
    ("algorithm", "is_first"), [*((each, True) for each in FIRST), *((each, False) for each in LATER)]
)
def test_the_critic_has_its_gradients_before_the_policys_pass_if_that_can_be(
    algorithm: dict[str, Any], is_first: bool, tiny_model_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = open_updater(tiny_model_path, algorithm)
    assert updater.critic is not None
    forward, weights = updater.policy.forward, list(updater.critic.parameters())
    seen: list[bool] = []

    def watched(inputs: Any) -> Any:
        if torch.is_grad_enabled():  # not the passes at step start
            seen.append(any(weight.grad is not None for weight in weights))
        return forward(inputs)

    monkeypatch.setattr(updater.policy, "forward", watched)
    updater.update(make_batch())
    assert seen and set(seen) == {is_first}


@pytest.mark.parametrize("algorithm", FIRST[::2])
def test_the_order_changes_no_bit_of_an_update(
    algorithm: dict[str, Any], tiny_model_path: Path, one_rank: None
) -> None:
    found: list[tuple[dict[str, float], dict[str, Tensor], list[Tensor]]] = []
    critic: Any
    for is_first in (True, False):
        updater = open_updater(tiny_model_path, algorithm)
        updater.objective.trains_critic_first = is_first
        metrics = [values_of(updater.update(make_batch(version, version))) for version in (0, 1)]
        critic = updater.critic
        values = [weight.detach().full_tensor().clone() for weight in critic.parameters()]
        found.append((metrics[-1], weights_of(updater), values))
    (first, policy, values), (later, other_policy, other_values) = found
    assert first == pytest.approx(later, rel=0, abs=0, nan_ok=True)
    assert all(torch.equal(policy[name], other_policy[name]) for name in policy)
    assert all(torch.equal(one, other) for one, other in zip(values, other_values, strict=True))
