"""The loss of a micro-batch as a whole: advantages, policy loss, correction, KL term, critic, and their statistics.

    Objective.prepare   what has to be known of a whole batch or minibatch, after the forward passes at step start
    Objective.losses    logprobs, entropy and values of a micro-batch -> losses summed over trained tokens
    Objective.finish    the batch's totals -> metrics, and the KL coefficient of the next batch

A loss is a sum over tokens; the caller divides it by the normaliser of the whole minibatch, which counts the tokens or
answers of all ranks and micro-batches: any split gives the same gradient.

    L_t = kept_t * (weight_t * (policy loss_t + kl_coef * KL loss_t) - entropy_coef * entropy_t)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config import Config
from async_rl.seams import CORRECTIONS, find_entry
from async_rl.telemetry.metrics import Metric
from async_rl.types import RolloutGroup
from learner.algorithms.advantages import vtrace_reach, whitening
from learner.algorithms.corrections import (
    beyond_m2po,
    dropped_tokens,
    interpolated_proximal,
    log_ratios,
    m2po_limit,
)
from learner.algorithms.diagnostics import MetricAccumulator, Totals, tally_critic, tally_offpolicy, tally_policy
from learner.algorithms.losses import LossInputs, LossOutput, kl_k1, kl_k2, kl_k3, value_loss
from learner.algorithms.masked_ops import sum_by_answer
from learner.algorithms.token_advantages import critic_advantages, penalty_to_go, whitens_at_start
from learner.packing.microbatches import MicroBatch, MiniBatch, ResponseTokens, for_each, with_start

KL_STEP = 0.1
"""How far one batch moves an adaptive KL coefficient: by at most 0.2 * KL_STEP of itself."""
KL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2_loss": kl_k2, "k3_loss": kl_k3}
"""Values of algorithm.kl.kind that add to the loss."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How the losses of tokens become the loss of a minibatch: their sum, divided by a normaliser."""

    normaliser: Callable[[Sequence[int], int], int]
    """(counted tokens of each answer, rollout.max_response_tokens) -> what the sum is divided by."""
    divides_by_length: bool = False
    """The loss of each token is first divided by the counted tokens of its answer."""


AGGREGATIONS = {
    "token_mean": Aggregation(lambda counted, longest: sum(counted)),
    "sequence_mean": Aggregation(lambda counted, longest: sum(n > 0 for n in counted), divides_by_length=True),
    "constant": Aggregation(lambda counted, longest: len(counted) * longest),
}


def aggregation_of(config: Config) -> Aggregation:
    """The entry that algorithm.aggregation names. ConfigError: there is none."""
    return find_entry(AGGREGATIONS, config.algorithm.aggregation, "algorithm.aggregation")


