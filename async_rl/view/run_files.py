"""Reads the small files of a run: its configuration, its status and its summary. Nothing in the folder is changed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.changed_settings import changed_settings
from async_rl.config.outputs import kept_steps
from async_rl.config.yaml_text import YAMLError, read_yaml
from async_rl.storage.resuming import resuming_since_s
from async_rl.storage.run_dir import is_of_newest_end
from async_rl.sweeps.cells import Bound
from async_rl.telemetry.status import STALE_S, goes_on, state_of
from async_rl.view.journal_reader import JournalReader
from async_rl.view.metrics_file import MetricsFile
from async_rl.view.timeline_file import TimelineFile
from buffer.journal.journal import FILE_NAME

RUN_FILES = ("config.yaml", "metrics.jsonl", "status.json", "summary.json", FILE_NAME)
"""A folder with at least one of these is the directory of a run, also if a crash or a copy left the others out."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Whether a run goes on, by its status.json: a name for that, a sentence about it, and what each process did."""

    name: str
    """`running`, `paused`, `ended`, `resuming`, `stopped writing` or `unknown`."""
    text: str
    """One sentence for the user."""
    processes: list[dict[str, Any]]
    """The activity of each process, with the keys of telemetry.status.Status and `waited_s`."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is on the way to its end, in steps or seconds: in words, and as a share, None if it has no end."""

    text: str
    share: float | None


class RunFiles:
    """The directory of one run, which may go on, have ended, have crashed, or be a copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config: tuple[str, dict[str, Any]] = "", {}
        self._changed: tuple[dict[str, Any], list[tuple[str, Any, Any]]] = self._config[1], []
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.journal = JournalReader(folder / FILE_NAME)
        self.timeline = TimelineFile(folder / "timeline.json")

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as the run wrote it; empty if it is missing or can't be read."""
        stamp = _stamp(self.folder / "config.yaml")
        if self._config[0] != stamp:
            self._config = stamp, self._read_config()
        return self._config[1]

    def _read_config(self) -> dict[str, Any]:
        try:
            found, _ = read_yaml((self.folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def end_reason(self) -> str:
        """The reason for which the run ended early; empty if it did not, or goes on after an end of that kind."""
        summary = read_json(self.folder / "summary.json")
        is_of_this_end = is_of_newest_end(summary, self.metrics.last_step, self.folder)
        return str(summary.get("ended", "")) if is_of_this_end and self.state.name == "ended" else ""

    @property
    def bound(self) -> Bound | None:
        """The staleness bound and the depth below it; None: the run's config names none."""
        bound, depth = self.setting("staleness.max"), self.setting("staleness.depth", "max")
        return Bound.of_config({"max": bound, "depth": depth}) if isinstance(bound, int) else None

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the configuration, or `default` where it is missing."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def kept_steps(self) -> int:
        """`Config.journal_kept_steps` of the run: the steps for which its journal keeps tokens, -1 for ever; 0 if its
        configuration can't be read.
        """
        kept, every = self.setting("buffer.journal_keep_steps"), self.setting("checkpoint.every_steps")
        return kept_steps(kept, every) if isinstance(kept, int) and isinstance(every, int) else 0

    @property
    def steps(self) -> int | None:
        """The number of steps that the run is to make; None if its configuration can't be read."""
        steps = self.setting("run.steps")
        return steps if isinstance(steps, int) else None

    @property
    def seconds(self) -> float:
        """The run.seconds of the run, which may end it before its last step; 0: there is no such limit."""
        seconds = self.setting("run.seconds", 0.0)
        return seconds if isinstance(seconds, int | float) else 0.0

    @property
    def since_first_step_s(self) -> float:
        """Seconds since the end of the first step, which run.seconds limits. They count anew from each resume on."""
        is_resuming = resuming_since_s(self.folder) is not None
        return 0.0 if is_resuming else self.metrics.last("time/since_first_step_s") or 0.0

    @property
    def progress(self) -> RunProgress:
        """How far the run is towards run.steps, or towards run.seconds if that is likely to come first."""
        step, steps, since_s = self.metrics.last_step, self.steps, self.since_first_step_s
        share = min(1.0, step / steps) if steps else None
        share_of_time = min(1.0, since_s / self.seconds) if self.seconds > 0 else None
        if share_of_time is not None and (not steps or (step < steps and share_of_time >= (step - 1) / steps)):
            return RunProgress(f"step {step}, {since_s:.0f} of {self.seconds:.0f} s", share_of_time)
        return RunProgress(f"step {step}" + (f" of {steps}" if steps else ""), share)

    @property
    def state(self) -> RunState:
        saved = read_json(self.folder / "status.json")
        if not isinstance(saved.get("time_s"), int | float):
            return RunState("unknown", "The run has no status.json that can be read.", [])
        note, age_s = str(saved.get("note", "")), time.time() - saved["time_s"]
        processes = [_with_wait(entry) for entry in saved.get("processes", []) if isinstance(entry, dict)]
        resuming_s = resuming_since_s(self.folder)
        if resuming_s is not None and (not goes_on(note) or age_s > STALE_S):
            text = (
                f"A resume began {_duration(max(0.0, time.time() - resuming_s))} ago and has made no step yet: its "
                "processes start, or it was killed."
            )
            return RunState("resuming", text, [])
        name = state_of(note, age_s)
        if name == "ended":
            text = f"The run {note}" if note.startswith("ended") else f"The run has ended: {note}"
            return RunState(name, text if text.endswith((".", "!", "?")) else f"{text}.", processes)
        if name == "paused":
            return RunState(name, f"The run is {note}", processes)
        if name == "running":
            return RunState(name, "The run goes on.", processes)
        text = (
            f"The run's driver wrote its status {_duration(age_s)} ago and not since: it was killed, it hangs, or this "
            "is a copy of a run that went on."
        )
        return RunState(name, text, processes)

    @property
    def alarms(self) -> str:
        """The alarms of the run in words; empty: there was none."""
        return str(read_json(self.folder / "status.json").get("alarms", ""))

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the run's last step, by run.steps at its present pace or by run.seconds, whichever is less.

        None if it does not run or the pace is not known.
        """
        pace_s = self.metrics.recent().get("time/step_s")
        if self.steps is None or pace_s is None or self.state.name != "running":
            return None
        of_steps_s = max(0, self.steps - self.metrics.last_step) * pace_s
        return min(of_steps_s, max(0.0, self.seconds - self.since_first_step_s)) if self.seconds > 0 else of_steps_s

    @property
    def changed_settings(self) -> list[tuple[str, Any, Any]]:
        """(key, value, default) of each setting of the run that differs from its default."""
        config = self.config
        if self._changed[0] is not config:  # the file has changed
            self._changed = config, changed_settings(config)
        return self._changed[1]

    def revision(self) -> dict[str, str]:
        """Return by key (metrics, status, timeline, journal) a text that differs after each change of these files."""
        files = {
            "metrics": ["metrics.jsonl"], "status": ["status.json", "summary.json"], "timeline": ["timeline.json"],
            "journal": [FILE_NAME, f"{FILE_NAME}-wal"],
        }  # fmt: skip
        return {key: "/".join(_stamp(self.folder / name) for name in names) for key, names in files.items()}


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, half written, or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_wait(entry: dict[str, Any]) -> dict[str, Any]:
    told_s, since_s = entry.get("told_s"), entry.get("since_s")
    is_known = isinstance(told_s, int | float) and isinstance(since_s, int | float)
    return entry | {"waited_s": max(0.0, told_s - since_s) if is_known else 0.0}  # type: ignore[operator]


def _duration(seconds: float) -> str:
    for unit, length_s in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"
