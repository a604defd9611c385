"""Has a run do what alarms.action says when it stops learning: go on, or end with an earlier checkpoint's model."""

from __future__ import annotations

from typing import Any

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.early_end import end_early, write_model_of
from async_rl.driver.run_log import RunLog
from async_rl.driver.watchdog import Watchdog
from async_rl.guard.collapse_watch import CollapseFinding
from async_rl.storage.guard_events import checkpoint_before


class RunAlarms:
    """Acts on the alarms of the log, while the supervisor is training."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog, watchdog: Watchdog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._watchdog = watchdog
        self._ended_by: CollapseFinding | None = None

    def act(self) -> None:
        """Have status.json tell the alarms, and end the run if there is a new one and alarms.action is stop."""
        self._watchdog.alarms = self._log.alarms.sentence()
        finding = self._log.take_collapse()
        if finding is None or self._config.alarms.action != "stop" or self._log.end_reason:
            return
        self._ended_by = finding
        version = checkpoint_before(self._config.run_dir, finding.back_to)
        if version is None:
            first = "; the one before the fall is that of model.path" if finding.back_to == 0 else ""
            model = f"the model of its last step, as there is no checkpoint yet (checkpoint.every_steps){first}"
        else:
            model = f"the model of version {version}"
            self._log.kept_checkpoints.add(version)
        why = "; ".join(finding.text(name) for name in finding.new)
        reason = f"an alarm ended the run at step {finding.version} (alarms.action stop), with {model}: {why}"
        self._log.logger.note(reason)
        end_early(self._processes, self._log, reason)

    def complete(self, summary: dict[str, Any]) -> None:
        """After the end of the processes, write the model with which an alarm has ended the run."""
        if self._ended_by is None:
            return
        version = checkpoint_before(self._config.run_dir, self._ended_by.back_to)
        if version is not None:
            write_model_of(self._config.run_dir, version, summary)
