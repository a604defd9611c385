"""Computes an advantage for each trained token of a row from the reward of the whole row.

Episodes of several turns may have several rows. Rewards are compared between episodes, and all rows of an episode get
its advantage. Returns and critics work on the rewards of turns, row by row. Tokens that the model has not sampled, for
example an environment's, have no advantage, and returns skip them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_rl.base.config import Config
from async_rl.base.types import Batch, FloatArray
from learner.algorithms.advantages import returns_to_go, whiten
from learner.loop.episodes import reward_at_tokens, rows_by_episode
from learner.packing.microbatches import ResponseTokens


def batch_advantages(config: Config, batch: Batch) -> list[list[FloatArray]]:
    """Return the advantages [group][row], [T] each, of an estimator without critic; zeros for one with a critic.

    They are whitened over the batch's trained tokens if the estimator or algorithm.whiten asks for that, unless
    `algorithm.whitens_at_start` leaves it for later.
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
    """Return (advantages [N], targets of the critic [N]), of rewards placed by `reward_at_tokens`.

    Args:
        function: `gae`, `vtrace` or the user's own, the `of_tokens` of an entry in async_rl/base/seams/algorithms.py.
        values, log_rho, penalty: [N] each; the penalty is subtracted from the reward of each token.
    """
    mask, gamma, lam = _rows(response.trained, response), config.algorithm.gamma, config.algorithm.gae_lambda
    rewards = _rows(response.rewards - penalty, response)
    both = function(rewards, _rows(values, response), _rows(log_rho, response), mask, gamma, lam)
    return _tokens(both[0], response), _tokens(both[1], response)


def penalty_to_go(penalty: Tensor, response: ResponseTokens, gamma: float) -> Tensor:
    """Return the sum, discounted by gamma, of the penalties on each token and the trained ones after it. [N] -> [N]."""
    return _tokens(returns_to_go(_rows(penalty, response), _rows(response.trained, response), gamma), response)


def _rows(tokens: Tensor, response: ResponseTokens) -> Tensor:
    """Return the tokens [N] padded with zeros, one line for each row. [k, T]"""
    return pad_sequence(list(tokens.split(list(response.lengths))), batch_first=True)


def _tokens(rows: Tensor, response: ResponseTokens) -> Tensor:
    """Return the rows [k, T] as tokens [N], without padding."""
    return torch.cat([row[:length] for row, length in zip(rows, response.lengths, strict=True)])
