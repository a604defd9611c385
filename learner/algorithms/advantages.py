"""Advantages as pure functions of rewards and, with a critic, of values.

A function of a group gets its rewards x [G] and returns one advantage A_i for all tokens of row i. A function of tokens
gets [B, T], one line for each of B rows. async_rl/base/seams/algorithms.py lists them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_rl.base.config import Config
from async_rl.base.types import Batch, FloatArray
from learner.algorithms.losses import bounded_exp
from learner.packing import ResponseTokens, reward_at_tokens, rows_by_episode


def grpo(rewards: Tensor, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """Group-relative advantages: A_i = (x_i - mean(x)) / (std(x) + eps). Equal rewards give zeros. [G] -> [G], G >= 2.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.1.
    """
    return (rewards - rewards.mean()) / (rewards.std(correction=ddof) + eps)


def dr_grpo(rewards: Tensor) -> Tensor:
    """A_i = x_i - mean(x): GRPO without dividing by std(x), which favours groups of little spread. [G] -> [G].

    Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.
    """
    return rewards - rewards.mean()


def rloo(rewards: Tensor) -> Tensor:
    """Leave-one-out advantages: A_i = x_i - mean_{j != i}(x_j) = G / (G - 1) * (x_i - mean(x)). [G] -> [G], G >= 2.

    Source: Kool et al. 2019; for language models Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def maxrl(rewards: Tensor) -> Tensor:
    """A_i = (x_i - mean(x)) / mean(x), so rare successes weigh more; zeros if the mean is not positive. [G] -> [G].

    Source: prime-rl's `max_rl`.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else torch.zeros_like(rewards)


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = x_i - sum_j(L_j x_j) / sum_j(L_j), with L_j the trained tokens of answer j. [G], [G] -> [G], sum(L) > 0.

    The baseline b with the least variance of the gradient is sum_j |g_j|^2 x_j / sum_j |g_j|^2, with g_j the gradient
    of log pi(answer j). OPO takes |g_j|^2 as proportional to L_j, as if the gradients of single tokens were about as
    long and not aligned. It minimises sum_j L_j (x_j - b)^2, and the advantages of all tokens of a group add up to
    zero.

    Source: Hao et al. 2025 (OPO), arXiv 2505.23585.
    """
    return rewards - (lengths * rewards).sum() / lengths.sum()


def remax(rewards: Tensor, greedy_reward: float) -> Tensor:
    """A_i = x_i - x_greedy, where x_greedy is the reward of the greedy answer to the same prompt. [G] -> [G].

    Source: Li et al. 2023 (ReMax), arXiv 2310.10505.
    """
    return rewards - greedy_reward


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return R_t = r_t + gamma * R_{t+1} over the tokens in the mask, 0 elsewhere. [B, T], [B, T] -> [B, T]."""
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, zeros, mask, gamma, lam=1.0)[0]


def whiten(values: Tensor, mask: Tensor, ddof: int = 1) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) with mean and variance of the elements in the mask; 0 outside. Any shape.

    REINFORCE++ whitens the returns-to-go of all tokens of a batch. Its variant with a baseline whitens the rewards
    minus their group's mean. Source: Hu 2025 (REINFORCE++), arXiv 2501.03262.
    """
    mean, scale = whitening(values[mask], ddof)
    return (values - mean) * scale * mask


