"""The runs in a folder, and the content of their small files: configuration, status, summary. Nothing is changed."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config.loading import YAMLError, read_yaml
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.run_dir.resuming import resuming_since_s
from async_rl.base.telemetry.status import NORMAL_END, STALE_S, goes_on, server_table, state_of
from async_rl.tools.view.answers import TokenTexts
from async_rl.tools.view.growing_files import MetricsFile, TimelineFile
from async_rl.tools.view.journal_reader import JournalReader
from buffer.journal import FILE_NAME

RUN_FILES = ("config.yaml", "metrics.jsonl", "status.json", "summary.json", FILE_NAME)
"""A folder with at least one of these files is a run directory, even if a crash or a copy left out the others."""


class UnknownRunError(AsyncRLError):
    """The address of a page names a run that is not in the folder. The response has status 404."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Whether a run goes on, according to its status.json."""

    name: str
    """`running`, `paused`, `ended`, `resuming`, `stopped writing` or `unknown`."""
    text: str = ""
    """An explanation for the user, as a sentence; empty if the name is enough."""
    processes: tuple[dict[str, Any], ...] = ()
    """For each process, the fields of telemetry.status.Status and `waited_s`; empty once the run has ended."""
    servers: tuple[tuple[str, ...], ...] = ()
    """The table of the servers, its header first; empty once the run has ended."""


class RunFiles:
    """The directory of one run. The run may go on, have ended or crashed, or the directory may be a copy."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.journal = JournalReader(folder / FILE_NAME)
        self.timeline = TimelineFile(folder / "timeline.json")
        self._lock = threading.Lock()
        self._config: tuple[str, dict[str, Any]] = "", {}
        self._texts: TokenTexts | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run wrote; {} if it is missing or can't be read."""
        stamp = _stamp(self.folder / "config.yaml")
        if self._config[0] != stamp:
            try:
                found, _ = read_yaml((self.folder / "config.yaml").read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, YAMLError):
                found = {}
            self._config = stamp, found if isinstance(found, dict) else {}
        return self._config[1]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key in the configuration, or `default`.

        The default is also returned if it is a number and the value is not.
        """
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        is_odd = isinstance(default, int) and not isinstance(value, int | float)
        return default if value is None or is_odd else value

    @property
    def texts(self) -> TokenTexts:
        """The run's tokenizer, loaded at the first use."""
        with self._lock:
            if self._texts is None:
                self._texts = TokenTexts(self.folder, self.setting("model.path"))
            return self._texts

    @property
    def state(self) -> RunState:
        saved = read_json(self.folder / "status.json")
        if not isinstance(saved.get("time_s"), int | float):
            return RunState("unknown", "The run has no status.json that can be read.")
        note, age_s = str(saved.get("note", "")), time.time() - saved["time_s"]
        if resuming_since_s(self.folder) is not None and (not goes_on(note) or age_s > STALE_S):
            return RunState("resuming", "A resume has made no step yet: its processes start, or it was killed.")
        name = state_of(note, age_s)
        if name == "ended":
            reason = read_json(self.folder / "summary.json").get("ended") if note == NORMAL_END else f"The run {note}"
            return RunState(name, str(reason or ""))
        silent = f"The run has not written its status for {age_s / 60:,.0f} minutes"
        text = {
            "stopped writing": f"{silent}: it was killed, it hangs, or this is a copy.", "paused": f"The run is {note}",
        }.get(name, "")  # fmt: skip
        processes = tuple(_with_wait(entry) for entry in saved.get("processes", []) if isinstance(entry, dict))
        servers: list[tuple[str, ...]] = []
        with suppress(KeyError, TypeError, AttributeError):  # damaged
            servers = server_table(saved)
        return RunState(name, text, processes, tuple(servers))

    @property
    def alarm_text(self) -> str:
        """A sentence on the alarms that are on now, by the newest metrics `alarm/...`; "" if none is on."""
        on = [name for name, (is_on, _) in self.metrics.alarms().items() if is_on]
        text = str(read_json(self.folder / "status.json").get("alarms", ""))
        return (text or f"Alarms: {', '.join(on)}.") if on else ""

    @property
    def progress(self) -> tuple[str, float | None]:
        """The progress of the run: (a text, the share of run.steps or run.seconds, None without either limit)."""
        step, steps, seconds = self.metrics.last_step, self.setting("run.steps", 0), self.setting("run.seconds", 0)
        since_s = self.metrics.last("time/since_first_step_s") or 0.0
        shares = [part / whole for part, whole in ((step, steps), (since_s, seconds)) if whole > 0]
        text = f"step {step}" + (f" of {steps:.0f}" if steps else "")
        text += f", {since_s:.0f} of {seconds:.0f} s" if seconds else ""
        return text, min(1.0, max(shares)) if shares else None

    @property
    def time_left_s(self) -> float | None:
        """The seconds until a run that goes on will end, at its present pace; None if not known."""
        pace_s = self.metrics.start_and_now()[1].get("time/step_s")
        if pace_s is None or self.state.name != "running":
            return None
        left_s = [pace_s * (self.setting("run.steps", 0) - self.metrics.last_step)]
        if seconds := self.setting("run.seconds", 0):
            left_s.append(seconds - (self.metrics.last("time/since_first_step_s") or 0.0))
        return max(0.0, min(left_s))

    def changes(self) -> dict[str, str]:
        """Return, for each kind of file, a text that is different after each change of the file."""
        files = {
            "metrics": ["metrics.jsonl"], "status": ["status.json", "summary.json"], "timeline": ["timeline.json"],
        }  # fmt: skip
        return {kind: "/".join(_stamp(self.folder / name) for name in names) for kind, names in files.items()}


