"""What multiplies the loss for being off-policy. Detached; in log space, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.losses import MAX_LOG_RATIO


def importance_weights(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """rho = exp(proximal - behaviour), which turns samples of the behaviour policy into the proximal's.

    Source: decoupled PPO, Hilton et al. 2021, arXiv 2110.00641.

    Args:
        proximal, behaviour: [N] logprobs of the sampled tokens.

    Returns:
        [N], detached.
    """
    log_ratio = proximal.detach().float() - behaviour.float()
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def token_tis(
    weights: Tensor,  # [N] importance weights
    cap: float,
) -> Tensor:
    """Token-level truncated importance sampling: w = min(rho, cap).

    Truncated tokens stay in the loss and in its denominator. Sources: Ionides 2008, "Truncated importance
    sampling"; for engine and staleness gaps of language models Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training".
    """
    return weights.clamp(max=cap)
