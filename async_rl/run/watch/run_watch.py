"""Does what watch.action says when the watcher finds trouble.

    pause      learner/0 takes no batch until `async-rl answer` is called; status.json says why
    rollback   the learner stops, with a checkpoint; async_rl/pipeline.py resumes from the one before the trouble
    stop       the learner stops, and the model of that checkpoint is exported

An event is recorded before it is acted on, so that a resumed run continues the action.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

from async_rl.base.config import Config
from async_rl.base.run_dir.checkpoints import checkpoint_before, checkpoint_folder
from async_rl.base.run_dir.resuming import resumes_named_checkpoint
from async_rl.base.run_dir.watch_events import Kind, WatchEvent, accepted_rules, add_event, newest_event, take_answer
from async_rl.base.telemetry.status import PAUSED, RUNNING
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.watchdog import Watchdog


class RunWatch:
    """Acts on the watcher's findings, while the supervisor is training and after the last evaluation."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog, watchdog: Watchdog) -> None:
        self._config, self._run_dir = config, config.run_dir
        self._processes, self._log, self._watchdog = processes, log, watchdog
        self._gone_back: WatchEvent | None = None
        """The rollback, or the pause or stop from before which the run was resumed, until the run has made a step."""
        self._pause: WatchEvent | None = None
        self._paused_s = 0.0
        self._ended_by: WatchEvent | None = None

    def begin(self) -> None:
        """Pause or stop again if the run was killed meanwhile, unless run.resume names a checkpoint before that event.
        """
        if (event := newest_event(self._run_dir, "pause", "rollback", "stop")) is None:
            return
        goes_around = event.version > self._log.version and resumes_named_checkpoint(self._run_dir)
        if event.kind == "rollback" or goes_around:
            self._gone_back = event
        elif event.kind == "pause":
            self._stand(event)
        else:
            self._stop(event)

    def act(self, *, at_end: bool = False) -> None:
        """Act on the first trouble found since the last call.

        Args:
            at_end: the learner has ended, so that nothing is left to pause.
        """
        if not self._log.has_begun:
            return
        if self._gone_back:
            self._record(self._gone_back, "resumed")
            self._gone_back = None
        if at_end and self._pause:  # it came after the learner's last step
            self._say_too_late(self._pause)
            self._record(self._pause, "ended")
            self._pause, self._watchdog.note = None, RUNNING
        if self._pause or self._log.end_reason:  # trouble of other rules waits for the end of a pause
            return
        if (found := self._log.take_trouble()) is None:
            return
        watch, steps = self._config.watch, self._config.run.steps
        facts: dict[str, Any] = {"version": found.version, "back_to": found.back_to, "rules": found.trouble}
        event = WatchEvent(kind="pause", text=found.text(found.trouble), **facts)
        is_short = at_end and self._log.version < steps  # by run.seconds
        may_go_back = watch.rollbacks < watch.max_rollbacks and not self._log.ended and not is_short
        match watch.action:
            case "rollback" if may_go_back:
                self._go_back(event)
            case "rollback" | "stop":
                self._stop(event)
            case "pause" if at_end or self._log.ended or event.version >= steps:
                self._say_too_late(event)
            case "pause":
                take_answer(self._run_dir)  # one that came before, to an earlier pause
                add_event(self._run_dir, event)
                self._stand(event)

    def look(self) -> None:
        """During a pause: read a person's answer, or end the run if it has waited for timeouts.pause_s."""
        event, limit = self._pause, self._config.timeouts.limit("pause_s")
        if event is None or self._log.end_reason:
            return
        match take_answer(self._run_dir):
            case "go-on":
                self._pause, self._watchdog.note = None, RUNNING
                self._record(event, "go-on")
                self._log.watcher.accepted |= accepted_rules(self._run_dir)
                self._log.logger.note(f"the run goes on, and will not act on {', '.join(event.rules)} again")
                self._processes.actors["learner/0"].go_on.remote()
            case "rollback":
                self._go_back(event)
            case "stop":
                self._stop(event)
            case None if time.monotonic() - self._paused_s > limit.seconds:
                self._end(f"the pause waited {limit} for `async-rl answer {self._run_dir}`")

    def _stand(self, event: WatchEvent) -> None:
        self._pause, self._paused_s = event, time.monotonic()
        self._keep(event)
        how = f"async-rl answer {self._run_dir} go-on | rollback | stop"
        self._watchdog.note = f"{PAUSED} by the watcher since step {event.version}: {event.text}. It waits for: {how}"
        self._log.logger.alarm(self._watchdog.note)
        self._processes.actors["learner/0"].pause.remote()

    def _say_too_late(self, event: WatchEvent) -> None:
        how = ""
        if (version := self._keep(event)) is not None:
            how = f". The model before that: async-rl export {checkpoint_folder(self._run_dir, version)} OUT_DIR"
        self._log.logger.alarm(f"{event.text}. The run has made its last step and is not paused{how}")

    def _go_back(self, event: WatchEvent) -> None:
        if (version := self._keep(event)) is None:
            self._log.logger.alarm(f"{event.text}. There is no checkpoint to go back to yet, so the run goes on")
            return
        self._record(event, "rollback", version)
        self._end(
            f"the watcher went back to version {version} at step {event.version}, with half the learning rate and "
            f"twice the KL coefficient: {event.text}"
        )

    def _stop(self, event: WatchEvent) -> None:
        version = self._keep(event)
        if not self._log.has_begun:  # the answer to a pause before the first step of a resume ends the run as it is
            self._log.begin_lineage()
        self._record(event, "stop", event.back_to if version is None else version)
        model = "its last step, as there is no checkpoint yet" if version is None else f"version {version}"
        self._end(f"the watcher ended the run at step {event.version}, with the model of {model}: {event.text}")

    def _keep(self, event: WatchEvent) -> int | None:
        """Protect the newest checkpoint before the trouble of `event` from pruning.

        Returns its version; None if there is none.
        """
        version = checkpoint_before(self._run_dir, event.back_to)
        if version is not None:
            self._log.kept_checkpoints.add(version)
        return version

    def _record(self, pause: WatchEvent, kind: Kind, back_to: int | None = None) -> None:
        event = replace(pause, kind=kind, time_s=time.time(), back_to=pause.back_to if back_to is None else back_to)
        add_event(self._run_dir, event)
        self._ended_by = event if kind in ("rollback", "stop") else None

    def _end(self, reason: str) -> None:
        """Make the learner stop after the current step, with a checkpoint.

        Args:
            reason: why; it is in the summary.
        """
        self._log.logger.alarm(reason)
        self._log.end_reason = self._log.ended = reason  # at the end of the run no report follows that would set it
        for name in [name for name in self._processes.actors if name.startswith("learner")]:
            self._processes.actors[name].stop.remote()

    def complete(self, summary: dict[str, Any]) -> None:
        """After all processes have ended: export the model of a stop, or record a rollback in the summary."""
        if (event := self._ended_by) is None:
            return
        shutil.rmtree(self._run_dir / "model", ignore_errors=True)  # as the learner saved it
        if event.kind == "rollback":
            summary["rolled_back"] = event.back_to
            return
        from learner.models.export import export

        if (version := checkpoint_before(self._run_dir, event.back_to)) is not None:
            export(checkpoint_folder(self._run_dir, version), self._run_dir / "model")
            summary["model_version"] = version
        self._record(event, "ended")