class Runs:
    """The runs to show: the folder itself, the folders in it, and the cells of sweeps.

    Raises:
        ConfigError: there is no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_single = is_run(folder)
        self._lock = threading.Lock()
        self._runs: dict[str, RunFiles] = {}
        if not folder.is_dir() or not (self.all() or (folder / "sweep.json").is_file()):
            raise ConfigError(
                f"FOLDER must be the directory of a run or of several, got {folder}: it has no config.yaml, "
                "metrics.jsonl or trajectories.sqlite, nor has a folder in it. Runs are in run.dir/run.name"
            )

    def _folders(self) -> dict[str, Path]:
        """Return the directory of each run by its name: `RUN`, or `SWEEP:CELL`."""
        if self.is_single:
            return {self.folder.resolve().name: self.folder}
        found = {}
        for folder in [self.folder, *_folders_in(self.folder)]:
            if folder != self.folder and is_run(folder):
                found[folder.name] = folder
            else:
                cells = [cell for cell in _folders_in(folder / "cells") if is_run(cell)]
                found |= {f"{folder.resolve().name}:{cell.name}": cell for cell in cells}
        return found

    def all(self) -> list[RunFiles]:
        """Return all runs, those with the newest status first."""
        folders = self._folders()
        newest = sorted(folders, key=lambda name: _stamp(folders[name] / "status.json"), reverse=True)
        return [self._open(name, folders[name]) for name in newest]

    def run(self, name: str) -> RunFiles:
        """Return the run called `name`.

        Raises:
            UnknownRunError: there is no such run.
        """
        folders = self._folders()
        if name not in folders:  # a name with `..` or a slash is never one of them
            raise UnknownRunError(f"There is no run {name!r} in {self.folder}.")
        return self._open(name, folders[name])

    def _open(self, name: str, folder: Path) -> RunFiles:
        with self._lock:
            return self._runs.setdefault(name, RunFiles(folder, name))


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder; [] if it was removed."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing, incomplete, or contains something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_wait(entry: dict[str, Any]) -> dict[str, Any]:
    since_s = entry.get("since_s", 0.0)
    return entry | {"waited_s": max(0.0, entry.get("told_s", since_s) - since_s)}


def _stamp(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "-"
    return f"{found.st_mtime_ns}.{found.st_ino}.{found.st_size}"
