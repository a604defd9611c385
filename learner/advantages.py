"""How much better than expected: pure functions from rewards (and values) to advantages."""

from __future__ import annotations

import torch
from torch import Tensor

GRPO_EPS = 1e-6


def group_advantages(rewards: Tensor) -> Tensor:
    """GRPO: A_i = (x_i - mean(x)) / (std(x) + 1e-6), std with ddof 1, over the rewards x of a rollout group.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.1. A group of equal rewards gets
    zeros.

    Args:
        rewards: [G], G >= 2.

    Returns:
        [G], one advantage for all tokens of a rollout.
    """
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + GRPO_EPS)


def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the masked-in tokens of each row; the others are stepped over.

        delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lam * A_{t+1},  return_t = A_t + V_t

    Source: Schulman et al. 2015, arXiv 1506.02438, equation 16. V after the last token is `bootstrap`; an
    answer is an episode that ends, also when it ran into its length limit, so the default is 0.

    Returns:
        (advantages, returns), [B, T] each; 0 where the mask is False.
    """
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.full_like(values[:, 0], bootstrap)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages * mask
    return advantages, (advantages + values) * mask
