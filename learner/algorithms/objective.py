"""Computes the losses of a micro-batch: advantages, policy loss, correction, KL term and critic.

    Objective.prepare         once a batch, after the passes at step start: numbers that depend on all its tokens
    Objective.losses          for each micro-batch: logprobs, entropy and values -> losses summed over trained tokens
    Objective.add_statistics  for each micro-batch, next to its loss: the sums for the metrics of the step
    Objective.finish          once a batch, at its end: its totals -> metrics, and the KL coefficient of the next batch

The caller divides a loss by the normaliser, which counts the tokens or rows of the minibatch on all ranks.

    L_t = kept_t * (weight_t * (policy loss_t + kl_coef * KL loss_t) - entropy_coef * entropy_t)

kept_t is 1 for a trained token that no mask drops, else 0; weight_t is the importance weight of the correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.seams import find_entry
from async_rl.base.telemetry.metrics import TOKENS, Metric
from async_rl.base.types import Batch, Group
from async_rl.base.weights.transport import serving_dtype
from learner.algorithms.advantages import critic_advantages, penalty_to_go, whitening
from learner.algorithms.diagnostics import (
    MetricAccumulator,
    Totals,
    add_critic,
    add_loss_metrics,
    add_offpolicy,
    add_policy,
)
from learner.algorithms.losses import (
    Heads,
    LossInputs,
    LossOutput,
    beyond_m2po,
    check_output,
    dropped_tokens,
    interpolated_proximal,
    kl_k1,
    kl_k2,
    kl_k3,
    log_ratios,
    m2po_limit,
    value_loss,
)
from learner.algorithms.parity import MASS_TOLERANCE, add_parity, add_supports
from learner.packing import MicroBatch, MiniBatch, ResponseTokens, rows_by_episode, tokens_by_episode

KL_STEP = 0.1
"""An adaptive KL coefficient changes by at most 0.2 * KL_STEP of its value per batch."""
KL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "none": None, "k1_reward": None, "k2_loss": kl_k2, "k3_loss": kl_k3,
}  # fmt: skip
"""[algorithm.kl.kind] the KL estimate that is added to the loss; None: nothing is added."""
AGGREGATIONS: dict[str, tuple[Callable[[Sequence[int], int], int], bool]] = {
    "token_mean": (lambda counted, longest: sum(counted), False),
    "sequence_mean": (lambda counted, longest: sum(n > 0 for n in counted), True),
    "constant": (lambda counted, longest: len(counted) * longest, False),
}
"""[algorithm.aggregation] (function, flag). The function maps (counted tokens of each episode, longest response in
tokens) to the number that the summed loss of a minibatch is divided by. The flag says whether the loss of a token is
first divided by the number of tokens of its episode.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLosses:
    """The losses of a micro-batch of N response tokens, and the numbers of each token from which they were computed."""

    policy: Tensor  # [] with gradient: the sum over trained tokens
    critic: Tensor | None  # [] with gradient; None: there is no critic
    logprobs: Tensor  # [N] learner logprobs, 0 if untrained
    proximal: Tensor  # [N] proximal logprobs, 0 if untrained
    log_rho: Tensor  # [N] proximal - behaviour logprobs
    advantages: Tensor  # [N]
    output: LossOutput
    weights: Tensor  # [N] importance weights of the loss
    truncated: Tensor  # [N] bool: the correction's weight is outside [floor, cap]
    dropped: Tensor  # [N] bool: a mask leaves the token out
    old_values: Tensor | None  # [N]
    returns: Tensor | None  # [N] the critic's targets


