"""Computes the losses of a micro-batch: advantages, policy loss, correction, KL term, critic, and their statistics.

    Objective.prepare   once a batch, after the forward passes at step start: numbers that depend on all its tokens
    Objective.losses    for each micro-batch: logprobs, entropy and values -> losses summed over trained tokens
    Objective.finish    once a batch, at its end: its totals -> metrics, and the KL coefficient of the next batch

A loss is a sum over tokens; the caller divides it by the normaliser of the whole minibatch, which counts the tokens or
answers of all ranks and micro-batches: any split gives the same gradient.

    L_t = kept_t * (weight_t * (policy loss_t + kl_coef * KL loss_t) - entropy_coef * entropy_t)

kept_t is 1 for a trained token that no mask drops, else 0; weight_t is the importance weight of the correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config import Config
from async_rl.seams import find_entry
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
from learner.packing.microbatches import MicroBatch, MiniBatch, ResponseTokens

KL_STEP = 0.1
"""In one batch an adaptive KL coefficient grows or shrinks by at most 0.2 * KL_STEP of its value."""
KL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "none": None, "k1_reward": None, "k2_loss": kl_k2, "k3_loss": kl_k3,
}  # fmt: skip
"""By value of algorithm.kl.kind, the KL estimate that is added to the loss; None: the loss gets none."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A rule that turns the losses of tokens into the loss of a minibatch: their sum, divided by a normaliser."""

    normaliser: Callable[[Sequence[int], int], int]
    """(counted tokens of each answer, rollout.max_response_tokens) -> what the sum is divided by."""
    divides_by_length: bool = False
    """Whether the loss of each token is first divided by the counted tokens of its answer."""


