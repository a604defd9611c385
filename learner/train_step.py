"""One batch becomes one new policy version: advantages, micro-batches, forward, backward, optimizer steps.

proximal logprobs  The policy at step start. With one optimizer step per batch its forward pass is the
                   gradient's, so no other is run; with several, a pass without gradient comes first.
values             The critic at step start, in the same way.
loss               objective.py: a sum over trained tokens, divided by what the minibatch holds on all ranks, so
                   that any split into ranks and micro-batches gives the same gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.config import Config
from async_rl.telemetry.metrics import Metric
from async_rl.types import Batch
from async_rl.weights.base import serving_dtype
from learner.algorithms.diagnostics import (
    MetricAccumulator,
    batch_metrics,
    explained_variance,
    median_trained_tokens,
    token_metrics,
)
from learner.algorithms.losses import kl_k3
from learner.algorithms.objective import Objective, policy_normaliser
from learner.algorithms.token_advantages import batch_advantages
from learner.checkpointing import Network
from learner.models.critic import load_critic
from learner.models.policy import layout_of, load_policy, shard
from learner.models.reference import Reference
from learner.models.reward_model import RewardModel
from learner.optimizer import Optimizer, OptimizerStep, lr_decay
from learner.packing.microbatches import (
    MicroBatch,
    MiniBatch,
    collate,
    make_pieces,
    plan_microbatches,
    split_minibatches,
)
from learner.ranks import open_mesh


class Updater:
    """The networks of one learner rank and their optimizers; torch.distributed's default group is up before.

    Every rank gets the same batch and trains its share of the rows.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.objective = Objective(config)
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        torch.manual_seed(config.run.seed)
        dtype = serving_dtype(config, device.type)
        mesh = open_mesh(config, device)
        self.policy = load_policy(config.model, device, dtype)
        shard(self.policy, self.policy.lm, mesh, dtype, config.learner)
        self._reward_model = RewardModel(config, device, dtype, mesh) if config.reward_model.path else None
        self._optimizer = Optimizer("policy", self.policy, config.learner.lr, config.learner)
        self._layout = layout_of(self.policy.lm)
        self._reference = None
        if self.objective.needs_reference:
            self._reference = Reference(config, self.policy, device, dtype, mesh)
            self._layout = self._layout.for_both(self._reference.layout)
        self.critic = None
        if config.algorithm.advantage_entry.needs_critic:
            self.critic = load_critic(config, device, dtype)
            shard(self.critic, self.critic.lm, mesh, dtype, config.learner)
            self._layout = self._layout.for_both(layout_of(self.critic.lm))
            self._critic_optimizer = Optimizer("critic", self.critic, config.critic.lr, config.learner)

    @property
    def networks(self) -> dict[str, Network]:
        """What a checkpoint holds."""
        networks = {"policy": Network(self.policy, self._optimizer)}
        if self.critic is not None:
            networks["critic"] = Network(self.critic, self._critic_optimizer)
        return networks

    def update(self, batch: Batch) -> list[Metric]:
        """Train on `batch`; returns the metrics of all ranks together. Collective.

        Raises:
            AsyncRLError: learner.max_skipped_steps optimizer steps in a row without finite numbers.
        """
        metrics: list[Metric] = []
        if self._reward_model:
            metrics.append(Metric("reward/rule_mean", mean_reward(batch)))
            batch = self._reward_model.score(batch)
        moves_policy = self.critic is None or batch.version >= self.config.critic.warmup_steps
        minibatches = self._plan(batch)
        self._remember_step_start(minibatches)
        tally = MetricAccumulator()
        decay = lr_decay(batch.version, self.config.run.steps, self.config.learner.decay_fraction)
        steps, stops = self._step_all(minibatches, tally, moves_policy, decay)
        totals = tally.reduce()
        metrics += [*batch_metrics(batch), *token_metrics(totals)]
        metrics += self.objective.finish(totals, median_trained_tokens(batch))
        metrics += [metric for network, taken in steps.items() for metric in _step_metrics(network, taken)]
        if self.critic is not None:
            metrics.append(Metric("critic/explained_variance", explained_variance(totals)))
        return metrics + stops

    def _step_all(
        self, minibatches: Sequence[MiniBatch], tally: MetricAccumulator, moves_policy: bool, decay: float
    ) -> tuple[dict[str, list[OptimizerStep]], list[Metric]]:
        """The optimizer steps of a batch, unless it is too far off or the policy has moved enough.

        Returns:
            (steps by network, how often a KL limit ended them).
        """
        algorithm = self.config.algorithm
        steps: dict[str, list[OptimizerStep]] = {"policy": [], "critic": []}
        is_skipped = is_stopped = False
        for epoch, minibatch in itertools.product(range(algorithm.epochs), minibatches):
            policy_loss, critic_loss = self._accumulate(minibatch, tally, moves_policy, is_first_epoch=epoch == 0)
            if algorithm.skip_batch_kl and not any(steps.values()):
                is_skipped = self._kl_behaviour_proximal(minibatches) > algorithm.skip_batch_kl
            elif algorithm.early_stop_kl and moves_policy:
                is_stopped = self._kl_proximal_learner(minibatch) > algorithm.early_stop_kl
            if is_skipped or is_stopped:
                self._optimizer.drop()
                if self.critic is not None:
                    self._critic_optimizer.drop()
                break
            if self.critic is not None:
                steps["critic"].append(self._critic_optimizer.step(critic_loss, decay))
            if moves_policy:
                steps["policy"].append(self._optimizer.step(policy_loss, decay))
        stops = {"policy/skipped_batches": is_skipped, "policy/early_stops": is_stopped}
        limits = (algorithm.skip_batch_kl, algorithm.early_stop_kl)
        counts = zip(stops.items(), limits, strict=True)
        return steps, [Metric(key, float(happened), "sum") for (key, happened), limit in counts if limit]

    def _kl_behaviour_proximal(self, minibatches: Sequence[MiniBatch]) -> float:
        """KL(behaviour || proximal) of the batch (k3, nats a token)."""
        pairs = [(m.behaviour, m.proximal, m.trained) for b in minibatches for m in b.micro_batches]
        return self._mean_kl(pairs, sum(minibatch.num_tokens for minibatch in minibatches))

    def _kl_proximal_learner(self, minibatch: MiniBatch) -> float:
        """KL(proximal || learner) of a minibatch after the steps so far (k3, nats a token)."""
        pairs = [(m.proximal, m.learner, m.trained) for m in minibatch.micro_batches]
        return self._mean_kl(pairs, minibatch.num_tokens)

    def _mean_kl(self, pairs: Sequence[tuple[Tensor | None, Tensor | None, Tensor]], num_tokens: int) -> float:
        """Over all ranks; collective. A non-finite one is over no limit: the optimizer deals with it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for p, q, trained in pairs:
            assert p is not None and q is not None
            total += torch.where(trained, kl_k3(p, q), 0.0).double().sum()
        dist.all_reduce(total)
        return float(total) / num_tokens

    @torch.no_grad()
    def probe_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1, one fewer than `tokens`. Collective."""
        ids = torch.tensor([tokens], device=self.device)
        nothing = torch.zeros(len(tokens) - 1, device=self.device)
        micro = MicroBatch(
            tokens=ids,
            segments=None,
            positions=None,
            where=torch.arange(len(tokens) - 1, device=self.device),
            targets=ids[0, 1:],
            temperature=torch.ones_like(nothing),
            behaviour=nothing,
            trained=nothing.bool(),
            comparable=nothing.bool(),
            old_kv=nothing.bool(),
            staleness=nothing.long(),
            rewards=nothing[:1],
            advantages=nothing,
            lengths=(len(tokens) - 1,),
            answers=(),
        )
        logprobs: list[float] = self.policy(micro)[0].tolist()
        return logprobs

    def _plan(self, batch: Batch) -> list[MiniBatch]:
        """This rank's micro-batches of every minibatch; minibatches don't depend on the number of ranks."""
        config = self.config
        advantages = batch_advantages(config, batch)
        rng = np.random.default_rng((config.run.seed, batch.version))
        sizes = [len(group.rollouts) for group in batch.groups]
        budget = config.learner.max_tokens_per_microbatch
        minibatches = []
        for pairs in split_minibatches(sizes, config.algorithm.minibatches, rng):
            pieces = make_pieces(batch.groups, pairs, budget, -(-len(pairs) // self.world_size), self._layout)
            cuts = plan_microbatches(pieces, self.world_size, budget, self._layout)[self.rank]
            num_tokens = sum(int(batch.groups[g].rollouts[i].mask.sum()) for g, i in pairs)
            micro_batches = tuple(collate(batch, cut, advantages, self.device) for cut in cuts)
            normaliser = policy_normaliser(config, batch.groups, pairs)
            minibatches.append(MiniBatch(micro_batches, max(1, num_tokens), normaliser))
        return minibatches

    @torch.no_grad()
    def _remember_step_start(self, minibatches: Sequence[MiniBatch]) -> None:
        micro_batches = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        for micro in micro_batches:
            if self.objective.needs_proximal:
                micro.proximal = self.policy(micro)[0]
            if self.critic is not None and self.objective.needs_values:
                micro.values = self.critic(micro)
            if self._reference:
                micro.reference = self._reference.logprobs(micro)
        if self.objective.whitens_penalised:
            self.objective.penalise(micro_batches)
        for minibatch in minibatches:
            self.objective.prepare(minibatch.micro_batches)

    def _accumulate(
        self, minibatch: MiniBatch, tally: MetricAccumulator, moves_policy: bool, is_first_epoch: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of one optimizer step; returns this rank's part of (policy loss, critic loss)."""
        policy_loss = torch.zeros((), device=self.device)
        critic_loss = torch.zeros((), device=self.device)
        for micro in minibatch.micro_batches:
            with torch.set_grad_enabled(moves_policy):
                logprobs, entropy = self.policy(micro)
            micro.learner = logprobs.detach()
            if self.config.algorithm.steps_per_batch == 1:
                micro.proximal = micro.learner
            values = None if self.critic is None else self.critic(micro)
            losses = self.objective.losses(micro, logprobs, entropy, values, tally, is_first_epoch)
            # FSDP averages gradients over ranks, so their sum takes a factor of world_size.
            if losses.critic is not None:
                loss = losses.critic / minibatch.num_tokens
                (loss * self.world_size).backward()
                critic_loss += loss.detach()
            loss = losses.policy / minibatch.normaliser
            if moves_policy:
                (loss * self.world_size).backward()
            policy_loss += loss.detach()
        return policy_loss, critic_loss


def mean_reward(batch: Batch) -> float:
    rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
    return sum(rewards) / len(rewards)


def _step_metrics(network: str, steps: Sequence[OptimizerStep]) -> list[Metric]:
    """Means over the optimizer steps of a batch; non-finite ones count as skipped and not in the means."""
    if not steps:
        return []
    done = [step for step in steps if not step.skipped]
    metrics = [
        Metric(f"{network}/lr", steps[-1].lr, "last"),
        Metric(f"{network}/skipped_steps", float(len(steps) - len(done)), "sum"),
    ]
    if done:
        metrics.append(Metric(f"{network}/loss", sum(step.loss for step in done) / len(done)))
        metrics.append(Metric(f"{network}/grad_norm", sum(step.grad_norm for step in done) / len(done)))
    return metrics
