"""Lets the driver move the depth of a run (staleness.depth: auto): it feeds the controller, and sends its moves.

Decisions are simulated in a thread of the driver, so that no one waits for them, and are put off as long as they would
take more than MOST_CPU of the run's time. The thread has the priority of the others: it holds Python's lock from time
to time, and the driver would wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from async_rl.config import Config, depth_at, resumed_slots
from async_rl.depth.choice import Forecast, Prospect
from async_rl.depth.controller import MEASURED_STEPS, DepthController, Move
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.run_log import RunLog
from async_rl.driver.watchdog import Watchdog
from async_rl.messages.reports import (
    DepthMoved,
    EvaluationDue,
    Report,
    ServersLost,
    StepDone,
    WorkerReport,
)
from async_rl.storage.checkpoints import resumed_training_state
from async_rl.telemetry.metrics import Metric, reduce_metrics
from async_rl.telemetry.status import depth_text

LOST_SERVERS = "push/lost_servers"
DISTURBING = frozenset({"checkpoint/pause_s", LOST_SERVERS, "time/paused_s", "time/held_by_eval_s"})
"""Metrics of steps that take other times: with a checkpoint, a push that lost a server, a pause of the guard, or a push
that waited for an evaluation."""
TOLD_AFTER_STEPS = 3 * MEASURED_STEPS
MOST_CPU = 0.01
"""The largest share of one core that decisions take, but for the first."""


class DepthTuner:
    """Reads the reports of a run's processes, and has learner/0 move the depth."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog, watchdog: Watchdog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._watchdog = watchdog
        saved = resumed_training_state(config)
        slots = resumed_slots(saved.buffer, config.slot_limits, config.slots) if saved else config.slots
        depth, version = depth_at(slots, config.fresh_per_step), saved.version if saved else 0
        self._controller = DepthController(config, depth, version)
        self._servers = config.placement.rollout.servers
        self._is_disturbed = True  # the first step warms up
        self._starts = 0
        """How often processes had been started when the last step ended; 0 in the first step, whose groups warm up."""
        self._is_deciding = False
        """Whether a decision is being simulated, or one has failed: no other begins then."""
        self._has_told = False
        """Whether it was said that nothing is measured."""
        self._since = version
        """The version since which the servers are the same."""
        self._cpu_s = 0.0
        self._last_cpu_s = 0.0
        """The time of the last decision alone, which the next one is expected to take, too."""
        self._began_s = time.monotonic()
        watchdog.depth = depth_text(depth, config.staleness.max)

    def add(self, report: Report, servers: int, is_evaluating: bool) -> Coroutine[Any, Any, None] | None:
        """Take a report of a rollout worker or of learner/0. Returns a decision that the caller runs as a task, if due.

        Args:
            servers: the number of rollout servers that are up.
            is_evaluating: whether a rollout server makes an evaluation.
        """
        controller, log = self._controller, self._log
        match report:
            case WorkerReport():
                # groups that wait for another buffer arrive late, and beside an evaluation they take longer
                if not (self._is_disturbed or self._has_restarted or is_evaluating):
                    controller.add_groups(report.groups)
            case EvaluationDue(servers=()) | ServersLost():
                self._is_disturbed = True
            case DepthMoved():
                controller.moved(report.slots)
                depth = depth_at(report.slots, self._config.fresh_per_step)
                text = f"{depth_text(depth, self._config.staleness.max)} since step {report.version}"
                self._watchdog.depth = text
                log.logger.note(f"{text}: {report.reason}")
            case StepDone() if report.metrics:
                if servers != self._servers:
                    self._servers, self._is_disturbed, self._since = servers, True, report.version
                    controller.change_servers(servers)
                values = reduce_metrics(report.metrics)
                is_disturbed = self._is_disturbed or self._has_restarted or is_evaluating
                is_disturbed |= not DISTURBING.isdisjoint(values)
                self._send(controller.add_step(report.version, values, is_disturbed=is_disturbed))
                self._tell_if_nothing_is_measured()
                # a push ends its step: the servers that it lost are missing in the next one
                self._is_disturbed, self._starts = is_evaluating or LOST_SERVERS in values, self._watchdog.starts
                log.add_metrics([*controller.metrics(), Metric("auto/cpu_s", self._cpu_s, "last")])
                return self._decision()
        return None

    @property
    def _has_restarted(self) -> bool:
        """Whether the buffer, a server or a judge was started again since the last step ended."""
        return self._starts != self._watchdog.starts

    def _tell_if_nothing_is_measured(self) -> None:
        """Say once that the depth stays as it is, if no decision can be made."""
        controller = self._controller
        if controller.has_measured or self._has_told or controller.version < self._since + TOLD_AFTER_STEPS:
            return
        self._has_told = True
        self._log.logger.note(
            f"staleness.depth auto has measured too little in {controller.version - self._since} steps, so the depth "
            f"stays {controller.depth:g}: steps with a checkpoint (checkpoint.every_steps) and beside an evaluation by "
            "the rollout servers (eval.every_steps) are left out. Make both rarer, or set placement.eval.servers"
        )

    def _decision(self) -> Coroutine[Any, Any, None] | None:
        has_time = self._cpu_s + self._last_cpu_s <= MOST_CPU * (time.monotonic() - self._began_s)
        if self._is_deciding or not has_time:
            return None
        with self._none_fail():
            if prospect := self._controller.prospect():
                self._is_deciding = True
                return self._decide(prospect)
        return None

    async def _decide(self, prospect: Prospect) -> None:
        with self._none_fail():
            forecasts, cpu_s = await asyncio.to_thread(self._look, prospect)
            self._cpu_s += cpu_s
            self._last_cpu_s = cpu_s
            self._is_deciding = False
            self._send(self._controller.decide(forecasts))

    @contextlib.contextmanager
    def _none_fail(self) -> Iterator[None]:
        """Have no error of a decision end the run, which can do without: it is told, and none is made any more."""
        try:
            yield
        except Exception as error:
            self._is_deciding = True
            self._log.logger.note(
                f"staleness.depth auto can not decide: {error!r}. The depth stays {self._controller.wanted:g} from now "
                "on, but for alarms. This is a bug: please report it with the run's config"
            )

    def _look(self, prospect: Prospect) -> tuple[dict[float, Forecast], float]:
        began_s = time.thread_time()
        return self._controller.look(prospect), time.thread_time() - began_s

    async def tell_outlook(self) -> None:
        """Say on the console, after training, what a higher bound would have given, if enough was measured."""
        with self._none_fail():
            if prospect := self._controller.last_prospect():
                self._log.logger.note(await asyncio.to_thread(self._controller.outlook, prospect))

    def _send(self, move: Move | None) -> None:
        if move:
            self._processes.actors["learner/0"].move_depth.remote(move.slots, move.reason)
