"""Runs held-out evaluations during training, on the evaluation servers or, without any, on a rollout server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from typing import Any

from ray.actor import ActorHandle

from async_rl.base.config import Config, Limit
from async_rl.base.errors import AsyncRLError, ProcessDiedError, WaitTimeoutError
from async_rl.base.messages.reports import EvaluationDone, EvaluationDue
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup


class RunningEvaluations:
    """The evaluations that are running. Their results are logged; versions that are not evaluated are counted.

    Args:
        running: the names of the servers that are up; the caller updates it.
        declare_lost: called with the name of a server that has died, and the error of the call to it.
    """

    def __init__(
        self, config: Config, processes: ActorGroup, log: RunLog, running: Set[str],
        declare_lost: Callable[[str, AsyncRLError], None],
    ) -> None:
        self._limit = config.timeouts.limit("batch_s")
        self._processes = processes
        self._log = log
        self._running = running
        self._declare_lost = declare_lost
        self._tasks: dict[asyncio.Task[None], EvaluationDue] = {}
        self._is_cancelled = False

    def begin(self, due: EvaluationDue, tasks: asyncio.TaskGroup) -> None:
        """Start the evaluation `due` as a task in `tasks`. After `cancel` this does nothing."""
        if self._is_cancelled:
            return
        task = tasks.create_task(self._evaluate(due))
        self._tasks[task] = due
        task.add_done_callback(self._tasks.pop)

    def cancel(self) -> None:
        """Cancel the running evaluations and start no more, because the user ends the run."""
        self._is_cancelled = True
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until no evaluation is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)  # no time limit: `_evaluate` has one

    async def _evaluate(self, due: EvaluationDue) -> None:
        """Evaluate a version, and log the result.

        Each evaluation server answers an equal part of the prompts. If one dies, its part is given to another that
        still serves the version. The version stays without an evaluation if all takes longer than timeouts.batch_s, for
        which the learner may delay a push, or after another error of a server, the task or a reward.
        """
        limit, end_s = self._limit, time.monotonic() + self._limit.seconds
        count = max(1, len(due.servers))
        parts, reports, problem = list(range(count)), list[EvaluationDone](), ""
        own = {name: self._processes.actors.get(name) for name in due.servers if name in self._running}
        while parts and not problem:
            if not (actors := self._able(own, due)):
                problem = "no evaluation server that serves it is up" if due.servers else "no rollout server is up"
                break
            asked = [self._ask(*actors[i % len(actors)], due, (part, count), limit) for i, part in enumerate(parts)]
            answers = await asyncio.gather(*asked, return_exceptions=True)  # the next one begins when all have ended
            for error in (answer for answer in answers if isinstance(answer, BaseException)):
                if not isinstance(error, AsyncRLError):  # else of the server, the task or the reward: training goes on
                    raise error
                problem = problem or str(error).partition("\n")[0] or repr(error)
            reports += (answer for answer in answers if isinstance(answer, EvaluationDone))
            parts = [part for part, answer in zip(parts, answers, strict=True) if answer is None]
            limit = Limit(max(0.0, end_s - time.monotonic()), f"what was left of {self._limit.key}")
        metrics = (metric for report in reports for metric in report.metrics)
        oldest = {metric.value for metric in metrics if metric.key == "eval/oldest_version"}
        if due.servers and not problem and (other := oldest - {float(due.version)}):
            problem = f"an evaluation server was started again, and answered with version {min(other):.0f}"
        if problem:
            self._log.skipped_eval(due.version, problem)
        else:
            self._log.add_eval(*reports)
        self._processes.actors["learner/0"].evaluated.remote()

    def _able(self, own: dict[str, ActorHandle | None], due: EvaluationDue) -> list[tuple[str, Any]]:
        """Return (name, actor) of the servers that can evaluate `due`.

        These are the servers of `own` that have not been lost or restarted since, because a restarted one lacks the
        version. If `due` names no evaluation servers, it is the first rollout server that is up.

        Args:
            own: the evaluation servers when the evaluation began, by name.
        """
        if not due.servers:
            names = sorted(name for name in self._running if name.startswith("rollout"))[:1]
            return [(name, self._processes.actors[name]) for name in names]
        actors = self._processes.actors
        return [(n, actor) for n, actor in own.items() if n in self._running and actors.get(n) is actor]

    async def _ask(
        self, name: str, actor: Any, due: EvaluationDue, part: tuple[int, int], limit: Limit
    ) -> EvaluationDone | None:
        """Make a server evaluate a part of the prompts, and return its report; None if the server has died."""
        call = actor.evaluate.remote(due.version, beside_training=not due.servers, part=part)
        try:
            report: EvaluationDone = await self._processes.call(
                name, call, limit, f"the evaluation of version {due.version}"
            )
        except (WaitTimeoutError, asyncio.CancelledError):  # else it goes on beside the next one
            self._processes.cancel(call)
            raise
        except ProcessDiedError as error:
            if self._processes.actors.get(name) is actor:
                self._declare_lost(name, error)
            return None
        return report
