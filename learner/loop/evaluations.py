"""Decides on each learner rank which versions are evaluated during training, and pushes them to evaluation servers."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
import torch.distributed as dist

from async_rl.base.config import Config, Limit
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.messages.reports import EvaluationDue, EvaluationSkipped, ServersLost
from async_rl.base.telemetry.timeline import Span, Timeline
from async_rl.base.types import Batch
from learner.loop.pusher import Pusher

_REASONS = ("", "the evaluation before it is still running", "no evaluation server is up")
"""Why a version is not evaluated. Rank 0 broadcasts the index; 0: it is evaluated."""


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
