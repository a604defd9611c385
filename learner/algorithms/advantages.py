"""Advantages as pure functions of rewards, and of values where there is a critic.

Functions of a group take its rewards x [G] and give one advantage A_i for all tokens of row i; functions
of tokens take [B, T], one row for each of B rows. async_rl/base/seams/algorithms.py lists them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.masked_ops import bounded_exp


def grpo(rewards: Tensor, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """A_i = (x_i - mean(x)) / (std(x) + eps). Equal rewards give zeros. [G] -> [G], G >= 2.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.1.
    """
    return (rewards - rewards.mean()) / (rewards.std(correction=ddof) + eps)


def dr_grpo(rewards: Tensor) -> Tensor:
    """A_i = x_i - mean(x): GRPO without dividing by std(x), which favours groups of little spread. [G] -> [G].

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.
    """
    return rewards - rewards.mean()


def rloo(rewards: Tensor) -> Tensor:
    """A_i = x_i - mean_{j != i}(x_j) = G / (G - 1) * (x_i - mean(x)). [G] -> [G], G >= 2.

    Source: Kool et al. 2019; for language models Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards: Tensor) -> Tensor:
    """A_i = (x_i - mean(x)) / mean(x), zeros where the mean is not positive: rare successes weigh more. [G] -> [G].

    Source: prime-rl's `max_rl`.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else torch.zeros_like(rewards)


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = x_i - sum_j(L_j x_j) / sum_j(L_j), L_j the trained tokens of answer j. [G], [G] -> [G], sum(L) > 0.

    The baseline b with the least variance of the gradient, sum_j |g_j|^2 x_j / sum_j |g_j|^2 with g_j the gradient of
    log pi(answer j), if |g_j|^2 grows as L_j: the gradients of single tokens are about as long and not aligned. It
    minimises sum_j L_j (x_j - b)^2, and the advantages of all tokens of a group add up to zero.

    Source: Hao et al. 2025 (OPO), arXiv 2505.23585.
    """
    return rewards - (lengths * rewards).sum() / lengths.sum()


def remax(rewards: Tensor, greedy_reward: float) -> Tensor:
    """A_i = x_i - x_greedy, the reward of the greedy answer to the same prompt. [G] -> [G].

    Source: Li et al. 2023 (ReMax), arXiv 2310.10505.
    """
    return rewards - greedy_reward


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return R_t = r_t + gamma * R_{t+1} over the tokens in the mask, 0 elsewhere. [B, T], [B, T] -> [B, T]."""
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros, mask, gamma, lam=1.0)[0]


def whiten(values: Tensor, mask: Tensor, ddof: int = 1) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) with mean and variance of the elements in the mask; 0 outside. Any shape.

    REINFORCE++ whitens the returns-to-go of all tokens of a batch; its variant with a baseline whitens the rewards less
    their group's mean. Source: Hu 2025 (REINFORCE++), arXiv 2501.03262.
    """
    mean, scale = whitening(values[mask], ddof)
    return (values - mean) * scale * mask


def whitening(values: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Return (mean, 1 / sqrt(var + 1e-8)) of the values [n], or (0, 0) if n <= ddof: too few for a variance."""
    if len(values) <= ddof:
        return values.new_zeros(()), values.new_zeros(())
    return values.mean(), (values.var(correction=ddof) + 1e-8).rsqrt()


def gae(
    rewards: Tensor, values: Tensor, log_ratios: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (GAE) over the tokens in the mask of each row; all tensors are [B, T].

        delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lam * A_{t+1},  return_t = A_t + V_t

    Source: Schulman et al. 2015, arXiv 1506.02438, equation 16. V after the last token is `bootstrap`; a row is an
    episode that ends, even when it ran into its length limit, so the default is 0. `log_ratios` are not used.

    Returns:
        (advantages, returns), 0 where the mask is False.
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


def vtrace(
    rewards: Tensor, values: Tensor, log_ratios: Tensor, mask: Tensor, gamma: float, lam: float,
    rho_cap: float = 1.0, c_cap: float = 1.0, bootstrap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """V-trace over the tokens in the mask of each row; all tensors are [B, T], log ratios are proximal - behaviour.

        rho = exp(log ratio),  rhobar = min(rho, rho_cap),  c = lam * min(rho, c_cap)
        v_t = V_t + rhobar_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rhobar_t (r_t + gamma (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t)

    A contains rhobar, so the loss takes no importance weight of its own. With gamma = 1 a final reward reaches a
    token through the product of the c after it, which decays as (1 - TV)^length: the metric `vtrace/reach`.

    Sources: Espeholt et al. 2018 (IMPALA), arXiv 1802.01561, equations 1 and 4; lam as in rlax.

    Returns:
        (A, v), 0 where the mask is False.
    """
    rho = bounded_exp(log_ratios)
    weights, traces = rho.clamp(max=rho_cap), lam * rho.clamp(max=c_cap)
    advantages, excess = torch.zeros_like(values), torch.zeros_like(values)  # excess: v - V
    next_value = torch.full_like(values[:, 0], bootstrap)
    next_excess = torch.zeros_like(next_value)
    for t in range(values.shape[1] - 1, -1, -1):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = weights[:, t] * (error + gamma * lam * next_excess)
        excess[:, t] = weights[:, t] * error + gamma * traces[:, t] * next_excess
        next_excess = torch.where(mask[:, t], excess[:, t], next_excess)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages * mask, (values + excess) * mask
