"""What is minimised: from one forward pass to the losses of its answers, and what they say about themselves.

    batch_advantages   rewards of whole groups -> one advantage for each response token, before any forward pass
    Objective          logprobs, entropy, values of a micro-batch -> losses summed over trained tokens

A loss is a sum over tokens; the caller divides it by the normaliser of the whole minibatch, which counts the tokens or
answers of all ranks and micro-batches: any split gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.types import Batch, FloatArray, RolloutGroup
from learner.advantages import group_advantages
from learner.corrections import importance_weights, token_tis
from learner.critic import micro_batch_gae
from learner.diagnostics import Tally, tally_critic, tally_offpolicy, tally_policy
from learner.losses import ppo_clip_loss, value_loss
from learner.microbatches import MicroBatch


def batch_advantages(config: Config, batch: Batch) -> list[list[FloatArray]]:
    """Advantages [group][answer], [T] each, of the estimators that need no critic; zeros where one is used."""
    if config.algorithm.advantage == "gae":
        return [[np.zeros(len(r.tokens), np.float32) for r in group.rollouts] for group in batch.groups]
    return [
        [
            np.full(len(rollout.tokens), advantage, np.float32)
            for rollout, advantage in zip(
                group.rollouts, group_advantages(torch.tensor([r.reward for r in group.rollouts])).tolist(), strict=True
            )
        ]
        for group in batch.groups
    ]


def policy_normaliser(config: Config, groups: Sequence[RolloutGroup], pairs: Sequence[tuple[int, int]]) -> float:
    """What the summed policy loss of a minibatch, its (group, answer) pairs, is divided by; at least 1."""
    return max(1.0, float(sum(int(groups[g].rollouts[i].mask.sum()) for g, i in pairs)))


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one micro-batch, summed over its trained tokens, with gradient."""

    policy: Tensor
    critic: Tensor | None


class Objective:
    """The losses that a configuration asks for."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs_step_start(self) -> bool:
        """Whether `micro.proximal` and `micro.values` must be set before the first optimizer step: a forward pass
        without gradient. Else the gradient's own forward pass gives them."""
        return self.config.algorithm.epochs * self.config.algorithm.minibatches > 1

    def losses(
        self,
        micro: MicroBatch,
        logprobs: Tensor,  # [N] learner logprobs, with gradient
        entropy: Tensor,  # [N]
        values: Tensor | None,  # [N] of the critic, with gradient; None: there is no critic
        tally: Tally,
        is_first_epoch: bool,
    ) -> Losses:
        """The losses of a micro-batch; adds its statistics to `tally`."""
        advantages, critic = micro.advantages, None
        if values is not None:
            critic, advantages = self._critic_loss(micro, values, tally)
        return Losses(self._policy_loss(micro, logprobs, entropy, advantages, tally, is_first_epoch), critic)

    def _critic_loss(self, micro: MicroBatch, values: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        """(value loss summed over trained tokens, advantages [N] of the critic at step start)."""
        algorithm = self.config.algorithm
        old_values = values.detach() if micro.values is None else micro.values
        advantages, returns = micro_batch_gae(micro, old_values, algorithm.gamma, algorithm.lam)
        tally_critic(tally, old_values, returns, micro.trained)
        loss = value_loss(values, old_values, returns, self.config.critic.value_clip)
        return (loss * micro.trained).sum(), advantages

    def _policy_loss(
        self,
        micro: MicroBatch,
        logprobs: Tensor,  # [N]
        entropy: Tensor,  # [N]
        advantages: Tensor,  # [N]
        tally: Tally,
        is_first_epoch: bool,
    ) -> Tensor:
        """Corrected and clipped loss, summed over trained tokens."""
        clip, correction = self.config.algorithm.clip, self.config.algorithm.correction
        proximal = logprobs.detach() if micro.proximal is None else micro.proximal
        loss, clipped = ppo_clip_loss(logprobs, proximal, advantages, clip.low, clip.high, clip.dual)
        weights = importance_weights(proximal, micro.behaviour)
        if self.config.correction_kind == "token_tis":
            loss = loss * token_tis(weights, correction.cap)
        tally_policy(tally, entropy, advantages, clipped, micro.trained)
        if is_first_epoch:
            tally_offpolicy(tally, proximal, micro.behaviour, weights, micro.trained, micro.comparable, correction.cap)
        return (loss * micro.trained).sum()