AGGREGATIONS = {
    "token_mean": Aggregation(lambda counted, longest: sum(counted)),
    "sequence_mean": Aggregation(lambda counted, longest: sum(n > 0 for n in counted), divides_by_length=True),
    "constant": Aggregation(lambda counted, longest: len(counted) * longest),
}


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one micro-batch, summed over its trained tokens, with gradient."""

    policy: Tensor
    critic: Tensor | None


class Objective:
    """Computes the losses that a configuration asks for. Its only state, `kl_coef`, must be in every checkpoint.

    Raises:
        ConfigError: the configuration names a loss, advantage, correction or aggregation that does not exist.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        algorithm, correction = config.algorithm, config.algorithm.correction
        self.advantage = algorithm.advantage_entry
        self._advantage_function = self.advantage.load()
        self._loss: Callable[[LossInputs], LossOutput] = algorithm.loss_entry.load()
        self._correction = config.correction_entry
        self._weights_of: Callable[..., Tensor] = self._correction.load()
        self._aggregation = find_entry(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation")
        self._whitens_at_start = whitens_at_start(config)
        self.kl_coef = algorithm.kl.coef
        takes_several = algorithm.steps_per_batch > 1
        has_dropout = config.model.lora.rank > 0 and config.model.lora.dropout > 0
        early = correction.masks.m2po > 0 or correction.batch_normalised or self._whitens_at_start
        self.needs_proximal = early or (algorithm.proximal != "interpolate" and (takes_several or has_dropout))
        """Whether proximal logprobs need a forward pass of their own at step start. Otherwise they are interpolated, or
        the pass with gradient gives them: with one optimizer step a batch and no dropout the two passes agree."""
        self.needs_values = takes_several or self._whitens_at_start
        """Whether a critic, if there is one, runs a forward pass at step start to give the old values."""
        self.needs_reference = algorithm.kl.kind != "none"
        """Whether the reference's logprobs are needed at step start."""

    def normaliser(self, groups: Sequence[RolloutGroup], pairs: Sequence[tuple[int, int]]) -> float:
        """Return the number that the summed policy loss of a minibatch is divided by, at least 1.

        Args:
            pairs: (group, answer) of each answer of the minibatch.

        Trained tokens count, and so do those masked only for their age: masking these removes their loss and does not
        amplify that of the others.
        """
        rollouts = [groups[g].rollouts[i] for g, i in pairs]
        counted = [int(rollout.mask.sum()) + rollout.num_too_old for rollout in rollouts]
        return float(max(1, self._aggregation.normaliser(counted, self.config.rollout.max_response_tokens)))

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the minibatches of a batch, completed with numbers that depend on the tokens of all ranks. Collective.

        The numbers are `whitening` (of the batch), `m2po_limit` and `mean_weight` (of each minibatch); `MiniBatch` says
        what they do. A number that the configuration does not use keeps its neutral default.

        Args:
            minibatches: all of one batch, after the forward passes at step start.
        """
        correction, mean, scale = self.config.algorithm.correction, 0.0, 1.0
        if self._whitens_at_start:
            micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
            of_trained = [self._advantages(m, None, m.values)[0][m.response.trained] for m in micro_batches]
            mean, scale = map(float, whitening(_gather(of_trained)))
        return [
            replace(
                minibatch,
                whitening=(mean, scale),
                m2po_limit=_m2po_limit(minibatch, correction.masks.m2po),
                mean_weight=self._mean_weight(minibatch) if correction.batch_normalised else 1.0,
            )
            for minibatch in minibatches
        ]

    def losses(
        self,
        minibatch: MiniBatch,
        micro: MicroBatch,
        logprobs: Tensor,  # [N] learner logprobs, with gradient
        entropy: Tensor,  # [N]; with gradient if there is an entropy bonus
        values: Tensor | None,  # [N] of the critic, with gradient; None: there is no critic
        tally: MetricAccumulator,
        is_first_epoch: bool,
    ) -> Losses:
        """Return the losses of a micro-batch, summed over its trained tokens, and add its statistics to `tally`.

        Proximal logprobs and old values that were not computed at step start are those of this pass, detached.

        Args:
            minibatch: the minibatch that `micro` belongs to, as `prepare` returned it.
            is_first_epoch: statistics of off-policyness are added only then, as later epochs would repeat them.
        """
        algorithm, response = self.config.algorithm, micro.response
        trained = response.trained
        logprobs = torch.where(trained, logprobs, 0.0)  # -inf where not trained would make gradients NaN
        proximal = self._proximal(micro, logprobs)
        log_rho = log_ratios(proximal, response.behaviour, trained)
        old_values = values.detach() if values is not None and micro.values is None else micro.values
        advantages, returns = self._advantages(micro, proximal, old_values)
        if self._whitens_at_start:
            mean, scale = minibatch.whitening
            advantages = (advantages - mean) * scale * trained
        critic = None
        if values is not None:
            assert old_values is not None and returns is not None
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
        weights = weights / minibatch.mean_weight
        dropped = beyond_m2po(log_rho, response.places, minibatch.m2po_limit) | dropped_tokens(
            algorithm.correction.masks, log_rho, advantages, trained, response.answers, len(response.lengths)
        )
        if is_first_epoch:
            # At staleness 0 interpolated logprobs equal the behaviour logprobs: they can't show a mismatch.
            shows_mismatch = algorithm.proximal != "interpolate"
            tally_offpolicy(tally, response, log_rho, weights, truncated, dropped, shows_mismatch)
            self._tally_extras(tally, micro, proximal, log_rho)
        loss = weights * (output.loss + self._kl_loss(micro, logprobs))
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * entropy
        return Losses(self._total(torch.where(trained & ~dropped, loss, 0.0), response), critic)

    def finish(self, totals: Totals, median_tokens: float) -> list[Metric]:
        """Return the metrics of the KL term and of V-trace, and adapt the KL coefficient. Every rank gets the same.

        Args:
            totals: sums over the batch and all ranks, from `MetricAccumulator.reduce`.
            median_tokens: median of the trained tokens of the batch's answers.

        If algorithm.kl.target is set, `kl_coef` is multiplied by 1 + 0.1 * clip(kl / target - 1, -0.2, 0.2). Here kl is
        KL(proximal || reference) of the batch, estimated by k3 in nats a token. Source: Ziegler et al. 2019, arXiv
        1909.08593, section 2.2.
        """
        kl = self.config.algorithm.kl
        metrics, tokens = [], max(float(totals["tokens"].sum()), 1.0)
        if "reference_k3" in totals:
            divergence = float(totals["reference_k3"]) / tokens
            metrics += [Metric("kl/reference", divergence), Metric("kl/coef", self.kl_coef, "last")]
            if kl.target > 0 and math.isfinite(divergence):
                error = min(max(divergence / kl.target - 1, -0.2), 0.2)
                self.kl_coef *= 1 + KL_STEP * error
        if "log_trace" in totals:
            metrics.append(Metric("vtrace/reach", vtrace_reach(float(totals["log_trace"]) / tokens, median_tokens)))
        return metrics

    def _proximal(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        """Return the proximal logprobs [N]: interpolated, of step start, or `logprobs`. Detached, 0 if untrained."""
        if self.config.algorithm.proximal == "interpolate":
            return interpolated_proximal(logprobs, micro.response.behaviour, micro.response.staleness)
        return logprobs.detach() if micro.proximal is None else _at_start(micro)

    def _advantages(
        self, micro: MicroBatch, proximal: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (advantages [N], the critic's targets [N]), with the KL penalty on rewards and not yet whitened.

        Args:
            proximal: None: those of step start. They are always used where advantages are whitened.
        """
        response, algorithm = micro.response, self.config.algorithm
        if proximal is None or self._whitens_at_start:
            proximal = _at_start(micro)
        penalty = torch.zeros_like(proximal)
        if algorithm.kl.kind == "k1_reward":
            penalty = torch.where(response.trained, self.kl_coef * kl_k1(proximal, _reference(micro)), 0.0)
        if self.advantage.needs_critic:
            assert values is not None
            log_rho = log_ratios(proximal, response.behaviour, response.trained)
            return critic_advantages(self.config, self._advantage_function, response, values, log_rho, penalty)
        if algorithm.kl.kind == "k1_reward":
            return response.advantages - penalty_to_go(penalty, response, algorithm.gamma), None
        return response.advantages, None

    def _mean_weight(self, minibatch: MiniBatch) -> float:
        """Return the mean weight of a minibatch's trained tokens on all ranks. Collective.

        The correction's rule must not read advantages: it gets zeros.
        """
        weights = []
        for micro in minibatch.micro_batches:
            log_rho = _log_rho_at_start(micro)
            found, _ = self._weights(log_rho, torch.zeros_like(log_rho), micro.response)
            weights.append(found[micro.response.trained])
        flat = torch.cat(weights)
        sums = torch.stack([flat.double().sum(), flat.new_tensor(len(flat)).double()])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1].clamp(min=1)) or 1.0

    def _weights(self, log_rho: Tensor, advantages: Tensor, response: ResponseTokens) -> tuple[Tensor, Tensor]:
        """Return (weights [N] of the loss, truncated [N] bool: the correction's weight was outside [floor, cap])."""
        correction = self.config.algorithm.correction
        raw = self._weights_of(log_rho, advantages, response.trained, response.answers, len(response.lengths))
        truncated = (raw < correction.floor) | (raw > correction.cap)
        if not self._correction.is_applied:
            return torch.ones_like(log_rho), truncated
        return raw.clamp(correction.floor, correction.cap), truncated

    def _kl_loss(self, micro: MicroBatch, logprobs: Tensor) -> Tensor | float:
        estimate = KL_LOSSES[self.config.algorithm.kl.kind]
        return 0.0 if estimate is None else self.kl_coef * estimate(logprobs, _reference(micro))

    def _total(self, loss: Tensor, response: ResponseTokens) -> Tensor:
        """Return the sum of the losses [N], each divided by its answer's counted tokens if that is asked for."""
        if self._aggregation.divides_by_length:
            tokens = sum_by_answer(response.trained.to(loss.dtype), response.answers, len(response.lengths))
            loss = loss / (tokens + response.too_old).clamp(min=1)[response.answers]
        return loss.sum()

    def _tally_extras(self, tally: MetricAccumulator, micro: MicroBatch, proximal: Tensor, log_rho: Tensor) -> None:
        trained = micro.response.trained
        if self.needs_reference:
            tally.add(reference_k3=torch.where(trained, kl_k3(proximal, _reference(micro)), 0.0).sum())
        if self.advantage.has_traces:
            log_traces = math.log(max(self.config.algorithm.lam, 1e-9)) + log_rho.clamp(max=0.0)
            tally.add(log_trace=torch.where(trained, log_traces, 0.0).sum())


