"""Has the run do what its guard decides: pause, go back to an earlier checkpoint, or end with the model of one.

    action         the driver's part
    pause          learner/0 takes no batch until `async-rl guard` has answered; status.json says why
    rollback       the learner stops, with a checkpoint; async_rl/pipeline.py resumes from the one before the trouble
    stop_at_best   the learner stops; async_rl/pipeline.py writes the model of that checkpoint

What is done is written to run_dir/guard_events.jsonl before it is done, so that a resumed run goes on with it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any, Literal

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.early_end import end_early, write_model_of
from async_rl.driver.run_log import RunLog
from async_rl.driver.watchdog import Watchdog
from async_rl.guard.decision import Finding, Guard
from async_rl.storage.checkpoints import checkpoint_folder
from async_rl.storage.guard_events import (
    GuardEvent,
    add_guard_event,
    checkpoint_before,
    read_guard_events,
    take_answer,
)
from async_rl.storage.resuming import resumes_named_checkpoint
from async_rl.telemetry.status import PAUSED, RUNNING


class RunGuard:
    """Acts on what the guard of the log finds, while the supervisor is training and after the last evaluation."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog, guard: Guard, watchdog: Watchdog) -> None:
        self._config = config
        self._run_dir = config.run_dir
        self._processes = processes
        self._log = log
        self._guard = guard
        self._watchdog = watchdog
        self._gone_back: GuardEvent | None = None
        """The rollback with which this run goes on, or the pause before which it begins, until it has begun."""
        self._pause: GuardEvent | None = None
        self._paused_s = 0.0
        """time.monotonic() at which the learner was paused."""
        self._ended_by: GuardEvent | None = None
        """The rollback or the stop by which the run ends."""
        self._ends = False

    def begin(self) -> None:
        """Pause again if the run was paused when it ended, unless run.resume names a checkpoint from before that."""
        event = next(reversed(read_guard_events(self._run_dir)), None)
        if event is None or event.kind not in ("pause", "rollback"):
            return
        goes_around = event.version > self._log.version and resumes_named_checkpoint(self._run_dir)
        if event.kind == "pause" and not goes_around:
            self._stand(event)
        else:
            self._gone_back = event

    def act(self, *, at_end: bool = False) -> None:
        """Act on the newest finding of the log, if it is trouble.

        Args:
            at_end: the learner has ended, so that nothing is left to pause.
        """
        if not self._log.has_begun:
            return
        if self._gone_back:
            self._record(self._gone_back, "resumed")
            self._gone_back = None
        if at_end and self._pause:  # it came after the learner's last step
            self._tell_too_late(self._pause)
            self._record(self._pause, "ended")
            self._pause, self._watchdog.note = None, RUNNING
        finding = self._log.take_trouble()
        if finding is None or self._ends or self._pause or self._log.end_reason:
            return
        guard = self._config.guard
        action = guard.action
        if action == "rollback" and guard.rollbacks >= guard.max_rollbacks:
            self._log.logger.note(f"guard: the run has gone back {guard.rollbacks} times (guard.max_rollbacks)")
            action = "stop_at_best"
        is_short = at_end and self._log.version < self._config.run.steps  # by run.seconds
        if action == "rollback" and (self._log.ended or is_short):  # or by the program, or nothing is left to learn
            action = "stop_at_best"
        event = self._event(finding)
        is_over = at_end or self._log.ended or event.version >= self._config.run.steps
        if action == "pause" and is_over:
            self._tell_too_late(event)
        elif action == "pause":
            take_answer(self._run_dir)  # one that came before the first step, to the pause before which the run began
            add_guard_event(self._run_dir, event)
            self._stand(event)
        elif action == "rollback":
            self._go_back(event)
        elif action == "stop_at_best":
            self._stop_at_best(event)

    def look(self) -> None:
        """Take the user's answer to a pause, or end a run that has waited for one for too long."""
        event = self._pause
        if event is None or self._ends:
            return
        answer = take_answer(self._run_dir)
        limit = self._config.timeouts.limit("pause_s")
        if answer == "go_on":
            self._pause = None
            self._record(event, "go_on")
            self._guard.accepted |= set(event.signals)
            self._watchdog.note = RUNNING
            self._log.logger.note(f"guard: goes on. It does not act on {', '.join(event.signals)} again")
            self._processes.actors["learner/0"].go_on.remote()
        elif answer == "rollback":
            self._go_back(event)
        elif answer == "stop":
            self._stop_at_best(event)
        elif time.monotonic() - self._paused_s > limit.seconds:
            self._end(f"the guard's pause waited {limit} for `async-rl guard {self._run_dir}`")

    def _event(self, finding: Finding) -> GuardEvent:
        signals = tuple(name for name in finding.beyond if name not in self._guard.accepted)
        text = finding.text(self._config.guard, signals)
        return GuardEvent(
            kind="pause", version=finding.version, back_to=finding.back_to, signals=signals, text=text
        )  # fmt: skip

    def _stand(self, event: GuardEvent) -> None:
        self._pause, self._paused_s = event, time.monotonic()
        if (version := checkpoint_before(self._run_dir, event.back_to)) is not None:
            self._log.kept_checkpoints.add(version)
        how = f"async-rl guard {self._run_dir} --go-on | --rollback | --stop"
        self._watchdog.note = f"{PAUSED} by the guard since step {event.version}: {event.text}. It waits for: {how}"
        self._log.logger.alarm(f"guard: {self._watchdog.note}")
        self._processes.actors["learner/0"].pause.remote()

    def _tell_too_late(self, event: GuardEvent) -> None:
        """Say that there is trouble when no step is left, and how to get the model before it."""
        how = ""
        if (version := checkpoint_before(self._run_dir, event.back_to)) is not None:
            self._log.kept_checkpoints.add(version)
            how = f". The model before that: async-rl export {checkpoint_folder(self._run_dir, version)} OUT_DIR"
        self._log.logger.alarm(f"guard: {event.text}. The run has made its last step and is not paused{how}")

    def _go_back(self, event: GuardEvent) -> None:
        guard = self._config.guard
        if (version := self._checkpoint(event)) is None:
            return
        self._log.kept_checkpoints.add(version)
        self._record(event, "rollback", version)
        of_kl = "lowers algorithm.kl.target" if self._config.algorithm.kl.target else "raises the KL coefficient"
        change = {"kl": of_kl, "lr": "lowers the learning rate"}[guard.tighten]
        self._log.logger.alarm(
            f"guard: {event.text}. The run goes back to version {version}, and {change} by a factor of "
            f"{guard.tighten_by:g}"
        )
        self._end(f"the guard went back to version {version} at step {event.version}: {event.text}")

    def _stop_at_best(self, event: GuardEvent) -> None:
        if (version := self._checkpoint(event)) is None:
            return
        self._log.kept_checkpoints.add(version)
        if not self._log.has_begun:  # the answer to a pause before the first step of a resume ends the run as it is
            self._log.begin_lineage()
        self._record(event, "stop", version)
        reason = f"the guard ended the run at step {event.version}, with the model of version {version}: {event.text}"
        self._log.logger.alarm(f"guard: {reason}")
        self._end(reason)

    def _checkpoint(self, event: GuardEvent) -> int | None:
        """Return the version of the checkpoint before the trouble; say so if there is none."""
        version = checkpoint_before(self._run_dir, event.back_to)
        if version is None:
            then = "the run stays paused" if self._pause else "the run goes on"
            self._log.logger.alarm(f"guard: {event.text}. There is no checkpoint to go back to yet; {then}")
        return version

    def _record(
        self, pause: GuardEvent, kind: Literal["go_on", "rollback", "resumed", "stop", "ended"], back_to: int = -1
    ) -> None:
        back_to = pause.back_to if back_to < 0 else back_to
        event = replace(pause, kind=kind, back_to=back_to, time_s=time.time())
        add_guard_event(self._run_dir, event)
        self._ended_by = event if kind in ("rollback", "stop") else None

    def complete(self, summary: dict[str, Any]) -> None:
        """After the end of the processes, write the model with which the guard ends the run, and add to the summary.

        A rollback removes the model in run_dir/model, which the learner has saved if it had come to its end before.
        `rolled_back` in the summary, the version from which the run goes on, says that it is not over.
        """
        event = self._ended_by
        if event is None:
            return
        if event.kind == "rollback":
            shutil.rmtree(self._run_dir / "model", ignore_errors=True)
            summary["rolled_back"] = event.back_to
            return
        write_model_of(self._run_dir, event.back_to, summary)

    def _end(self, reason: str) -> None:
        """Have the learner stop, with a checkpoint."""
        self._ends = True
        end_early(self._processes, self._log, reason)
