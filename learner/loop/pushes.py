"""Pushes the learner's weights: to rollout servers, to servers that join, and to evaluation servers for an evaluation.

`Pusher` pushes to the servers of one pool. `Evaluations` decides which versions are evaluated during training.

A server that joins is filled first: it gets its first weights by itself, and they are compared with the learner's. It
checks also that the server loads every weight. Then the server gets the same pushes as the others.

The first push is verified, and every weight_sync.verify_every-th. A verified push compares the sums of each server's
weights with the learner's, and then logprobs. Logprobs alone would not show weights that one step has hardly moved, or
experts to which no token was sent. The first verified push also checks that a server loads every weight; an error ends
the run. A later one removes a server that differs, and the driver restarts that server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.messages.reports import EvaluationDue, EvaluationSkipped, ServersFilled, ServersLost
from async_rl.base.telemetry.timeline import Span, Timeline
from async_rl.base.types import Batch
from async_rl.base.weights.publisher import PushReport, Tolerance, WeightPublisher, open_filler, open_publisher
from async_rl.base.weights.servers import Member
from learner.loop.updater import Updater
from learner.models.policy import adapter_parcels, full_parameters

if TYPE_CHECKING:
    from learner.models.lora import AdapterParcels

_log = logging.getLogger(__name__)

VERIFY_TOLERANCE = {torch.float32: Tolerance(1e-3, 1e-3), torch.bfloat16: Tolerance(0.3, 3.0)}
"""[compute type] how far the logprobs of a server may differ from the learner's. In bfloat16 the two round differently:
with equal weights the mean difference of real small models is up to 0.1, and logits near 20 are rounded to an eighth.
Wrong weights differ by whole nats."""
VERIFY_TOKENS = 32
PATIENCE = 5
"""How many times as long as the slowest push to all servers a push may take for which training would wait: to
evaluation servers, or to servers that join."""
_REASONS = ("", "the evaluation before it is still running", "no evaluation server is up")
"""Why a version is not evaluated. Rank 0 broadcasts the index; 0: it is evaluated."""


class Pusher:
    """Pushes the policy's weights to the servers of one pool: `rollout` or `eval`. All ranks call `push` and `fill`.

    Only rank 0 talks to servers, so only its reports have measurements.

    Args:
        filler: brings servers that have joined their first weights. None: they get the next push.
    """

    def __init__(
        self, config: Config, updater: Updater, publisher: WeightPublisher, filler: WeightPublisher | None = None
    ) -> None:
        self._updater = updater
        self.publisher = publisher
        self._filler = filler
        self._adapters: AdapterParcels | None = None
        if config.weight_sync.lora == "adapter":
            from learner.models.lora import AdapterParcels

            self._adapters = AdapterParcels(updater.policy.lm, updater.dtype)
        self.members = publisher.members
        """The servers to push to. The driver reports here, from other threads, which servers join and which are lost.
        """
        self._timeouts = config.timeouts
        self._slowest_s = 0.0
        """How long the slowest push took so far (rank 0)."""
        self._verify_every = config.weight_sync.verify_every
        self._until_verified = 0
        """Number of pushes until a push is verified again; 0: the next one that has a batch."""
        self._is_first = True
        """Whether no push was verified yet."""
        self._first_filled: list[Member] = []
        """The servers that have got their first weights, or get them with the next push, and are not reported yet."""
        self._may_erase = self._verify_every > 0 and not config.rollout.server_url
        """Whether servers are filled with NaN before their first weights. A server that the run did not start may have
        other users.
        """

    @property
    def servers(self) -> tuple[str, ...]:
        """The names of the servers that get the push that runs now, or the next one. Only rank 0 knows them."""
        return self.members.names + (self._filler.members.names if self._filler else ())

    @property
    def short_limit(self) -> Limit:
        """How long one part of a push to other servers may take. Servers that take longer are given up."""
        limit = self._timeouts.limit("push_s")
        if not self._slowest_s:
            return limit
        slow = f"timeouts.silent_s, or {PATIENCE} times the slowest push to the rollout servers"
        return min(limit, Limit(max(self._timeouts.silent_s, PATIENCE * self._slowest_s), slow))

    def has_servers(self) -> bool:
        """Apply the driver's reports of servers (rank 0). Returns False if there is no server."""
        self.members.admit(self.members.take_joining())
        return bool(self.members)

    def someone_waits(self) -> bool:
        """Return on every rank whether servers have joined that need their first weights. Collective."""
        waits = torch.tensor(self.members.someone_waits())
        dist.broadcast(waits, 0)  # on the CPU: with NCCL the ranks that wait would keep their GPUs busy
        return bool(waits)

    def release_server_memory(self) -> None:
        """Make every server, also restarted ones, give its GPU memory to the learner until the next push."""
        self._admit(self.members.take_joining())
        self.publisher.release_server_memory()

    def fill(self, version: int) -> tuple[PushReport, list[ServersLost | ServersFilled]]:
        """Push the policy as `version` to the servers that have joined since the last call. Collective.

        The other servers are not disturbed, unless servers and learner take turns on their GPUs. A server that refuses
        the weights, can't be reached or has other weights afterwards is lost.

        Returns:
            The report of the push, and reports of the servers that have the weights and of those that are lost.
        """
        joined = self.members.take_joining()
        if self._filler is None:
            self._admit(joined)
            report, lost = self.push(version)
        else:
            self._filler.members.replace(joined)
            self._filler.members.limit = self.short_limit
            report, lost = self._push(self._filler, version, erases=self._may_erase, compares=self._verify_every > 0)
            filled = self._filler.members.current
            if self._filler.rank == 0:
                self._filler.transport.disconnect()
            self._filler.members.replace(())
            self._admit(filled)
        # filled ones first: the driver may restart a lost server once another one of its kind serves
        return report, [*self.take_filled(version), *lost]

    def take_filled(self, version: int) -> list[ServersFilled]:
        """Return a report of the servers that have got their first weights, `version`, since the last call; or [].

        Call it after a push. Servers that have released their memory before a step get the push of that step.
        """
        filled = [member for member in self._first_filled if member in self.members.current]
        self._first_filled.clear()
        servers = tuple((member.name, member.start) for member in filled)
        return [ServersFilled(servers=servers, version=version)] if servers else []

    def _admit(self, members: Sequence[Member]) -> None:
        self.members.admit(members)
        self._first_filled += members

    def push(self, version: int, batch: Batch | None = None) -> tuple[PushReport, list[ServersLost]]:
        """Push the policy as `version` to all servers. Collective.

        If servers die, the push is repeated without them, even if none is left. If its report says `repeats`, it is
        repeated with the same servers.

        Args:
            batch: a row of it serves to verify the push, if that is due. None: only the weights of servers that have
                joined are compared.

        Returns:
            The report of the push, and reports of the servers that died or differ; the driver restarts them.

        Raises:
            WeightSyncError, WaitTimeoutError: a live server refused, did not answer, or does not serve the learner's
                weights.
        """
        # before the push, after which servers in turns have the memory that a forward pass needs
        is_due = self._verify_every > 0 and self._until_verified == 0
        probe = self._probe(batch) if batch and is_due else None
        erases = self._may_erase and is_due and self._is_first and self._filler is None
        report, lost = self._push(self.publisher, version, erases=erases, compares=is_due)
        self._slowest_s = max(self._slowest_s, report.seconds)
        self._until_verified = max(0, self._until_verified - 1)
        num_unequal = report.num_unequal
        if probe and (others := self._verify(*probe)):
            lost.append(others)
            num_unequal += len(others.servers)
        return replace(report, num_unequal=num_unequal), lost

    def _push(
        self, publisher: WeightPublisher, version: int, *, erases: bool, compares: bool
    ) -> tuple[PushReport, list[ServersLost]]:
        """Push until an attempt succeeds, as `push` does. Collective.

        Args:
            erases, compares: as in WeightPublisher.push.
        """
        lost: list[ServersLost] = []
        num_repeats = num_unequal = 0
        while True:
            report = publisher.push(self._weights(), version, erases=erases, compares=compares)
            if report.lost:
                servers = tuple((member.name, member.start) for member in report.lost)
                lost.append(ServersLost(servers=servers, cause=report.cause))
            num_unequal += report.num_unequal
            failed = torch.tensor(report.has_failed)
            dist.broadcast(failed, 0)  # on the CPU: with NCCL the ranks that wait would keep their GPUs busy
            if not failed:
                return replace(report, num_repeats=num_repeats, num_unequal=num_unequal), lost
            if report.repeats:
                num_repeats += 1
                _log.warning("The push of version %d is repeated: %s", version, report.cause)

    def close(self) -> None:
        self.publisher.close()
        if self._filler:
            self._filler.close()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context: inside, pushes send the moving average of the weights. No effect without learner.ema_decay.
        """
        return self._updater.averaged()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapters is not None:
            return adapter_parcels(self._updater.policy, self._adapters)
        return full_parameters(self._updater.policy, self._updater.dtype)

    def _probe(self, batch: Batch) -> tuple[list[int], list[float]]:
        """Return (the first tokens of a row of the batch, the learner's logprobs of these tokens). Collective.

        This pass leaves the root's parameters gathered; `_weights` frees them before the servers get memory.
        """
        group = batch.groups[0]
        tokens = [*group.prompt_tokens.tolist(), *group.rows[0].tokens.tolist()][:VERIFY_TOKENS]
        return tokens, self._updater.probe_logprobs(tokens)

    def _verify(self, tokens: list[int], logprobs: list[float]) -> ServersLost | None:
        """Compare each server's logprobs of these tokens with the learner's. Collective.

        Returns a report of the servers that differ, which get no more weights; None if all agree.

        Raises:
            WeightSyncError: a server does not serve the learner's weights, and no push was verified before.
        """
        lost, is_verified = None, torch.tensor(False)
        if self.publisher.rank == 0 and self.members:
            tolerance = VERIFY_TOLERANCE[self._updater.dtype]
            if self._is_first:
                is_verified.fill_(self.publisher.verify(tokens, logprobs, tolerance))
            else:
                found = self.publisher.compare(tokens, logprobs, tolerance)
                is_verified.fill_(bool(found))
                if causes := {name: cause for name, cause in found.items() if cause}:
                    members = self.members.remove(causes)
                    servers = tuple((member.name, member.start) for member in members)
                    lost = ServersLost(servers=servers, cause="; ".join(causes.values()))
        dist.broadcast(is_verified, 0)
        if is_verified:
            self._is_first, self._until_verified = False, self._verify_every - 1
        return lost


class Evaluations:
    """The evaluations during training, one at a time.

    A version that becomes due during another evaluation is skipped. But if a decision about a checkpoint may need its
    evaluation, its push waits until the other evaluation has ended.

    Evaluation servers, if there are any, get their own push while they are idle, so they serve one version for the
    whole evaluation. Otherwise rollout servers evaluate the version they serve, and with eval.pin_version the next push
    waits.

    Args:
        weights: pushes to the evaluation servers; None: there are none.
    """

    def __init__(self, config: Config, rank: int, timeline: Timeline, weights: Pusher | None):
        self.schedule = EvalSchedule(config)
        """When evaluations are due. Other threads report the end of an evaluation here."""
        self.weights = weights
        self._rank = rank
        self._timeline = timeline
        self._holds_pushes = config.evaluations_hold_pushes
        self._needs_evaluation_of = config.needs_evaluation_of
        self._push_spans: list[Span] = []

    def make_due(
        self, version: int, batch: Batch | None, push_limit: Limit
    ) -> list[EvaluationDue | EvaluationSkipped | ServersLost]:
        """Begin an evaluation of `version` if it is due, and return the reports for the driver. Collective.

        Call this once all rollout servers serve `version`. It pushes to the evaluation servers, if there are any.

        Args:
            batch: a batch with which the first push to the evaluation servers is verified.
            push_limit: how long one part of a push to the evaluation servers may take.
        """
        if not self.schedule.served(version):
            return []
        if reason := self._why_skipped():
            return [EvaluationSkipped(version=version, reason=reason)]
        if self.weights is None:
            self.schedule.begin()
            return [EvaluationDue(version=version)]
        lost: list[ServersLost] = []
        if version > 0:  # the servers have loaded version 0
            self.weights.members.limit = push_limit
            with self._timeline.span("sync", "eval push"), self.weights.averaged():
                report, lost = self.weights.push(version, batch)
            self._push_spans += report.spans
        if not self.weights.servers:
            return [*lost, EvaluationSkipped(version=version, reason=_REASONS[2])]
        self.schedule.begin()
        return [*lost, EvaluationDue(version=version, servers=self.weights.servers)]

    def await_end(self, version: int) -> None:
        """Wait on every rank for the end of an evaluation that must end before `version` is pushed, if there is one."""
        if not (self._holds_pushes or (self.schedule.is_due(version) and self._needs_evaluation_of(version))):
            return
        with nullcontext() if self.schedule.is_idle else self._timeline.span("eval", "held push"):
            if self._rank == 0:
                self.schedule.wait()
            dist.barrier()

    def close(self) -> None:
        if self.weights:
            self.weights.close()

    def drain_spans(self) -> list[Span]:
        """Return the pauses of the evaluation servers since the last call, and forget them."""
        spans, self._push_spans = self._push_spans, []
        return spans

    def _why_skipped(self) -> str:
        """Return on every rank why rank 0 can't start an evaluation now; "" if it can. Collective."""
        number = 0
        if self._rank == 0:
            if not self.schedule.is_idle:
                number = 1
            elif self.weights and not self.weights.has_servers():
                number = 2
        shared = torch.tensor(number)
        dist.broadcast(shared, 0)  # on the CPU, where waiting costs nothing
        return _REASONS[int(shared)]


class EvalSchedule:
    """Decides on one learner rank when an evaluation is due. The driver reports its end here from another thread."""

    def __init__(self, config: Config) -> None:
        self._eval = config.eval
        self._timeout_s = config.timeouts.batch_s
        self._push_every = config.weight_sync.every_steps
        # Version 0 is due on evaluation servers; else the driver has it evaluated before training.
        self._served = -1 if config.placement.eval.servers else 0
        self._idle = threading.Event()
        self._idle.set()

    def resume(self, version: int) -> None:
        """Continue from `version`. If its evaluation was due, it is due again, because it may not have ended.

        So the version served before it is assumed: the last multiple of weight_sync.every_steps below `version`.
        """
        self._served = (version - 1) // self._push_every * self._push_every

    def served(self, version: int) -> bool:
        """Record that every server serves `version`, and return whether an evaluation of this version is due.

        The first version served at or after each multiple of eval.every_steps is due.
        """
        is_due, self._served = self.is_due(version), version
        return is_due

    def is_due(self, version: int) -> bool:
        """Return whether `version`, if all servers serve it next, must be evaluated by eval.every_steps."""
        if self._eval.every_steps == 0 or self._eval.num_prompts == 0:
            return False
        return self._served // self._eval.every_steps < version // self._eval.every_steps

    @property
    def is_idle(self) -> bool:
        """Whether no evaluation runs: none since `begin` and before `ended`."""
        return self._idle.is_set()

    def begin(self) -> None:
        """Record that an evaluation runs until `ended` is called. Called before the driver is told to start it."""
        self._idle.clear()

    def ended(self) -> None:
        """Record that the evaluation has ended, or that its result is no longer wanted."""
        self._idle.set()

    def wait(self) -> None:
        """Wait until no evaluation runs.

        Raises:
            WaitTimeoutError: the evaluation did not end within timeouts.batch_s.
        """
        if not self._idle.wait(self._timeout_s):
            raise WaitTimeoutError(
                f"the learner held its push back for {self._timeout_s:.0f} s (timeouts.batch_s) for the held-out "
                "evaluation before it, which has not ended. Make eval.num_prompts smaller or eval.every_steps larger, "
                "or unset what needs each evaluation: eval.pin_version, checkpoint.keep_best, watch.action"
            )


def open_pushers(config: Config, updater: Updater, rank: int) -> dict[str, Pusher]:
    """Return a Pusher for each pool with servers: `rollout` and, with placement.eval.servers, `eval`."""
    publisher = open_publisher(config, [], rank, updater.device)
    filler = None if config.shares_gpus else open_filler(publisher)
    pushers = {"rollout": Pusher(config, updater, publisher, filler)}
    if config.placement.eval.servers:
        for_eval = open_publisher(config, [], rank, updater.device)
        for_eval.outlives_servers = True  # training continues without them
        pushers["eval"] = Pusher(config, updater, for_eval)
    return pushers