def policy_normaliser(config: Config, groups: Sequence[RolloutGroup], pairs: Sequence[tuple[int, int]]) -> float:
    """What the summed policy loss of a minibatch, its (group, answer) pairs, is divided by; at least 1.

    Trained tokens count, and those that are only too old to be: masking tokens for their age takes their part of the
    loss away and amplifies no other.
    """
    rollouts = [groups[g].rollouts[i] for g, i in pairs]
    counted = [int(rollout.mask.sum()) + rollout.num_too_old for rollout in rollouts]
    return max(1.0, float(aggregation_of(config).normaliser(counted, config.rollout.max_response_tokens)))


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of one micro-batch, summed over its trained tokens, with gradient."""

    policy: Tensor
    critic: Tensor | None


class Objective:
    """The losses that a configuration asks for. `kl_coef` is its only state: a checkpoint must keep it.

    Raises:
        ConfigError: the configuration names a loss, advantage, correction or aggregation that does not exist.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        algorithm, correction = config.algorithm, config.algorithm.correction
        self.advantage = algorithm.advantage_entry
        self._advantage_function = self.advantage.load()
        self._loss: Callable[[LossInputs], LossOutput] = algorithm.loss_entry.load()
        self._correction = find_entry(CORRECTIONS, config.correction_kind, "algorithm.correction.kind")
        self._weights_of: Callable[..., Tensor] = self._correction.load()
        self._aggregation = aggregation_of(config)
        self._whitens_at_start = whitens_at_start(config)
        self.kl_coef = algorithm.kl.coef
        takes_several = algorithm.steps_per_batch > 1
        has_dropout = config.model.lora.rank > 0 and config.model.lora.dropout > 0
        early = correction.masks.m2po > 0 or correction.batch_normalised or self._whitens_at_start
        self.needs_proximal = early or (algorithm.proximal != "interpolate" and (takes_several or has_dropout))
        """Whether the proximal logprobs take a forward pass of their own at step start. Else the gradient's gives them:
        with one optimizer step a batch, and no dropout in it, they are the same."""
        self.needs_values = takes_several or self._whitens_at_start
        """The same of the critic's values, where there is a critic."""
        self.needs_reference = algorithm.kl.kind != "none"
        """Whether the reference's logprobs are needed at step start."""

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """The minibatches of a batch with what must be known of all their tokens; collective.

        Whitened advantages are computed over the batch, the M2PO mask and the mean weight over each minibatch.
        """
        if self._whitens_at_start:
            minibatches = self._whiten(minibatches)
        correction = self.config.algorithm.correction
        if correction.masks.m2po > 0:
            minibatches = [_mask_by_m2po(minibatch, correction.masks.m2po) for minibatch in minibatches]
        if correction.batch_normalised:
            minibatches = [self._normalise_weights(minibatch) for minibatch in minibatches]
        return list(minibatches)

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
        algorithm, response, start = self.config.algorithm, micro.response, micro.start
        trained = response.trained
        logprobs = torch.where(trained, logprobs, 0.0)  # -inf where not trained would make gradients NaN
        proximal = self._proximal(micro, logprobs)
        log_rho = log_ratios(proximal, response.behaviour, trained)
        old_values = start.values
        if values is not None and old_values is None:
            old_values = values.detach()
        advantages, returns = start.advantages, start.returns
        if advantages is None:
            advantages, returns = self._advantages(micro, proximal, log_rho, old_values)
        critic = None
        if values is not None and old_values is not None and returns is not None:
            tally_critic(tally, old_values, returns, trained)
            losses = value_loss(values, old_values, returns, self.config.critic.value_clip)
            critic = torch.where(trained, losses, 0.0).sum()
        output = self._loss(LossInputs(
            logprobs=logprobs,
            centre=response.behaviour if algorithm.proximal == "behaviour" else proximal,
            advantages=advantages, trained=trained, answers=response.answers, count=len(response.lengths),
            clip=algorithm.clip,
        ))
        tally_policy(tally, response, logprobs, proximal, entropy, advantages, output.clipped)
        weights, truncated = self._weights(log_rho, advantages, response)
        weights = weights / start.mean_weight
        dropped = dropped_tokens(
            algorithm.correction.masks, log_rho, advantages, trained, response.answers, len(response.lengths)
        )
        if start.beyond_m2po is not None:
            dropped = dropped | start.beyond_m2po
        if is_first_epoch:
            # Interpolated logprobs at staleness 0 are the behaviour's own: they can't show a mismatch.
            shows_mismatch = algorithm.proximal != "interpolate"
            tally_offpolicy(tally, response, log_rho, weights, truncated, dropped, shows_mismatch)
            self._tally_extras(tally, micro, proximal, log_rho)
        loss = weights * (output.loss + self._kl_loss(micro, logprobs))
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * entropy
        return Losses(self._total(torch.where(trained & ~dropped, loss, 0.0), response), critic)

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
        """Proximal logprobs [N], detached, 0 where not trained."""
        response, proximal = micro.response, micro.start.proximal
        if self.config.algorithm.proximal == "interpolate":
            proximal = interpolated_proximal(logprobs, response.behaviour, response.staleness)
        elif proximal is None:
            return logprobs.detach()
        return torch.where(response.trained, proximal, 0.0)

    def _advantages(
        self, micro: MicroBatch, proximal: Tensor, log_rho: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(advantages [N], the critic's targets [N]) after a penalty on the rewards of single tokens, not whitened."""
        response, kl = micro.response, self.config.algorithm.kl
        is_penalised = kl.kind == "k1_reward"
        penalty = torch.zeros_like(proximal)
        if is_penalised:
            penalty = torch.where(response.trained, self.kl_coef * kl_k1(proximal, _reference(micro)), 0.0)
        if self.advantage.needs_critic:
            assert values is not None
            return critic_advantages(self.config, self._advantage_function, response, values, log_rho, penalty)
        if not is_penalised:
            return response.advantages, None
        return response.advantages - penalty_to_go(penalty, response, self.config.algorithm.gamma), None

    def _whiten(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Whiten advantages over the trained tokens of all ranks; collective."""

        def with_advantages(micro: MicroBatch) -> MicroBatch:
            advantages, returns = self._advantages(micro, *_at_start(micro), micro.start.values)
            return with_start(micro, advantages=advantages, returns=returns)

        minibatches = for_each(minibatches, with_advantages)
        micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        mean, scale = whitening(_gather([_advantages(micro)[micro.response.trained] for micro in micro_batches]))

        def whitened(micro: MicroBatch) -> MicroBatch:
            return with_start(micro, advantages=(_advantages(micro) - mean) * scale * micro.response.trained)

        return for_each(minibatches, whitened)

    def _normalise_weights(self, minibatch: MiniBatch) -> MiniBatch:
        """Set the mean weight of the trained tokens of all ranks; collective. The rule must not read advantages."""
        weights = []
        for micro in minibatch.micro_batches:
            _, log_rho = _at_start(micro)
            found, _ = self._weights(log_rho, torch.zeros_like(log_rho), micro.response)
            weights.append(found[micro.response.trained])
        flat = torch.cat(weights)
        sums = torch.stack([flat.double().sum(), flat.new_tensor(len(flat)).double()])
        dist.all_reduce(sums)
        mean = float(sums[0] / sums[1].clamp(min=1)) or 1.0
        return for_each([minibatch], lambda micro: with_start(micro, mean_weight=mean))[0]

    def _weights(self, log_rho: Tensor, advantages: Tensor, response: ResponseTokens) -> tuple[Tensor, Tensor]:
        """(weights [N] of the loss, truncated [N] bool: the rule's weight is outside [floor, cap])."""
        correction = self.config.algorithm.correction
        raw = self._weights_of(log_rho, advantages, response.trained, response.answers, len(response.lengths))
        truncated = (raw < correction.floor) | (raw > correction.cap)
        if not self._correction.is_applied:
            return torch.ones_like(log_rho), truncated
        return raw.clamp(correction.floor, correction.cap), truncated

    def _kl_loss(self, micro: MicroBatch, logprobs: Tensor) -> Tensor | float:
        estimate = KL_LOSSES.get(self.config.algorithm.kl.kind)
        return 0.0 if estimate is None else self.kl_coef * estimate(logprobs, _reference(micro))

    def _total(self, loss: Tensor, response: ResponseTokens) -> Tensor:
        """Sum of the loss [N], 0 where it doesn't count. An answer is divided by its trained and too old tokens."""
        if self._aggregation.divides_by_length:
            tokens = sum_by_answer(response.trained.to(loss.dtype), response.answers, len(response.lengths))
            loss = loss / (tokens + response.too_old).clamp(min=1)[response.answers]
        return loss.sum()

    def _tally_extras(self, tally: MetricAccumulator, micro: MicroBatch, proximal: Tensor, log_rho: Tensor) -> None:
        trained = micro.response.trained
        tally.add(extra_tokens=trained.sum())
        if self.needs_reference:
            tally.add(reference_k3=torch.where(trained, kl_k3(proximal, _reference(micro)), 0.0).sum())
        if self.advantage.has_traces:
            log_traces = math.log(max(self.config.algorithm.lam, 1e-9)) + log_rho.clamp(max=0.0)
            tally.add(log_trace=torch.where(trained, log_traces, 0.0).sum())


def _at_start(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """(proximal logprobs, log rho), [N] each, where the former were computed at step start."""
    proximal, response = micro.start.proximal, micro.response
    assert proximal is not None
    proximal = torch.where(response.trained, proximal, 0.0)
    return proximal, log_ratios(proximal, response.behaviour, response.trained)


def _reference(micro: MicroBatch) -> Tensor:
    """The reference's logprobs [N], 0 where not trained."""
    assert micro.start.reference is not None
    return torch.where(micro.response.trained, micro.start.reference, 0.0)


def _advantages(micro: MicroBatch) -> Tensor:
    """The advantages [N] that were computed at step start."""
    assert micro.start.advantages is not None
    return micro.start.advantages


def _mask_by_m2po(minibatch: MiniBatch, tau: float) -> MiniBatch:
    """Set the tokens that M2PO drops of the minibatch of all ranks; collective."""
    squares, places = [], []
    for micro in minibatch.micro_batches:
        trained = micro.response.trained
        squares.append(_at_start(micro)[1][trained].square())
        places.append(micro.response.places[trained])
    limit = m2po_limit(_gather(squares), _gather(places), tau)

    def masked(micro: MicroBatch) -> MicroBatch:
        return with_start(micro, beyond_m2po=beyond_m2po(_at_start(micro)[1], micro.response.places, limit))

    return for_each([minibatch], masked)[0]


def _gather(parts: Sequence[Tensor]) -> Tensor:
    """The values of all ranks, one after another; collective. [n_i] of this rank's micro-batches -> [n] of all"""
    values = torch.cat(list(parts))
    sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(values)], device=values.device))
    longest = max(int(size) for size in sizes)
    padded = [values.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([values, values.new_zeros(longest - len(values))]))
    return torch.cat([part[: int(size)] for part, size in zip(padded, sizes, strict=True)])
