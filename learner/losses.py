"""Per-token losses as pure functions; the caller sums them and divides by the minibatch's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp, so that no ratio overflows float32 sums."""


def ppo_clip_loss(
    logprobs: Tensor,  # [N] learner logprobs, with gradient
    proximal: Tensor,  # [N] proximal logprobs
    advantages: Tensor,  # [N]
    low: float,
    high: float,
    dual: float,
) -> tuple[Tensor, Tensor]:
    """Clipped policy loss around the proximal policy, r = exp(learner - proximal):

        L = max(-r A, -clip(r, 1 - low, 1 + high) A)
        L = min(L, -dual * A)  where A < 0 and dual > 0

    Sources: PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds, DAPO, arXiv 2503.14476;
    dual clip, Ye et al. 2019, arXiv 1912.09729, equation 5; centred on the proximal instead of the behaviour
    policy, Hilton et al. 2021, arXiv 2110.00641.

    Returns:
        (loss [N], clipped [N] bool: the clip took the gradient away).
    """
    ratio = torch.exp((logprobs - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if dual > 0:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss, bounded > plain


def value_loss(
    values: Tensor,  # [N] of the critic now, with gradient
    old_values: Tensor,  # [N] of the critic at step start
    returns: Tensor,  # [N]
    clip: float,
) -> Tensor:
    """Clipped squared error: max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2.

    clip 0 turns clipping off.

    Source: the value clipping of OpenAI baselines' ppo2.

    Returns:
        [N].
    """
    error = (values - returns).square()
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * error


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """k1 = log p - log q, whose mean over samples of p estimates KL(p || q) without bias; may be negative.

    Source: Schulman 2020, "Approximating KL Divergence".
    """
    return logprobs - other


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """k3 = q / p - 1 - log(q / p) >= 0: over samples of p as unbiased as k1, with less variance.

    Source: as for k1.
    """
    log_ratio = (other - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1 - log_ratio