def _at_start(micro: MicroBatch) -> Tensor:
    """Return the proximal logprobs [N] that were computed at step start, 0 where not trained."""
    assert micro.proximal is not None
    return torch.where(micro.response.trained, micro.proximal, 0.0)


def _log_rho_at_start(micro: MicroBatch) -> Tensor:
    return log_ratios(_at_start(micro), micro.response.behaviour, micro.response.trained)


def _reference(micro: MicroBatch) -> Tensor:
    """Return the reference's logprobs [N], 0 where not trained."""
    assert micro.reference is not None
    return torch.where(micro.response.trained, micro.reference, 0.0)


def _m2po_limit(minibatch: MiniBatch, tau: float) -> tuple[float, int]:
    """Return the last token, of the trained ones of all ranks, that M2PO keeps. Collective. tau 0: the mask is off."""
    if tau == 0:
        return minibatch.m2po_limit
    squares, places = [], []
    for micro in minibatch.micro_batches:
        trained = micro.response.trained
        squares.append(_log_rho_at_start(micro)[trained].square())
        places.append(micro.response.places[trained])
    return m2po_limit(_gather(squares), _gather(places), tau)


def _gather(parts: Sequence[Tensor]) -> Tensor:
    """Return the values of all ranks, concatenated. Collective. [n_i] of this rank's parts -> [n] of all ranks."""
    values = torch.cat(list(parts))
    sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(values)], device=values.device))
    longest = max(int(size) for size in sizes)
    padded = [values.new_zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.cat([values, values.new_zeros(longest - len(values))]))
    return torch.cat([part[: int(size)] for part, size in zip(padded, sizes, strict=True)])
