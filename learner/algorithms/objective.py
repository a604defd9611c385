"""What is minimised: from one forward pass to the losses of its answers, and what they say about themselves.

    credit.batch_advantages   rewards of whole groups -> an advantage for each response token, before any forward pass
    Objective.prepare         what a minibatch must know as a whole, after the forward pass at step start
    Objective.losses          logprobs, entropy, values of a micro-batch -> losses summed over trained tokens
    Objective.finish          the batch's totals -> metrics, and the KL coefficient of the next batch

A loss is a sum over tokens; the caller divides it by the normaliser of the whole minibatch, which counts the tokens or
answers of all ranks and micro-batches: any split gives the same gradient.

    L_t = kept_t * (weight_t * (policy loss_t + kl_coef * KL loss_t) - entropy_coef * entropy_t)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config import Config
from async_rl.telemetry.metrics import Metric
from async_rl.types import RolloutGroup
from learner.algorithms.advantages import vtrace_reach, whitening
from learner.algorithms.corrections import (
    dropped_tokens,
    importance_weights,
    interpolated_proximal,
    log_ratios,
    m2po_limit,
)
from learner.algorithms.diagnostics import (
    MetricAccumulator,
    Totals,
    tally_critic,
    tally_offpolicy,
    tally_old_kv,
    tally_policy,
)
from learner.algorithms.losses import (
    PolicyLoss,
    cispo_loss,
    dppo_tv_loss,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip_loss,
    value_loss,
)
from learner.algorithms.masked_ops import bounded_exp, sum_by_answer
from learner.algorithms.token_advantages import critic_advantages, penalty_to_go, whitens_penalised
from learner.packing.microbatches import MicroBatch

KL_STEP = 0.1
"""How far one batch moves an adaptive KL coefficient: by at most 0.2 * KL_STEP of itself."""


def policy_normaliser(config: Config, groups: Sequence[RolloutGroup], pairs: Sequence[tuple[int, int]]) -> float:
    """What the summed policy loss of a minibatch, its (group, answer) pairs, is divided by; at least 1.

        token_mean     its counted tokens: trained ones, and those only too old for it
        sequence_mean  its answers with a counted token (each token was divided by its answer's count)
        constant       its answers * rollout.max_response_tokens

    So, in each of them, masking some tokens for their age takes their part of the loss away and amplifies no other.
    """
    rollouts = [groups[g].rollouts[i] for g, i in pairs]
    counted = [int(rollout.mask.sum()) + rollout.num_too_old for rollout in rollouts]
    if config.algorithm.aggregation == "sequence_mean":
        return max(1.0, float(sum(tokens > 0 for tokens in counted)))
    if config.algorithm.aggregation == "constant":
        return max(1.0, float(len(pairs) * config.rollout.max_response_tokens))
    return max(1.0, float(sum(counted)))


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one micro-batch, summed over its trained tokens, with gradient."""

    policy: Tensor
    critic: Tensor | None


@dataclass(frozen=True, slots=True)
class _Answers:
    """Which answer each token belongs to."""

    index: Tensor  # [N]
    count: int

    @classmethod
    def of(cls, micro: MicroBatch) -> _Answers:
        lengths = torch.tensor(micro.lengths, device=micro.trained.device)
        index = torch.arange(len(micro.lengths), device=lengths.device).repeat_interleave(lengths)
        return cls(index, len(micro.lengths))


class Objective:
    """The losses that a configuration asks for. `kl_coef` is its only state: a checkpoint must keep it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.kl_coef = config.algorithm.kl.coef
        takes_several = config.algorithm.steps_per_batch > 1
        interpolates = config.algorithm.proximal == "interpolate"
        self.whitens_penalised = whitens_penalised(config.algorithm)
        correction = config.algorithm.correction
        early = correction.masks.m2po > 0 or correction.batch_normalised or self.whitens_penalised
        self.needs_proximal = (takes_several and not interpolates) or early
        """Whether `micro.proximal` must be set before the first optimizer step, by a forward pass without gradient.
        Else the gradient's own forward pass gives it."""
        self.needs_values = takes_several
        """The same of `micro.values`, with a critic."""
        self.needs_reference = config.algorithm.kl.kind != "none"
        """Whether `micro.reference` must be set before the losses."""

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Sets what one minibatch must know as a whole, once `micro.proximal` is there. Collective."""
        tau = self.config.algorithm.correction.masks.m2po
        if tau > 0:
            squares = []
            for micro in micro_batches:
                assert micro.proximal is not None
                log_rho = log_ratios(micro.proximal, micro.behaviour, micro.trained)
                squares.append(log_rho[micro.trained].square())
            limit = m2po_limit(_gather(torch.cat(squares)), tau)
            for micro in micro_batches:
                micro.m2po_limit = limit
        if self.config.algorithm.correction.batch_normalised:
            weights = torch.cat([self._early_weights(micro)[micro.trained] for micro in micro_batches])
            sums = torch.stack([weights.double().sum(), weights.new_tensor(len(weights)).double()])
            dist.all_reduce(sums)
            for micro in micro_batches:
                micro.mean_weight = float(sums[0] / sums[1].clamp(min=1)) or 1.0

    def penalise(self, micro_batches: Sequence[MicroBatch]) -> None:
        """REINFORCE++ with a KL penalty: takes it off the returns of a whole batch, then whitens them. Collective."""
        for micro in micro_batches:
            assert micro.proximal is not None
            penalty = self._reward_penalty(micro, micro.proximal)
            micro.advantages = micro.advantages - penalty_to_go(penalty, micro, self.config.algorithm.gamma)
        mean, scale = whitening(_gather(torch.cat([micro.advantages[micro.trained] for micro in micro_batches])))
        for micro in micro_batches:
            micro.advantages = (micro.advantages - mean) * scale * micro.trained

    def losses(
        self,
        micro: MicroBatch,
        logprobs: Tensor,  # [N] learner logprobs, with gradient
        entropy: Tensor,  # [N]; with gradient if there is an entropy bonus
        values: Tensor | None,  # [N] of the critic, with gradient; None: there is no critic
        tally: MetricAccumulator,
        is_first_epoch: bool,
    ) -> Losses:
        """The losses of a micro-batch; adds its statistics to `tally`."""
        algorithm = self.config.algorithm
        answers = _Answers.of(micro)
        proximal = self._proximal(micro, logprobs)
        log_rho = log_ratios(proximal, micro.behaviour, micro.trained)
        penalty = self._reward_penalty(micro, proximal)
        critic = None
        if values is not None:
            old_values = values.detach() if micro.values is None else micro.values
            advantages, returns = critic_advantages(algorithm, micro, old_values, log_rho, penalty)
            tally_critic(tally, old_values, returns, micro.trained)
            losses = value_loss(values, old_values, returns, self.config.critic.value_clip)
            critic = torch.where(micro.trained, losses, 0.0).sum()
        else:
            advantages = micro.advantages
            if algorithm.kl.kind == "k1_reward" and not self.whitens_penalised:
                advantages = advantages - penalty_to_go(penalty, micro, algorithm.gamma)
        centre = micro.behaviour if algorithm.proximal == "behaviour" else proximal
        loss, clipped = self._policy_loss(micro, logprobs, centre, advantages, answers)
        tally_policy(tally, logprobs, proximal, entropy, advantages, clipped, micro.trained, micro.staleness)
        weights, truncated = self._weights(log_rho, advantages, micro.trained, answers)
        weights = weights / micro.mean_weight
        dropped = dropped_tokens(
            algorithm.correction.masks, log_rho, advantages, micro.trained, answers.index, answers.count,
            micro.m2po_limit,
        )
        if is_first_epoch:
            # Interpolated logprobs at staleness 0 are the behaviour's own: they can't show a mismatch.
            measurable = micro.trained & (algorithm.proximal != "interpolate")
            tally_offpolicy(
                tally, proximal, micro.behaviour, micro.trained, micro.comparable & measurable, micro.staleness,
                answers.index, answers.count, weights, truncated, dropped,
            )
            tally_old_kv(tally, proximal, micro.behaviour, measurable & micro.old_kv)
            self._tally_extras(tally, micro, proximal, log_rho)
        loss = weights * (loss + self._kl_loss(micro, logprobs))
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * entropy
        return Losses(self._total(loss, micro, micro.trained & ~dropped, answers), critic)

    def finish(self, totals: Totals, median_tokens: float) -> list[Metric]:
        """Metrics of the KL term and of V-trace; adapts the KL coefficient. The same on all ranks.

        Args:
            median_tokens: median of the trained tokens of the batch's answers.

        The coefficient follows Ziegler et al. 2019, arXiv 1909.08593, section 2.2: it is multiplied by
        1 + 0.1 * clip(kl / target - 1, -0.2, 0.2), with the KL divergence (k3) in nats a token.
        """
        kl = self.config.algorithm.kl
        metrics = []
        if "reference_k3" in totals:
            tokens = max(float(totals["extra_tokens"]), 1.0)
            divergence = float(totals["reference_k3"]) / tokens
            metrics += [Metric("kl/reference", divergence), Metric("kl/coef", self.kl_coef, "last")]
            if kl.target > 0 and math.isfinite(divergence):
                error = min(max(divergence / kl.target - 1, -0.2), 0.2)
                self.kl_coef *= 1 + KL_STEP * error
        if "log_trace" in totals:
            mean_log_trace = float(totals["log_trace"]) / max(float(totals["extra_tokens"]), 1.0)
            metrics.append(Metric("vtrace/reach", vtrace_reach(mean_log_trace, median_tokens)))
        return metrics

    def _proximal(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        if self.config.algorithm.proximal == "interpolate":
            return interpolated_proximal(logprobs, micro.behaviour, micro.staleness)
        return logprobs.detach() if micro.proximal is None else micro.proximal

    def _reward_penalty(self, micro: MicroBatch, proximal: Tensor) -> Tensor:
        if self.config.algorithm.kl.kind != "k1_reward":
            return torch.zeros_like(proximal)
        assert micro.reference is not None
        return torch.where(micro.trained, self.kl_coef * kl_k1(proximal, micro.reference), 0.0)

    def _policy_loss(
        self, micro: MicroBatch, logprobs: Tensor, centre: Tensor, advantages: Tensor, answers: _Answers
    ) -> PolicyLoss:
        loss, clip = self.config.algorithm.loss, self.config.algorithm.clip
        if loss == "cispo":
            return cispo_loss(logprobs, centre, advantages, clip.low, clip.high)
        if loss == "gspo":
            return gspo_loss(
                logprobs, centre, advantages, micro.trained, answers.index, answers.count, clip.low, clip.high
            )
        if loss == "dppo_tv":
            return dppo_tv_loss(logprobs, centre, advantages, clip.tv, clip.tv_pull)
        return ppo_clip_loss(logprobs, centre, advantages, clip.low, clip.high, clip.dual)

    def _weights(
        self, log_rho: Tensor, advantages: Tensor, trained: Tensor, answers: _Answers
    ) -> tuple[Tensor, Tensor]:
        """(weights [N], truncated [N]); without a rule, truncated says what token TIS would truncate."""
        kind, correction = self.config.correction_kind, self.config.algorithm.correction
        raw = importance_weights(kind, log_rho, advantages, trained, answers.index, answers.count)
        held = raw if kind == "none" else raw.clamp(correction.floor, correction.cap)
        judged = bounded_exp(log_rho) if kind == "none" else raw
        return held, (judged < correction.floor) | (judged > correction.cap)

    def _early_weights(self, micro: MicroBatch) -> Tensor:
        """[N], before the losses; of a rule that doesn't look at the advantages."""
        assert micro.proximal is not None
        log_rho = log_ratios(micro.proximal, micro.behaviour, micro.trained)
        return self._weights(log_rho, torch.zeros_like(log_rho), micro.trained, _Answers.of(micro))[0]

    def _kl_loss(self, micro: MicroBatch, logprobs: Tensor) -> Tensor | float:
        kind = self.config.algorithm.kl.kind
        if kind not in ("k2_loss", "k3_loss"):
            return 0.0
        assert micro.reference is not None
        estimate = kl_k2 if kind == "k2_loss" else kl_k3
        return self.kl_coef * estimate(logprobs, micro.reference)

    def _total(self, loss: Tensor, micro: MicroBatch, kept: Tensor, answers: _Answers) -> Tensor:
        loss = torch.where(kept, loss, 0.0)
        if self.config.algorithm.aggregation == "sequence_mean":
            tokens = sum_by_answer(micro.trained.to(loss.dtype), answers.index, answers.count)
            if micro.too_old is not None:
                tokens = tokens + micro.too_old
            loss = loss / tokens.clamp(min=1)[answers.index]
        return loss.sum()

    def _tally_extras(self, tally: MetricAccumulator, micro: MicroBatch, proximal: Tensor, log_rho: Tensor) -> None:
        tally.add(extra_tokens=micro.trained.sum())
        if self.needs_reference:
            assert micro.reference is not None
            tally.add(reference_k3=torch.where(micro.trained, kl_k3(proximal, micro.reference), 0.0).sum())
        if self.config.algorithm.advantage == "vtrace":
            log_traces = math.log(max(self.config.algorithm.lam, 1e-9)) + log_rho.clamp(max=0.0)
            tally.add(log_trace=torch.where(micro.trained, log_traces, 0.0).sum())


def _gather(values: Tensor) -> Tensor:
    """The values of all ranks, one after another; collective. [n of this rank] -> [n of all]"""
    sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(values)], device=values.device))
    longest = max(int(size) for size in sizes)
    padded = [values.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([values, values.new_zeros(longest - len(values))]))
    return torch.cat([part[: int(size)] for part, size in zip(padded, sizes, strict=True)])