def whitening(values: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Return (mean, 1 / sqrt(var + 1e-8)) of the values [n]; (0, 0) if n <= ddof, too few for a variance."""
    if len(values) <= ddof:
        return values.new_zeros(()), values.new_zeros(())
    return values.mean(), (values.var(correction=ddof) + 1e-8).rsqrt()


def gae(
    rewards: Tensor, values: Tensor, log_ratios: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by generalised advantage estimation over the tokens in the mask; all tensors [B, T].

        delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lam * A_{t+1},  return_t = A_t + V_t

    Both are 0 where the mask is False. V after the last token is `bootstrap`. Its default is 0, because a row is an
    episode that ends, even one that reached its length limit. `log_ratios` are not used.

    Source: Schulman et al. 2015, arXiv 1506.02438, equation 16.
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
    """Return (advantages A, value targets v) by V-trace over each row's tokens in the mask. All tensors are [B, T].

        rho = exp(log ratio),  rhobar = min(rho, rho_cap),  c = lam * min(rho, c_cap)
        v_t = V_t + rhobar_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rhobar_t (r_t + gamma (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t)

    Both are 0 where the mask is False. The log ratios are proximal - behaviour logprobs. A contains rhobar, so the loss
    takes no importance weight of its own. With gamma = 1 a final reward reaches a token through the product of the c
    after it, which decays as (1 - TV)^length: the metric `vtrace/reach`.

    Sources: Espeholt et al. 2018 (IMPALA), arXiv 1802.01561, equations 1 and 4; lam as in rlax.

    Args:
        bootstrap: V after the last token of a row, as in `gae`.
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


def batch_advantages(config: Config, batch: Batch) -> list[list[FloatArray]]:
    """Return the advantages [group][row], [T] each, of an estimator without critic; zeros for one with a critic.

    They are whitened over the batch's trained tokens if the estimator or algorithm.whiten asks for that. With
    `algorithm.whitens_at_start`, Objective.prepare whitens later.
    """
    algorithm, entry = config.algorithm, config.algorithm.advantage_entry
    if entry.needs_critic:
        return [[np.zeros(len(r.tokens), np.float32) for r in group.rows] for group in batch.groups]
    function = algorithm.load_advantage()
    masks = [torch.tensor(r.mask) for group in batch.groups for r in group.rows]
    mask = pad_sequence(masks, batch_first=True)  # [k, T]
    if entry.of_returns:
        rewards = [torch.from_numpy(of_row) for group in batch.groups for of_row in reward_at_tokens(group)]
        advantages = function(pad_sequence(rewards, batch_first=True), mask, algorithm.gamma)
    else:
        of_groups = []
        for group in batch.groups:
            inputs: list[Tensor | float | None] = [torch.tensor(group.episode_rewards, dtype=torch.float64)]
            if entry.of_group_and_lengths:
                tokens = [int(row.mask.sum()) for row in group.rows]
                lengths = [sum(tokens[index] for index in indices) for indices in rows_by_episode(group)]
                inputs.append(torch.tensor(lengths, dtype=torch.float64))
            elif entry.needs_greedy_baseline:
                inputs.append(group.baseline_reward)
            of_groups.append(function(*inputs).repeat_interleave(torch.tensor(group.episode_rows)))
        advantages = torch.cat(of_groups)[:, None] * mask
    if (entry.whitens or algorithm.whiten) and not algorithm.whitens_at_start:
        advantages = whiten(advantages, mask)
    rows = iter(advantages.float().numpy())
    return [[next(rows)[: len(r.tokens)] for r in group.rows] for group in batch.groups]


def critic_advantages(
    config: Config, function: Callable[..., tuple[Tensor, Tensor]], response: ResponseTokens, values: Tensor,
    log_rho: Tensor, penalty: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (advantages [N], targets of the critic [N]) of rewards that `reward_at_tokens` has placed at tokens.

    Args:
        function: `gae`, `vtrace` or the user's own, the `of_tokens` of an entry in async_rl/base/seams/algorithms.py.
        values, log_rho: [N] each.
        penalty: [N] subtracted from the reward of each token.
    """
    mask, gamma, lam = _rows(response.trained, response), config.algorithm.gamma, config.algorithm.gae_lambda
    rewards = _rows(response.rewards - penalty, response)
    both = function(rewards, _rows(values, response), _rows(log_rho, response), mask, gamma, lam)
    return _tokens(both[0], response), _tokens(both[1], response)


def penalty_to_go(penalty: Tensor, response: ResponseTokens, gamma: float) -> Tensor:
    """Return for each token the discounted sum of its own and of later trained tokens' penalties. [N] -> [N]."""
    return _tokens(returns_to_go(_rows(penalty, response), _rows(response.trained, response), gamma), response)


def _rows(tokens: Tensor, response: ResponseTokens) -> Tensor:
    """Return values of tokens [N] as one line for each row, padded with zeros. [k, T]"""
    return pad_sequence(list(tokens.split(list(response.lengths))), batch_first=True)


def _tokens(rows: Tensor, response: ResponseTokens) -> Tensor:
    """Return values of padded rows [k, T] as values of tokens [N]."""
    return torch.cat([row[:length] for row, length in zip(rows, response.lengths, strict=True)])