class Objective:
    """Computes the losses that a configuration asks for. Its only state, `kl_coef`, must be saved in every checkpoint.

    Raises:
        ConfigError: the configuration names a loss, advantage, correction or aggregation that does not exist.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        algorithm, correction = config.algorithm, config.algorithm.correction
        self.advantage = algorithm.advantage_entry
        self._advantage_function = algorithm.load_advantage()
        self._loss: Callable[[LossInputs], LossOutput] = algorithm.load_loss()
        self._correction = config.correction_entry
        self._weights_of: Callable[..., Tensor] = algorithm.load_correction(self._correction)
        aggregation = find_entry(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation")
        self._normaliser, self._divides_by_length = aggregation
        self._whitens_at_start = algorithm.whitens_at_start
        self.kl_coef = algorithm.kl.coef * config.watch.kl_factor
        self._kl_target = algorithm.kl.target / config.watch.kl_factor
        takes_several = algorithm.steps_per_batch > 1
        has_dropout = config.model.lora.rank > 0 and config.model.lora.dropout > 0
        early = correction.masks.m2po > 0 or correction.batch_normalised or self._whitens_at_start
        self.computes_proximal = early or (algorithm.old_logprobs != "interpolate" and (takes_several or has_dropout))
        """Whether a forward pass at step start computes the proximal logprobs. Otherwise they are interpolated, or come
        from the pass with gradient: with one optimizer step a batch and no dropout the two passes agree."""
        self.computes_values = takes_several or self._whitens_at_start
        """Whether a forward pass at step start computes the old values of the critic, if there is one."""
        reads_policy = self.advantage.reads_ratios or algorithm.kl.kind == "k1_reward"
        self.trains_critic_first = self.computes_proximal or not reads_policy
        """Whether the critic's targets are known before the policy's forward pass with gradient."""
        self.needs_reference = algorithm.kl.kind != "none"

    def restore(self, kl_coef: float) -> None:
        """Take the KL coefficient of a checkpoint, if it is adaptive. A fixed one comes from the configuration."""
        if self._kl_target > 0:
            self.kl_coef = kl_coef

    def normaliser(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> float:
        """Return the number, at least 1, that the policy loss summed over rows is divided by (algorithm.aggregation).

        It counts trained tokens, and also tokens masked only as too old. So that mask removes their loss without
        amplifying the loss of the others.

        Args:
            pairs: (group, row) indices of the rows of whole episodes.
        """
        chosen = set(pairs)
        counted = [
            tokens for g, group in enumerate(groups)
            for rows, tokens in zip(rows_by_episode(group), tokens_by_episode(group), strict=True)
            if (g, rows[0]) in chosen
        ]  # fmt: skip
        return float(max(1, self._normaliser(counted, self.config.longest_response_tokens)))

    @torch.no_grad()
    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the minibatches of a batch with `whitening`, `m2po_limit` and `mean_weight` set. Collective.

        These depend on the tokens of all ranks. Call it after the forward passes at step start.
        """
        correction, mean, scale = self.config.algorithm.correction, 0.0, 1.0
        if self._whitens_at_start:
            micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
            advantages = [self._advantages(m, _computed(m.proximal), m.values)[0] for m in micro_batches]
            of_trained = [a[m.response.trained] for a, m in zip(advantages, micro_batches, strict=True)]
            mean, scale = map(float, whitening(self._gather(of_trained)))
        return [
            replace(
                minibatch,
                whitening=(mean, scale),
                m2po_limit=self._m2po_limit(minibatch),
                mean_weight=self._mean_weight(minibatch) if correction.batch_normalised else 1.0,
            )
            for minibatch in minibatches
        ]

    def losses(
        self, minibatch: MiniBatch, micro: MicroBatch,
        logprobs: Tensor,  # [N] learner logprobs, with gradient
        entropy: Tensor,  # [N]; with gradient if there is an entropy bonus
        values: Tensor | None,  # [N] of the critic, with gradient; None: there is no critic
        of_ids: Tensor | None = None,  # logprobs of all ids of the supports, with gradient
    ) -> MicroBatchLosses:
        """Return the losses of policy and critic for a micro-batch of `minibatch`, summed over trained tokens.

        Proximal logprobs and old values that step start did not compute are taken from this pass, detached.
        """
        algorithm, response = self.config.algorithm, micro.response
        trained, rows, count = response.trained, response.rows, len(response.lengths)
        logprobs = torch.where(trained, logprobs, 0.0)  # -inf where not trained would make gradients NaN
        proximal = self.proximal(micro, logprobs)
        log_rho = log_ratios(proximal, response.behaviour, trained)

        old_values = values.detach() if values is not None and micro.values is None else micro.values
        advantages, returns = self._advantages(micro, proximal, old_values)
        if self._whitens_at_start:
            mean, scale = minibatch.whitening
            advantages = (advantages - mean) * scale * trained

        heads, supports = None, micro.inputs.supports
        if of_ids is not None and supports is not None and supports.behaviour is not None:
            heads = Heads(logprobs=of_ids, behaviour=supports.behaviour, tokens=supports.owners, are_whole=True)
        output = self._loss(LossInputs(
            logprobs=logprobs, centre=response.behaviour if algorithm.old_logprobs == "rollout" else proximal,
            advantages=advantages, trained=trained, rows=rows, count=count, clip=algorithm.clip,
            heads=heads,
        ))
        check_output(output, algorithm.loss, trained)
        weights, truncated = self._weights(log_rho, advantages, response)
        weights = weights / minibatch.mean_weight
        dropped = beyond_m2po(log_rho, response.places, minibatch.m2po_limit)
        dropped |= dropped_tokens(
            algorithm.correction.masks, log_rho, response.behaviour, advantages, trained, rows, count
        )

        loss = output.loss
        if (estimate := KL_LOSSES[algorithm.kl.kind]) is not None:
            loss = loss + self.kl_coef * estimate(logprobs, _computed(micro.reference))
        loss = weights * loss
        if algorithm.entropy_coef > 0:
            loss = loss - algorithm.entropy_coef * entropy
        loss = torch.where(trained & ~dropped, loss, 0.0)
        if self._divides_by_length:
            loss = loss / response.counted.clamp(min=1)[rows]

        critic = None if values is None else self._value_loss(micro, values, _computed(old_values), returns)
        return MicroBatchLosses(
            policy=loss.sum(), critic=critic, logprobs=logprobs, proximal=proximal, log_rho=log_rho,
            advantages=advantages, output=output, weights=weights, truncated=truncated, dropped=dropped,
            old_values=old_values, returns=returns,
        )

    def critic_loss(
        self, micro: MicroBatch,
        values: Tensor,  # [N] of the critic, with gradient
    ) -> Tensor:
        """Return the critic's loss as `losses` does, before the policy's pass. Only if `trains_critic_first`."""
        proximal = _computed(micro.proximal) if self.computes_proximal else micro.response.behaviour  # nothing reads it
        old_values = values.detach() if micro.values is None else micro.values
        return self._value_loss(micro, values, old_values, self._advantages(micro, proximal, old_values)[1])

    def _value_loss(self, micro: MicroBatch, values: Tensor, old_values: Tensor, returns: Tensor | None) -> Tensor:
        errors = value_loss(values, old_values, _computed(returns), self.config.critic.value_clip)
        return torch.where(micro.response.trained, errors, 0.0).sum()

    def add_statistics(
        self, sums: MetricAccumulator, micro: MicroBatch, losses: MicroBatchLosses,
        entropy: Tensor,  # [N]
        is_first_epoch: bool,
        masses: Tensor | None = None,  # [2, N] of score_supports
    ) -> None:
        """Add to `sums` the terms of the step's metrics. Off-policy metrics cover only the first epoch."""
        algorithm, response, trained, of = self.config.algorithm, micro.response, micro.response.trained, losses
        if of.critic is not None:
            add_critic(sums, _computed(of.old_values), _computed(of.returns), trained)
        add_policy(sums, response, of.logprobs, of.proximal, entropy, of.advantages, of.output.clipped)
        add_loss_metrics(sums, of.output.metrics, trained)
        if not is_first_epoch:
            return
        add_offpolicy(sums, response, of.log_rho, of.weights, of.truncated, of.dropped)
        if algorithm.old_logprobs != "interpolate":  # at staleness 0 those equal the behaviour logprobs
            add_parity(sums, response, of.log_rho, entropy if micro.entropy is None else micro.entropy)
            if masses is not None and micro.inputs.supports is not None and micro.proximal is None:  # of step start
                tolerance = MASS_TOLERANCE[serving_dtype(self.config, masses.device.type)]
                sampling, sizes = self.config.rollout.sampling, micro.inputs.supports.sizes
                add_supports(sums, response, masses, sizes, sampling, tolerance)
        if self.needs_reference:
            sums.add(reference_k3=torch.where(trained, kl_k3(of.proximal, _computed(micro.reference)), 0.0).sum())
        if self.advantage.has_traces:
            log_traces = math.log(max(algorithm.gae_lambda, 1e-9)) + of.log_rho.clamp(max=0.0)
            sums.add(log_trace=torch.where(trained, log_traces, 0.0).sum())

    def finish(self, totals: Totals, batch: Batch, *, has_trained_policy: bool) -> list[Metric]:
        """Return the metrics of the KL term and of V-trace, and adapt the KL coefficient. Called at the end of a batch.

        If algorithm.kl.target is set, `kl_coef` is multiplied by 1 + 0.1 * clip(kl / target - 1, -0.2, 0.2). Here kl is
        KL(proximal || reference) of the batch, estimated by k3 in nats a token. The coefficient stays as it is while
        the policy is not trained, as in the critic's warm-up. Source: Ziegler et al. 2019, arXiv 1909.08593, section
        2.2.

        `vtrace/reach` is the share of a final reward that reaches the first token of a row of median length: the
        product of the traces lam * min(rho, 1) over the row.

        Args:
            totals: sums over all ranks.
        """
        metrics, tokens = [], max(float(totals["tokens"].sum()), 1.0)
        if "reference_k3" in totals:
            divergence = float(totals["reference_k3"]) / tokens
            metrics.append(Metric("kl/reference", divergence, by=TOKENS, unit="nats"))
            metrics.append(Metric("kl/coef", self.kl_coef, "last"))
            if self._kl_target > 0 and has_trained_policy and math.isfinite(divergence):
                error = min(max(divergence / self._kl_target - 1, -0.2), 0.2)
                self.kl_coef *= 1 + KL_STEP * error
        if "log_trace" in totals:
            median = np.median([row.mask.sum() for group in batch.groups for row in group.rows])
            reach = math.exp(float(totals["log_trace"]) / tokens * float(median))
            metrics.append(Metric("vtrace/reach", reach, by=TOKENS, unit="share"))
        return metrics

    def proximal(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        """Return the proximal logprobs [N], detached, 0 if untrained.

        With algorithm.old_logprobs interpolate they lie between behaviour and `logprobs`. Otherwise step start has
        computed them, or they are equal to `logprobs`.

        Args:
            logprobs: [N] the learner logprobs of this pass.
        """
        if self.config.algorithm.old_logprobs == "interpolate":
            return interpolated_proximal(logprobs, micro.response.behaviour, micro.response.staleness)
        return logprobs.detach() if micro.proximal is None else micro.proximal

    def _advantages(
        self, micro: MicroBatch, proximal: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (advantages [N], the critic's targets [N] or None), with a k1_reward KL penalty, not yet whitened.

        Args:
            proximal: [N] proximal logprobs.
            values: [N] the critic's old values; None without a critic.
        """
        response, algorithm = micro.response, self.config.algorithm
        penalty = torch.zeros_like(proximal)
        if algorithm.kl.kind == "k1_reward":
            penalty = torch.where(response.trained, self.kl_coef * kl_k1(proximal, _computed(micro.reference)), 0.0)
        if self.advantage.needs_critic:
            assert values is not None
            log_rho = log_ratios(proximal, response.behaviour, response.trained)
            return critic_advantages(self.config, self._advantage_function, response, values, log_rho, penalty)
        if algorithm.kl.kind == "k1_reward":
            return response.advantages - penalty_to_go(penalty, response, algorithm.gamma), None
        return response.advantages, None

    def _mean_weight(self, minibatch: MiniBatch) -> float:
        """Return the mean importance weight of a minibatch's trained tokens on all ranks; 1 if it is 0. Collective."""
        weights = []
        for micro in minibatch.micro_batches:
            log_rho = _log_rho_at_start(micro)
            no_advantages = torch.zeros_like(log_rho)  # the configuration admits only rules that do not read them
            found, _ = self._weights(log_rho, no_advantages, micro.response)
            weights.append(found[micro.response.trained])
        flat = self._gather(weights).double()
        return float(flat.mean()) if flat.any() else 1.0

    def _m2po_limit(self, minibatch: MiniBatch) -> tuple[float, int]:
        """Return the result of `m2po_limit` for a minibatch's trained tokens on all ranks. Collective.

        Without the M2PO mask (tau 0) the limit keeps all tokens.
        """
        tau = self.config.algorithm.correction.masks.m2po
        if tau == 0:
            return minibatch.m2po_limit
        squares, places = [], []
        for micro in minibatch.micro_batches:
            trained = micro.response.trained
            squares.append(_log_rho_at_start(micro)[trained].square())
            places.append(micro.response.places[trained])
        return m2po_limit(self._gather(squares), self._gather(places), tau)

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values of all shares of the batch, concatenated. [n_i] on this rank -> [n]. Collective.

        All ranks of a sequence group have the same values, so only the first rank's are taken.
        """
        values = torch.cat(list(parts))
        sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(values)], device=values.device))
        longest = max(int(size) for size in sizes)
        padded = [values.new_zeros(longest) for _ in sizes]
        dist.all_gather(padded, torch.cat([values, values.new_zeros(longest - len(values))]))
        whole = [part[: int(size)] for part, size in zip(padded, sizes, strict=True)]
        return torch.cat(whole[:: self.config.learner.sequence_parallel])

    def _weights(self, log_rho: Tensor, advantages: Tensor, response: ResponseTokens) -> tuple[Tensor, Tensor]:
        """Return (importance weights [N] of the loss, truncated [N] bool).

        `truncated` tokens have a correction weight outside [floor, cap]. Weights are clamped to that range. If the
        correction is not applied, all weights are 1.
        """
        correction = self.config.algorithm.correction
        raw = self._weights_of(log_rho, advantages, response.trained, response.rows, len(response.lengths))
        truncated = (raw < correction.floor) | (raw > correction.cap)
        if not self._correction.is_applied:
            return torch.ones_like(log_rho), truncated
        return raw.clamp(correction.floor, correction.cap), truncated


def _computed(tensor: Tensor | None) -> Tensor:
    """Return `tensor`, which is not None: the configuration needs it, so step start has computed it."""
    assert tensor is not None
    return tensor


def _log_rho_at_start(micro: MicroBatch) -> Tensor:
    return log_ratios(_computed(micro.proximal), micro.response.behaviour, micro.response.trained)
