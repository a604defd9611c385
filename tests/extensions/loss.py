"""A loss from outside the packages: the plain policy gradient."""

from __future__ import annotations

import torch

from async_rl.seams import Loss
from learner.algorithms.losses import LossInputs, LossOutput


def policy_gradient(x: LossInputs) -> LossOutput:
    """L = -A log p; no token is clipped."""
    return LossOutput(-x.advantages * x.logprobs, torch.zeros_like(x.trained))


POLICY_GRADIENT = Loss(function=policy_gradient)
