"""Computes an advantage for each trained token of an answer from the reward of the whole answer.

Only tokens that the model sampled are trained. Those of the prompt and, in answers of several turns, of the environment
have no advantage, and returns skip them as if they were part of the state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_rl.config import Config
from async_rl.types import Batch, FloatArray, RolloutGroup
from learner.algorithms.advantages import returns_to_go, whiten
from learner.packing.microbatches import ResponseTokens


def batch_advantages(config: Config, batch: Batch) -> list[list[FloatArray]]:
    """Return the advantages [group][answer], [T] each, of an estimator without critic; zeros for one with a critic.

    Every rank computes those of the whole batch, so all ranks get the same numbers. They are whitened over the trained
    tokens of the batch if that is asked for, unless that has to happen at step start (`whitens_at_start`).
    """
    algorithm, entry = config.algorithm, config.algorithm.advantage_entry
    if entry.needs_critic:
        return [[np.zeros(len(r.tokens), np.float32) for r in group.rollouts] for group in batch.groups]
    function = entry.load()
    masks = [torch.tensor(r.mask) for group in batch.groups for r in group.rollouts]
    mask = pad_sequence(masks, batch_first=True)  # [k, T]
    if entry.of_returns:
        rewards = torch.cat([_rewards(group) for group in batch.groups])
        advantages = function(_at_last_token(rewards, mask), mask, algorithm.gamma)
    elif entry.needs_greedy_baseline:
        parts = [function(_rewards(group), _greedy_reward(group)) for group in batch.groups]
        advantages = torch.cat(parts)[:, None] * mask
    else:
        advantages = torch.cat([function(_rewards(group)) for group in batch.groups])[:, None] * mask
    if (entry.whitens or algorithm.whiten) and not whitens_at_start(config):
        advantages = whiten(advantages, mask)
    rows = iter(advantages.float().numpy())
    return [[next(rows)[: len(r.tokens)] for r in group.rollouts] for group in batch.groups]


def whitens_at_start(config: Config) -> bool:
    """Return whether advantages are whitened after the forward passes at step start, because they depend on them.

    A critic's advantages do, and so do advantages of rewards minus a KL penalty, which REINFORCE++ whitens.
    Source: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.
    """
    algorithm, entry = config.algorithm, config.algorithm.advantage_entry
    if not (entry.whitens or algorithm.whiten):
        return False
    return entry.needs_critic or algorithm.kl.kind == "k1_reward"


def critic_advantages(
    config: Config,
    function: Callable[..., tuple[Tensor, Tensor]],  # `of_tokens` of the advantage's entry in async_rl/seams
    response: ResponseTokens,
    values: Tensor,  # [N] detached
    log_rho: Tensor,  # [N] proximal - behaviour logprobs
    penalty: Tensor,  # [N] subtracted from the reward of each token
) -> tuple[Tensor, Tensor]:
    """Return (advantages [N], targets of the critic [N]). An answer's reward is given at its last trained token."""
    mask = _rows(response.trained, response)
    rewards = _at_last_token(response.rewards, mask) - _rows(penalty, response)
    ratios = _rows(log_rho, response)
    gamma, lam = config.algorithm.gamma, config.algorithm.lam
    both = function(rewards, _rows(values, response), ratios, mask, gamma, lam)
    return _tokens(both[0], response), _tokens(both[1], response)


def penalty_to_go(
    penalty: Tensor,  # [N]
    response: ResponseTokens,
    gamma: float,
) -> Tensor:
    """Return how much the penalties on single tokens lower the advantage of each token. [N], 0 where not trained.

    It is the sum, discounted by gamma, of the penalties on this token and on the trained tokens after it.
    """
    return _tokens(returns_to_go(_rows(penalty, response), _rows(response.trained, response), gamma), response)


def _rewards(group: RolloutGroup) -> Tensor:
    return torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)


def _greedy_reward(group: RolloutGroup) -> float:
    assert group.baseline_reward is not None, "the worker samples a greedy answer for this advantage"
    return group.baseline_reward


def _at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return rows with each reward at the last masked-in token, if there is one, else 0. [k], [k, T] -> [k, T]"""
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(1, keepdim=True)
    return torch.where(steps == last, rewards[:, None], 0.0)


def _rows(tokens: Tensor, response: ResponseTokens) -> Tensor:
    """Return the tokens [N] as one row for each answer, padded with zeros. [k, T]"""
    return pad_sequence(list(tokens.split(list(response.lengths))), batch_first=True)


def _tokens(rows: Tensor, response: ResponseTokens) -> Tensor:
    """Return the rows [k, T] as tokens [N], without padding."""
    return torch.cat([row[:length] for row, length in zip(rows, response.lengths, strict=True)])
