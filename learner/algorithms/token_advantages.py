"""From the reward of a whole answer to an advantage for each of its trained tokens.

Only tokens the model sampled are trained: those of the prompt and, in answers of several turns, of the environment get
no credit and are stepped over, as if they were part of the state.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_rl.config import AlgorithmConfig, Config
from async_rl.types import Batch, FloatArray, RolloutGroup
from learner.algorithms.advantages import dr_grpo, gae, grpo, maxrl, remax, returns_to_go, rloo, vtrace, whiten
from learner.packing.microbatches import MicroBatch

_OF_GROUPS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "maxrl": maxrl, "reinforce_pp_baseline": dr_grpo}


def batch_advantages(config: Config, batch: Batch) -> list[list[FloatArray]]:
    """Advantages [group][answer], [T] each, of the estimators that need no critic; zeros where one is used.

    Whole groups in, so that every rank gets the same numbers whatever its share. REINFORCE++ whitens over the trained
    tokens of the batch, but for a penalty that comes first (`whitens_penalised`).
    """
    algorithm = config.algorithm
    if algorithm.advantage_entry.needs_critic:
        return [[np.zeros(len(r.tokens), np.float32) for r in group.rollouts] for group in batch.groups]
    masks = [torch.tensor(r.mask) for group in batch.groups for r in group.rollouts]
    if algorithm.advantage == "reinforce_pp":
        rewards = [r.reward for group in batch.groups for r in group.rollouts]
    else:
        rewards = [x for group in batch.groups for x in _group_advantages(algorithm, group).tolist()]
    mask = pad_sequence(masks, batch_first=True)  # [k, T]
    scores = torch.tensor(rewards, dtype=torch.float64)
    if algorithm.advantage == "reinforce_pp":
        advantages = returns_to_go(_at_last_token(scores, mask), mask, algorithm.gamma)
    else:
        advantages = scores[:, None] * mask
    if algorithm.advantage.startswith("reinforce_pp") and not whitens_penalised(algorithm):
        advantages = whiten(advantages, mask)
    rows = iter(advantages.float().numpy())
    return [[next(rows)[: len(r.tokens)] for r in group.rollouts] for group in batch.groups]


def whitens_penalised(algorithm: AlgorithmConfig) -> bool:
    """REINFORCE++ takes a KL penalty off the rewards before it whitens them, so it needs the logprobs at step start.

    Source: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.
    """
    return algorithm.kl.kind == "k1_reward" and algorithm.advantage.startswith("reinforce_pp")


def _group_advantages(algorithm: AlgorithmConfig, group: RolloutGroup) -> Tensor:
    """[G]"""
    rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
    if algorithm.advantage == "remax":
        assert group.baseline_reward is not None, "the worker rolls out a greedy baseline for remax"
        return remax(rewards, group.baseline_reward)
    return _OF_GROUPS[algorithm.advantage](rewards)


def critic_advantages(
    algorithm: AlgorithmConfig,
    micro: MicroBatch,
    values: Tensor,  # [N] detached
    log_rho: Tensor,  # [N] proximal - behaviour logprobs
    penalty: Tensor,  # [N] taken off the reward of each token
) -> tuple[Tensor, Tensor]:
    """GAE or V-trace of every answer, its reward given at its last trained token; (advantages [N], targets [N])."""
    mask = _rows(micro.trained, micro)
    rewards = _at_last_token(micro.rewards, mask) - _rows(penalty, micro)
    if algorithm.advantage == "vtrace":
        ratios = _rows(log_rho, micro)
        both = vtrace(rewards, _rows(values, micro), ratios, mask, algorithm.gamma, algorithm.lam)
    else:
        both = gae(rewards, _rows(values, micro), mask, algorithm.gamma, algorithm.lam)
    return _tokens(both[0], micro), _tokens(both[1], micro)


def penalty_to_go(
    penalty: Tensor,  # [N]
    micro: MicroBatch,
    gamma: float,
) -> Tensor:
    """What a penalty on each token takes off the advantages of the tokens before it; [N], 0 where not trained."""
    return _tokens(returns_to_go(_rows(penalty, micro), _rows(micro.trained, micro), gamma), micro)


def _at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Each row's reward at its last masked-in token; nowhere if it has none. [k], [k, T] -> [k, T]"""
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(1, keepdim=True)
    return torch.where(steps == last, rewards[:, None], 0.0)


def _rows(tokens: Tensor, micro: MicroBatch) -> Tensor:
    """[N] to [k, T], padded with zeros."""
    return pad_sequence(list(tokens.split(list(micro.lengths))), batch_first=True)


def _tokens(rows: Tensor, micro: MicroBatch) -> Tensor:
    """[k, T] back to [N]."""
    return torch.cat([row[:length] for row, length in zip(rows, micro.lengths, strict=True)])
