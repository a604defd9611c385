"""The file in which a run keeps what its guard did, and the file by which the user answers a guard that has paused.

run_dir/guard_events.jsonl   one line for each pause, answer, rollback and stop; also a resumed run adds to it
run_dir/guard_answer         go_on, rollback or stop: written by `async-rl guard`, removed by the run and by its resume
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import checkpoint_folder, find_checkpoint, list_checkpoints, run_dir_of
from async_rl.storage.run_dir import GUARD_ANSWER, is_locked
from async_rl.storage.whole_file import write_whole

_FILE = "guard_events.jsonl"
Answer = Literal["go_on", "rollback", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """An act of the guard, or the user's answer to a pause."""

    kind: Literal["pause", "go_on", "rollback", "resumed", "stop", "ended"]
    """resumed: after a rollback, or from before a pause, the run has made its first step or come to its end. ended: the
    pause came after the last step of the learner, and holds no more."""
    version: int
    """The version at which the trouble was found."""
    back_to: int
    """The version before the trouble. Of a rollback or a stop that of its checkpoint."""
    signals: tuple[str, ...] = ()
    """The signals beyond their limits; with go_on the user has accepted them."""
    text: str = ""
    """The signals in words."""
    time_s: float = field(default_factory=time.time)


def read_guard_events(run_dir: Path) -> list[GuardEvent]:
    """Return the events of a run, oldest first; a last line that a crash has cut short is left out."""
    file = run_dir / _FILE
    if not file.is_file():
        return []
    fields = map(json.loads, _whole_lines(file))
    return [GuardEvent(**{**each, "signals": tuple(each["signals"])}) for each in fields]


def add_guard_event(run_dir: Path, event: GuardEvent) -> None:
    """Add an event to those of a run, in place of a last line that a crash has cut short."""
    file = run_dir / _FILE
    lines = _whole_lines(file) if file.is_file() else []
    write_whole(file, "".join([*lines, json.dumps(asdict(event)) + "\n"]))


def _whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def open_pause(run_dir: Path) -> GuardEvent | None:
    """Return the pause of a run to which there is no answer yet.

    It holds in a run that is resumed, unless run.resume names a checkpoint from before it.
    """
    events = read_guard_events(run_dir)
    return events[-1] if events and events[-1].kind == "pause" else None


def accepted_signals(run_dir: Path) -> set[str]:
    """Return the signals that the user has accepted by --go-on."""
    return {name for event in read_guard_events(run_dir) if event.kind == "go_on" for name in event.signals}


def pending_rollback(run_dir: Path) -> Path | None:
    """Return the checkpoint from which a run has to go on, because its guard rolls back and no step was made since.
    """
    events = read_guard_events(run_dir)
    if not events or events[-1].kind != "rollback":
        return None
    folder = checkpoint_folder(run_dir, events[-1].back_to)
    return folder if folder.is_dir() else None


def checkpoint_before(run_dir: Path, version: int) -> int | None:
    """Return the version of the newest checkpoint that is not newer than `version`, or else of the oldest one."""
    versions = list(list_checkpoints(run_dir))
    return max((v for v in versions if v <= version), default=min(versions, default=None))


def with_rollbacks(config: Config) -> Config:
    """Return the configuration with guard.rollbacks, and with the checkpoint of a rollback that has not begun.

    A checkpoint that run.resume names stays: only its run directory leaves open from where the run goes on.
    """
    if not config.run.resume:
        return replace(config, guard=replace(config.guard, rollbacks=0))
    run_dir = run_dir_of(find_checkpoint(config.run.resume))
    rollbacks = sum(event.kind == "rollback" for event in read_guard_events(run_dir))
    checkpoint = pending_rollback(run_dir)
    if checkpoint and Path(os.path.abspath(config.run.resume)) == run_dir:
        config = replace(config, run=replace(config.run, resume=str(checkpoint)))
    return replace(config, guard=replace(config.guard, rollbacks=rollbacks))


def answer_pause(run_dir: Path, answer: Answer) -> None:
    """Leave the user's answer for a run that its guard has paused.

    Raises:
        ConfigError: the run is not paused, or there is nothing to go back to.
    """
    event = open_pause(run_dir)
    if event is None:
        raise ConfigError(f"{run_dir} is not paused by its guard: there is nothing to answer")
    if answer != "go_on" and checkpoint_before(run_dir, event.back_to) is None:
        raise ConfigError(f"{run_dir} has no checkpoint to go back to. Let it go on, or end it by Ctrl-C")
    if not is_locked(run_dir):
        raise ConfigError(f"{run_dir} does not run. Resume it, it will pause again: async-rl train --resume {run_dir}")
    write_whole(run_dir / GUARD_ANSWER, answer)


def take_answer(run_dir: Path) -> Answer | None:
    """Return the user's answer, once, if there is one."""
    file = run_dir / GUARD_ANSWER
    if not file.is_file():
        return None
    text = file.read_text()
    file.unlink()
    return next((answer for answer in get_args(Answer) if answer == text), None)


def guard_text(run_dir: Path) -> str:
    """Return the events of a run's guard as text, and how to answer a pause.

    Raises:
        ConfigError: the folder is no run directory.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} has no config.yaml: it is not a run directory")
    events = read_guard_events(run_dir)
    lines = [
        f"step {event.version}: {event.kind.replace('_', ' ')}"
        + (f" to version {event.back_to}" if event.kind == "rollback" else "")
        + (f", model of version {event.back_to}" if event.kind == "stop" else "") + f": {event.text}"
        for event in events
    ]  # fmt: skip
    if open_pause(run_dir):
        lines.append(f"It waits for: async-rl guard {run_dir} --go-on | --rollback | --stop")
    return "".join(f"{line}\n" for line in lines or ["The guard has done nothing."])
