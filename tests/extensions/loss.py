"""A loss from outside the packages, with a setting and a metric: the plain policy gradient."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rl.base.config.section import section
from async_rl.base.seams import Loss
from learner.algorithms.losses import LossInputs, LossOutput, TokenMetric


@section("algorithm.params")
class PolicyGradientSettings:
    """The settings of the loss; a run sets them as algorithm.params.bound=0.5."""

    bound: Annotated[float, Field(gt=0)] = 1.0
    """Advantages are held in [-bound, bound]."""


def policy_gradient(x: LossInputs, settings: PolicyGradientSettings) -> LossOutput:
    """L = -clip(A, -bound, bound) log p. The metric `loss/bounded_fraction` is the share of tokens at the bound."""
    advantages = x.advantages.clamp(-settings.bound, settings.bound)
    bounded = advantages != x.advantages
    share = TokenMetric(bounded.double(), by="batch/response_tokens", unit="share")
    return LossOutput(-advantages * x.logprobs, bounded, {"bounded_fraction": share})


POLICY_GRADIENT = Loss(function=policy_gradient, settings=PolicyGradientSettings)
