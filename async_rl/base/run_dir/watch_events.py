"""The actions of a run's watcher, and a person's answers to its pauses, in files of the run directory.

A new run whose watcher only warns does not load this module.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from async_rl.base.config.resolve import Decided
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import checkpoint_before, checkpoint_folder, find_checkpoint, run_dir_of
from async_rl.base.run_dir.files import write_whole
from async_rl.base.run_dir.run_dir import is_locked

WATCH_ANSWER = "watch_answer"
"""The file with the user's answer to a pause."""
_FILE = "watch_events.jsonl"
Answer = Literal["go-on", "rollback", "stop"]
Kind = Literal["pause", "go-on", "rollback", "resumed", "stop", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """An action of the watcher, or a person's answer to a pause."""

    kind: Kind
    """resumed: the run has made a step or ended, after a rollback or from before a pause or stop. ended: the pause came
    after the last step, or the run has stopped and its model is exported."""
    version: int
    back_to: int
    """The last version before the trouble. For a rollback or a stop: the version of the checkpoint that is used."""
    rules: tuple[str, ...] = ()
    """The broken rules. The answer go-on accepts them."""
    text: str = ""
    time_s: float = field(default_factory=time.time)


def read_events(run_dir: Path) -> list[WatchEvent]:
    """Return the events of a run, oldest first."""
    file = run_dir / _FILE
    found = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
    return [WatchEvent(**{**each, "rules": tuple(each["rules"])}) for each in found]


def add_event(run_dir: Path, event: WatchEvent) -> None:
    """Append an event to a run's events."""
    events = [*read_events(run_dir), event]
    write_whole(run_dir / _FILE, "".join(json.dumps(asdict(each)) + "\n" for each in events))


def newest_event(run_dir: Path, *kinds: Kind) -> WatchEvent | None:
    """Return the newest event if its kind is one of `kinds`, else None. If it is a pause, the run still waits."""
    events = read_events(run_dir)
    return events[-1] if events and events[-1].kind in kinds else None


def accepted_rules(run_dir: Path) -> set[str]:
    """Return the rules that a person has accepted with the answer go-on."""
    return {name for event in read_events(run_dir) if event.kind == "go-on" for name in event.rules}


def rollbacks_of(resume: str) -> Decided:
    """Decide watch.rollbacks, the number of rollbacks so far, and run.resume of a resumed run.

    If the newest event is a rollback that has not made a step yet, run.resume becomes its checkpoint.

    Args:
        resume: run.resume as the user gave it. If it names a checkpoint, it stays.
    """
    run_dir = run_dir_of(find_checkpoint(resume))
    rollbacks = sum(event.kind == "rollback" for event in read_events(run_dir))
    pending, is_named = newest_event(run_dir, "rollback"), Path(os.path.abspath(resume)) != run_dir
    if pending and not is_named and (folder := checkpoint_folder(run_dir, pending.back_to)).is_dir():
        resume = str(folder)
    return {"run.resume": resume, "watch.rollbacks": rollbacks}


def answer_pause(run_dir: Path, answer: Answer) -> None:
    """Write a person's answer for a paused run.

    Raises:
        ConfigError: the run is not paused, or has no checkpoint to go back to.
    """
    pause = newest_event(run_dir, "pause")
    if pause is None:
        raise ConfigError(f"{run_dir} is not paused by its watcher: there is nothing to answer")
    if answer != "go-on" and checkpoint_before(run_dir, pause.back_to) is None:
        raise ConfigError(f"{run_dir} has no checkpoint to go back to. Let it go on, or end it by Ctrl-C")
    if not is_locked(run_dir):
        raise ConfigError(f"{run_dir} does not run. Resume it, it will pause again: async-rl train --resume {run_dir}")
    write_whole(run_dir / WATCH_ANSWER, answer)


def take_answer(run_dir: Path) -> Answer | None:
    """Return a person's answer and delete it, so that it is returned only once; None if there is none."""
    file = run_dir / WATCH_ANSWER
    text = file.read_text() if file.is_file() else ""
    file.unlink(missing_ok=True)
    return next((answer for answer in get_args(Answer) if answer == text), None)
