"""One batch becomes one new policy version. `Updater.update` is the whole step, from top to bottom:

    advantages      algorithms/advantages.py        rewards of whole groups -> an advantage for each response token
    pack            packing.py                      rows -> rows, micro-batches and minibatches of this rank
    at_step_start   the networks in models/         proximal logprobs, values, reference logprobs, without gradient
    prepare         algorithms/objective.py         numbers over all tokens of the batch, such as those for whitening
    for each minibatch:
        forward, loss, backward   models/, algorithms/objective.py; pretraining.py for text in addition to the answers
        step                      optimizer.py
    metrics         algorithms/diagnostics.py

A loss is a sum over trained tokens, divided by a number that belongs to the minibatch of all ranks. So the gradient
does not depend on how a minibatch is split into ranks and micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError
from async_rl.base.models_and_data.experts import experts_of, recorded_experts
from async_rl.base.models_and_data.model_folder import forbidden_tokens, policy_lr
from async_rl.base.run_dir.checkpoints import TrainingState
from async_rl.base.run_dir.log_ratio_file import LogRatioWriter, StepLogRatios, link_past
from async_rl.base.telemetry.metrics import TOKENS, Metric
from async_rl.base.types import Batch, FloatArray
from async_rl.base.weights.transport import serving_dtype
from learner.algorithms.advantages import batch_advantages
from learner.algorithms.diagnostics import (
    MetricAccumulator,
    Totals,
    batch_metrics,
    explained_variance,
    loss_metrics,
    rule_metrics,
    token_metrics,
)
from learner.algorithms.losses import kl_k3, log_ratios, step_scale, weight_sums
from learner.algorithms.objective import Objective
from learner.algorithms.parity import parity_metrics
from learner.loop.optimizer import Optimizer, OptimizerStep, lr_decay, non_finite
from learner.loop.ranks import open_ranks
from learner.memory.sizes import free_room, surely_fits
from learner.models.policy import layout_of, open_policy, shard
from learner.packing import (
    ForwardInputs,
    MicroBatch,
    MiniBatch,
    collate,
    make_pieces,
    plan_microbatches,
    split_minibatches,
)

if TYPE_CHECKING:
    from learner.models.balance import RouterBalance
    from learner.models.critic import Critic
    from learner.models.reference import Reference

Answers = tuple[tuple[int, int], ...]
_TESTED_TOKENS = 16
"""Number of tokens in the test of routing replay at the start."""


class Updater:
    """Trains the networks of one learner rank. Every rank gets the same batch and trains on its share of it.

    The ranks of a sequence group (learner.sequence_parallel) have the same share, and get the same losses and sums.

    torch.distributed's default group must exist.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        checkpoints = decide_gradient_checkpointing(config, device)
        self.objective = Objective(config)
        self.device = device
        torch.manual_seed(config.run.seed)
        self.dtype = dtype = serving_dtype(config, device.type)
        """The type of activations, and of the weights that servers get."""
        self.ranks = ranks = open_ranks(config, device)
        self.policy = open_policy(config.model, dtype)
        self.policy.forbidden = forbidden_tokens(config)
        if experts := recorded_experts(config):
            from async_rl.base.models_and_data.routing import Routing

            self.policy.routing = Routing(self.policy.lm, experts)
        offloads = config.learner.offload == "all"
        self._balance: RouterBalance | None = None
        if config.algorithm.router_aux_coef:
            from learner.models.balance import RouterBalance

            self._balance = RouterBalance(self.policy.lm, experts_of(config.model.path))
        shard(self.policy, ranks, config.learner, offloads, checkpoints)
        self._reward_model = None
        if config.reward_model.path:
            from learner.models.reward_model import RewardModel

            self._reward_model = RewardModel(config, device, dtype, ranks)
        lr = policy_lr(config) / config.watch.kl_factor
        self.optimizers = {"policy": Optimizer("policy", self.policy, lr, config.learner, averages=True)}
        """The optimizer of each network that is trained: `policy` and, if the advantage needs one, `critic`."""
        lms = [self.policy.lm]
        self._reference: Reference | None = None
        if self.objective.needs_reference:
            from learner.models.reference import Reference

            self._reference = Reference(config, self.policy, dtype, ranks)
            lms.append(self._reference.lm)
        self.critic: Critic | None = None
        if self.objective.advantage.needs_critic:
            from learner.models.critic import open_critic

            self.critic = open_critic(config, dtype)
            shard(self.critic, ranks, config.learner, offloads, checkpoints)
            self.optimizers["critic"] = Optimizer("critic", self.critic, config.critic.lr, config.learner)
            lms.append(self.critic.lm)
        self._layout = layout_of(lms)
        self.pretraining = None
        if config.algorithm.ptx_coef:
            from learner.stages.pretraining import PretrainingTerm

            layout = layout_of([self.policy.lm])
            self.pretraining = PretrainingTerm(config, self.policy, ranks, layout, device)
        if self.policy.routing:
            self.policy.routing.self_test(lambda: torch.tensor(self.probe_logprobs(range(_TESTED_TOKENS))))

    def update(self, batch: Batch, recorder: LogRatioRecorder | None = None) -> list[Metric]:
        """Train on `batch`, and return metrics over all ranks. Collective.

        Afterwards the attribute `trained` is the batch with the rewards that were used: a reward model replaces the
        task's.

        Args:
            recorder: gets the logprobs of every forward pass.

        Raises:
            AsyncRLError: learner.max_skipped_steps optimizer steps in a row had no finite numbers, or weights became
                infinite or NaN.
        """
        algorithm = self.config.algorithm
        metrics: list[Metric] = []
        if self._reward_model:
            rule = batch
            batch = self._reward_model.score(rule)
            metrics += rule_metrics(rule, batch, is_gold=self.config.reward_model.leaves_task_out)

        self.trained = batch
        advantages = batch_advantages(self.config, batch)
        minibatches = self.at_step_start(self.pack(batch, advantages))
        minibatches = self.objective.prepare(minibatches)  # what depends on all tokens of the batch

        sums = MetricAccumulator(copies=self.config.learner.sequence_parallel)
        for optimizer in self.optimizers.values():
            optimizer.begin()
        steps: dict[str, list[OptimizerStep]] = {name: [] for name in self.optimizers}
        decay = lr_decay(batch.version, self.config)
        trains_policy = self.critic is None or batch.version >= self.config.critic.warmup_steps
        is_skipped, is_stopped, scale, passes = False, False, 1.0, 0
        for epoch, minibatch in itertools.product(range(algorithm.epochs), minibatches):
            losses, logprobs = self.forward_backward(minibatch, sums, trains_policy, is_first_epoch=epoch == 0)
            passes += 1
            if recorder:
                recorder.add(minibatch, logprobs, self.objective.proximal)
            if algorithm.skip_batch_kl and not any(steps.values()):
                is_skipped = self._kl_behaviour_proximal(minibatches, logprobs) > algorithm.skip_batch_kl
            if is_skipped:
                break
            if self.config.learner.lr_by_ess != "off" and not any(steps.values()):
                scale = self._lr_scale(minibatches, logprobs)
            if algorithm.early_stop_kl and trains_policy:
                proximal = [micro.proximal for micro in minibatch.micro_batches]
                is_stopped = self._mean_kl([minibatch], proximal, logprobs) > algorithm.early_stop_kl
                trains_policy = not is_stopped
            if self.critic is not None:
                steps["critic"].append(self.optimizers["critic"].step(losses["critic"], decay))
            if trains_policy:
                if self.pretraining:
                    losses["policy"] += self.pretraining.backward(self.optimizers["policy"].steps, sums)
                steps["policy"].append(self.optimizers["policy"].step(losses["policy"], decay * scale))
            elif self.critic is None:
                break
        if self.policy.routing:
            replayed, changed = self.policy.routing.take_counts()
            sums.add(routing_replayed=replayed.to(self.device), routing_changed=changed.to(self.device))
        totals = self._totals(sums)
        metrics += [*batch_metrics(batch), *token_metrics(totals), *loss_metrics(sums, totals)]
        metrics += parity_metrics(totals, self.dtype)
        if self.pretraining:
            metrics += self.pretraining.metrics(totals)
        if self._balance:
            metrics.append(Metric("routing/balance_loss", float(totals["router_balance"]) / passes))
        if replays := float(totals.get("routing_replayed", 0.0)):
            changed_fraction = float(totals["routing_changed"]) / replays
            metrics.append(Metric("routing/changed_fraction", changed_fraction, by=TOKENS, unit="share"))
        metrics += self.objective.finish(totals, batch, has_trained_policy=bool(steps["policy"]))
        metrics += [metric for name, taken in steps.items() for metric in _step_metrics(name, taken, totals)]
        if self.critic is not None:
            metrics.append(Metric("critic/explained_variance", explained_variance(totals)))
        return metrics + self._limit_metrics(scale, is_skipped, is_stopped)

    def _limit_metrics(self, scale: float, is_skipped: bool, is_stopped: bool) -> list[Metric]:
        """Return the metrics of learner.lr_by_ess, algorithm.skip_batch_kl and .early_stop_kl, where these are set.

        Args:
            scale: the factor of the learning rate.
            is_skipped, is_stopped: a KL limit has skipped the batch, or has stopped the training of the policy on it.
        """
        algorithm, metrics = self.config.algorithm, []
        if self.config.learner.lr_by_ess != "off":
            metrics.append(Metric("policy/lr_scale", scale))
        if algorithm.skip_batch_kl:
            metrics.append(Metric("policy/skipped_batches", float(is_skipped), "sum"))
        if algorithm.early_stop_kl:
            metrics.append(Metric("policy/early_stops", float(is_stopped), "sum"))
        return metrics

    def _totals(self, sums: MetricAccumulator) -> Totals:
        """Return the sums over all ranks at the end of an update. Raises AsyncRLError if a weight is not finite."""
        for name, optimizer in self.optimizers.items():
            optimizer.drop()  # gradients that no step has used
            sums.add(**{f"{name}_weights": optimizer.largest_weight(), f"{name}_moved": optimizer.moved()})
        totals = sums.reduce()
        for name, optimizer in self.optimizers.items():
            if not np.isfinite(totals[f"{name}_weights"]):
                tensor = non_finite(optimizer.module) or "a tensor of another rank"
                lr = "learner.lr" if name == "policy" else "critic.lr"
                raise AsyncRLError(
                    f"{name}: weights are not finite after the optimizer's steps: {tensor} holds NaN or infinity. "
                    f"Lower {lr}, and resume from the newest checkpoint"
                )
        return totals

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context: inside, the policy's weights are their moving average. Every rank must enter and leave it.

        Without learner.ema_decay the context has no effect.
        """
        average = self.optimizers["policy"].average
        return average.in_place() if average else nullcontext()

    def pack(self, batch: Batch, advantages: Sequence[Sequence[FloatArray]]) -> list[MiniBatch]:
        """Return the minibatches of this rank's share of the batch, each with its micro-batches.

        Args:
            advantages: [group][row], [T] each.
        """
        config = self.config
        rng = np.random.default_rng((config.run.seed, batch.version))
        budget, ranks = config.learner.max_tokens_per_forward, self.ranks
        minibatches = []
        for pairs in split_minibatches(batch.groups, config.algorithm.num_minibatches, rng):
            pieces = make_pieces(batch.groups, pairs, budget, -(-len(pairs) // ranks.shares), self._layout)
            cuts = plan_microbatches(pieces, ranks.shares, budget, self._layout)[ranks.share]
            filler = [[min(pieces, key=lambda piece: piece.length)]]  # for a rank with fewer micro-batches
            num_tokens = sum(int(batch.groups[g].rows[i].mask.sum()) for g, i in pairs)
            micro_batches = tuple(
                collate(batch, rows or filler, advantages, self.device, is_trained=bool(rows)) for rows in cuts
            )
            normaliser = self.objective.normaliser(batch.groups, pairs)
            minibatches.append(MiniBatch(micro_batches, max(1, num_tokens), normaliser))
        return minibatches

    @torch.no_grad()
    def at_step_start(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the minibatches with proximal logprobs, values and reference logprobs, where the objective needs them.

        Called before the first optimizer step, so that these are of the policy version at step start. Collective.
        """
        objective, critic, reference = self.objective, self.critic, self._reference

        def started(micro: MicroBatch) -> MicroBatch:
            trained, inputs = micro.response.trained, micro.inputs
            proximal = entropy = None
            if objective.computes_proximal or self._balance:
                logprobs, entropies, *_ = self.policy(inputs)
                if objective.computes_proximal:
                    proximal, entropy = torch.where(trained, logprobs, 0.0), entropies
                if self._balance:
                    counted.append(self._balance.counts(self._fed(micro)))
            return replace(
                micro,
                proximal=proximal, entropy=entropy,
                values=critic(inputs) if critic is not None and objective.computes_values else None,
                reference=torch.where(trained, reference.logprobs(inputs), 0.0) if reference else None,
            )

        done = []
        for minibatch in minibatches:
            counted: list[Tensor] = []
            minibatch = replace(minibatch, micro_batches=tuple(map(started, minibatch.micro_batches)))
            if self._balance:
                minibatch = replace(minibatch, balance=self._balance.slopes(counted))
            done.append(minibatch)
        return done

    def _fed(self, micro: MicroBatch) -> Tensor:
        """Return a mask of the tokens that this rank computes: True for the batch's tokens, not for padding. [tokens]
        """
        assert micro.inputs.fed is not None
        return self.policy.own_tokens(micro.inputs.fed, False)

    def forward_backward(
        self, minibatch: MiniBatch, sums: MetricAccumulator, trains_policy: bool, is_first_epoch: bool
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run forward, loss and backward for every micro-batch of a minibatch; the gradients add up. Collective.

        Args:
            sums: the sums for metrics; this pass is added.
            trains_policy: False: the policy only gets a forward pass, as in the critic's warm-up.

        Returns:
            This rank's part of the losses of `policy` and `critic`, and the learner logprobs [N] of each micro-batch.
        """
        totals = {name: torch.zeros((), device=self.device) for name in ("policy", "critic")}
        all_logprobs = []
        for micro in minibatch.micro_batches:
            values = None if self.critic is None else self.critic(micro.inputs)
            if values is not None and self.objective.trains_critic_first:  # then its activations are free again
                self._add_gradients(self.objective.critic_loss(micro, values) / minibatch.num_tokens)
                values = values.detach()
            with torch.set_grad_enabled(trains_policy):
                logprobs, entropy, *inside = self.policy(micro.inputs)
            masses, of_ids = (*inside, None, None)[:2]
            losses = self.objective.losses(minibatch, micro, logprobs, entropy, values, of_ids)
            self.objective.add_statistics(sums, micro, losses, entropy, is_first_epoch, masses)
            if losses.critic is not None:
                loss = losses.critic / minibatch.num_tokens
                if loss.requires_grad:
                    self._add_gradients(loss)
                totals["critic"] += loss.detach()
            loss = losses.policy / minibatch.normaliser
            if self._balance and minibatch.balance is not None:
                slices = self.config.learner.sequence_parallel  # each of them adds its own tokens alone
                balance = slices * self._balance.loss(self._fed(micro), minibatch.balance)
                loss = loss + self.config.algorithm.router_aux_coef * balance
                sums.add(router_balance=balance)
            if trains_policy:
                self._add_gradients(loss)
            totals["policy"] += loss.detach()
            all_logprobs.append(logprobs.detach())
        return totals, all_logprobs

    def _add_gradients(self, loss: Tensor) -> None:
        """Add the gradients of this rank's part of a loss.

        FSDP averages gradients over ranks. The factor `shares` makes that average a sum over the shares of the batch.
        """
        (loss * self.ranks.shares).backward()

    def _kl_behaviour_proximal(self, minibatches: Sequence[MiniBatch], logprobs: Sequence[Tensor]) -> float:
        """Return KL(behaviour || proximal) of the batch, in nats a token; see `_mean_kl`. Collective.

        Args:
            logprobs: the learner logprobs [N] of each micro-batch, as for `_proximal`.
        """
        behaviour = [micro.response.behaviour for minibatch in minibatches for micro in minibatch.micro_batches]
        return self._mean_kl(minibatches, behaviour, self._proximal(minibatches, logprobs))

    def _lr_scale(self, minibatches: Sequence[MiniBatch], logprobs: Sequence[Tensor]) -> float:
        """Return the factor, 0 to 1, of the policy's learning rate for this batch (learner.lr_by_ess). Collective.

        Args:
            logprobs: the learner logprobs [N] of each micro-batch, as for `_proximal`.
        """
        micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for micro, proximal in zip(micro_batches, self._proximal(minibatches, logprobs), strict=True):
            log_rho = log_ratios(proximal, micro.response.behaviour, micro.response.trained)
            sums += weight_sums(log_rho, micro.response, self.config.learner.lr_by_ess == "sequence")
        dist.all_reduce(sums)  # several ranks may add the same numbers, but only ratios of the sums count
        return step_scale(*sums.tolist())

    def _proximal(self, minibatches: Sequence[MiniBatch], logprobs: Sequence[Tensor]) -> list[Tensor]:
        """Return the proximal logprobs [N] of each micro-batch of the batch.

        Args:
            logprobs: the learner logprobs of the first forward pass with gradient. They serve as proximal logprobs if
                step start computed none; the batch then is one minibatch.
        """
        if not self.objective.computes_proximal:
            return list(logprobs)
        found = [micro.proximal for minibatch in minibatches for micro in minibatch.micro_batches]
        return [proximal for proximal in found if proximal is not None]

    def _mean_kl(
        self, minibatches: Sequence[MiniBatch], p: Sequence[Tensor | None], q: Sequence[Tensor | None]
    ) -> float:
        """Return the mean KL(p || q) over trained tokens of all ranks, in nats a token, by the k3 estimate. Collective.

        A NaN of a trained token makes the result NaN, which exceeds no limit; the optimizer then skips the step.

        Args:
            p, q: for each micro-batch the logprobs [N] of its tokens under the two policies.
        """
        micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, of_p, of_q in zip(micro_batches, p, q, strict=True):
            assert of_p is not None and of_q is not None
            total += torch.where(micro.response.trained, kl_k3(of_p, of_q), 0.0).double().sum()
        dist.all_reduce(total)
        tokens = sum(minibatch.num_tokens for minibatch in minibatches)
        return float(total) / self.config.learner.sequence_parallel / tokens

    @torch.no_grad()
    def probe_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) for each i at temperature 1, to verify servers. Collective."""
        ids = torch.tensor([tokens], device=self.device)
        count = len(tokens) - 1
        inputs = ForwardInputs(
            tokens=ids, segments=None, positions=None, where=torch.arange(count, device=self.device),
            targets=ids[0, 1:], temperature=torch.ones(count, device=self.device),
        )
        with self.policy.over_all_tokens():  # as servers score texts
            logprobs: list[float] = self.policy(inputs)[0].tolist()
        return logprobs


def decide_gradient_checkpointing(config: Config, device: torch.device) -> bool:
    """Return whether the run uses gradient checkpointing: the setting, or for "auto" what memory allows. Collective.

    "auto" becomes True if a full micro-batch without checkpointing does not fit into the memory of some rank.
    """
    if config.learner.gradient_checkpointing != "auto":
        return config.learner.gradient_checkpointing
    room = free_room(config, device)
    fits = surely_fits(config, room)
    if not fits:
        from learner.memory.memory_plan import RankMemoryEstimate

        fits = RankMemoryEstimate(config, device.type).fits_plain(room)
    wanted = torch.tensor(float(not fits))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return bool(wanted)


def _step_metrics(network: str, steps: Sequence[OptimizerStep], totals: Totals) -> list[Metric]:
    """Return the metrics of the optimizer steps that `network` took on one batch; [] without steps.

    They are the last learning rate, the root mean square change of a weight, the number of skipped steps, and the mean
    loss and gradient norm of the other steps.
    """
    if not steps:
        return []
    done = [step for step in steps if not step.skipped]
    squares, count = totals[f"{network}_moved"]
    metrics = [
        Metric(f"{network}/lr", steps[-1].lr, "last"),
        Metric(f"{network}/weight_change", float(np.sqrt(squares / count))),
        Metric(f"{network}/skipped_steps", float(len(steps) - len(done)), "sum"),
    ]
    if done:
        metrics.append(Metric(f"{network}/loss", sum(step.loss for step in done) / len(done)))
        metrics.append(Metric(f"{network}/grad_norm", sum(step.grad_norm for step in done) / len(done)))
    return metrics


class LogRatioRecorder:
    """Collects the log importance ratios (proximal - behaviour logprobs) of one rank's trained tokens during a step.

    After the step `write` has a thread write them to files, which async_rl/base/run_dir/log_ratio_file.py describes.

    Args:
        resumed: the state that the run resumes from; the files of its earlier steps are linked. None for a new run.
    """

    def __init__(self, config: Config, rank: int, resumed: TrainingState | None) -> None:
        if resumed and rank == 0:
            link_past(config.run_dir, resumed.lineage, resumed.version)
        self._writer = LogRatioWriter(config.run_dir, rank, config.journal_kept_steps)
        self._keeps_learner = config.algorithm.steps_per_batch > 1
        self._proximal: dict[Answers, Tensor] = {}
        """[rows of a micro-batch] proximal logprobs [N] of the tokens of these rows, NaN where not trained."""
        self._ratios: dict[Answers, Tensor] = {}  # [N] float16
        self._learner: dict[Answers, Tensor] = {}  # [N] float16

    @torch.no_grad()
    def add(
        self, minibatch: MiniBatch, all_logprobs: Sequence[Tensor],
        proximal_of: Callable[[MicroBatch, Tensor], Tensor],
    ) -> None:
        """Collect the logprobs of one forward pass over a minibatch.

        A step may pass over a token several times. The first pass gives its proximal logprob, the last one its learner
        logprob.

        Args:
            all_logprobs: for each micro-batch its learner logprobs [N] in this pass.
            proximal_of: the function that returns the proximal logprobs [N] of (micro-batch, learner logprobs).
        """
        for micro, of_micro in zip(minibatch.micro_batches, all_logprobs, strict=True):
            trained, rows = micro.response.trained, micro.rows
            if not rows:
                continue
            logprobs = torch.where(trained, of_micro, 0.0)
            if rows not in self._proximal:
                self._proximal[rows] = torch.where(trained, proximal_of(micro, logprobs), torch.nan)
                self._ratios[rows] = (self._proximal[rows] - micro.response.behaviour).half()
            if self._keeps_learner:
                self._learner[rows] = (logprobs - self._proximal[rows]).half()

    def write(self, batch: Batch, step: int) -> None:
        """Give the ratios collected in this step to the thread that writes them, and begin with the next step."""
        pairs = [pair for rows in self._ratios for pair in rows]
        if pairs:
            tokens = [len(batch.groups[g].rows[i].tokens) for g, i in pairs]
            self._writer.write(step, StepLogRatios(
                group_ids=np.array([batch.groups[g].group_id for g, _ in pairs], np.int64),
                rows=np.array([i for _, i in pairs], np.int32),
                lengths=np.array(tokens, np.int32),
                proximal=_joined(self._ratios),
                learner=_joined(self._learner) if self._keeps_learner else None,
            ))
        self._proximal, self._ratios, self._learner = {}, {}, {}

    def close(self) -> None:
        self._writer.close()


def _joined(parts: dict[Answers, Tensor]) -> np.ndarray:
    return torch.cat(list(parts.values())).cpu().numpy()
