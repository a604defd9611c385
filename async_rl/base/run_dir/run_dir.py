"""Creates and locks the directory of a new run, or takes the directory of a resumed run, and finds a run by its name.

A resume that trains no step changes nothing, unless it comes to the end of its run: `open_run_dir` sets aside what was
written after the checkpoint, and puts it back unless a step was logged, or an end that is no stop (resuming.py). If the
process is killed before that, the next resume puts it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from async_rl.base.config import Config
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    checkpoint_before,
    checkpoint_folder,
    find_checkpoint,
    lineage_of,
    list_checkpoints,
    read_training_state,
    run_dir_of,
)
from async_rl.base.run_dir.files import write_whole
from async_rl.base.run_dir.resuming import (
    check_origin,
    kept_resumes,
    prepare_resume,
    undo_resume,
    whole_lines,
    write_config,
)

_LOCK_FILE = ".lock"
_ASKED_NAME = ".asked_name"
"""The file with the run.name that was asked for: a directory gets a number if the name is taken."""
WATCH_ANSWER = "watch_answer"
"""The file with the user's answer to a pause."""
INTERRUPTED = "interrupted"
"""The key of the summary of a run that Ctrl-C or SIGTERM has ended."""


@contextlib.contextmanager
def open_run_dir(config: Config, decided: Decided | None = None) -> Iterator[Decided]:
    """Create the directory of a run, or take run.resume's; lock it and yield the decisions, with run.name and so on.

    If the block ends before a step is logged, a resumed run gets back what was set aside, and a new directory is
    removed if the run was interrupted or failed with an error that needs no logs to explain it.

    Raises:
        ConfigError: run.resume names no checkpoint, or its run is complete or is locked by another process, or the
            disk has no file locks.
    """
    decided = decided or {}
    if resume := decided.get("run.resume", config.run.resume):
        with _locked(run_dir_of(find_checkpoint(resume))), _resumed(config, decided, resume) as resumed:
            yield resumed
        return
    run_dir = new_run_dir(config)
    decided = {**decided, "run.name": run_dir.name}
    try:
        with _locked(run_dir):
            write_config(resolve(config, decided))
            yield decided
    except BaseException as error:
        tells_all = isinstance(error, ConfigError | KeyboardInterrupt) or not (run_dir / "logs").exists()
        if tells_all and not _has_step(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


@contextlib.contextmanager
def _resumed(config: Config, decided: Decided, resume: str) -> Iterator[Decided]:
    """Set aside the files written after the checkpoint, yield the decisions of the resumed run; if the block then ends
    without a logged step, put them back.

    Of a run whose end was cut short, after its last step, the end is left to do.

    Raises:
        ConfigError: the checkpoint is of run.steps or later, and the run is complete, or it began with another
            model.path or model.lora.alpha.
    """
    checkpoint = find_checkpoint(resume)
    run_dir = run_dir_of(checkpoint)
    (run_dir / WATCH_ANSWER).unlink(missing_ok=True)  # to the run before; one that comes while this run starts stays
    undo_resume(run_dir)  # of a resume that was killed before its first step
    is_named = Path(os.path.abspath(resume)) != run_dir
    if not checkpoint.exists():  # that resume had set it aside
        checkpoint = checkpoint.with_name(checkpoint.name.partition(".")[0])
    # that resume may have set aside the newest, or the named one for good
    checkpoint = find_checkpoint(checkpoint if is_named else run_dir)
    saved = read_training_state(checkpoint)
    version = saved.version
    if version > config.run.steps or (version == config.run.steps and is_complete(run_dir, config)):
        raise ConfigError(
            f"run.steps must be above {version}, the version of {checkpoint}, got {config.run.steps}. "
            f"Set run.steps={2 * version} to train on"
        )
    place = {"run.dir": str(run_dir.parent), "run.name": run_dir.name, "run.resume": str(checkpoint)}
    decided = {**decided, **place}
    settings = resolve(config, decided)
    check_origin(settings, saved)
    try:
        prepare_resume(settings, saved, is_named)
        yield decided
    finally:
        undo_resume(run_dir)


def new_run_dir(config: Config) -> Path:
    """Create a new run directory and return its path. If the name is taken, the next free number is added to it.

    Two runs may do this at the same time.

    Raises:
        ConfigError: the directory can't be created.
    """
    for number in range(1, 10_000):
        candidate = _numbered(config, number)
        try:
            candidate.mkdir(parents=True)
            write_whole(candidate / _ASKED_NAME, config.run.name)
        except FileExistsError:
            continue
        except OSError as error:
            raise _uncreatable(candidate, error) from None
        return candidate
    raise ConfigError(f"{config.run_dir}, and the same with -2 to -9999, exist already. Set run.name to another name")


def create_folder(folder: Path) -> None:
    """Create the folder that run.dir and run.name give to several runs, if it is missing. ConfigError: it can't be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _uncreatable(folder, error) from None


def _uncreatable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir, run.name: {folder} can't be created: {error.strerror}. Set run.dir=... or run.name=..."
    )


def find_run(config: Config) -> Path | None:
    """Return the run directory that `--resume auto` continues, or None if a new run is to start.

    It is the directory of run.name. If the name was taken, there are others with a number, and it is the last of them
    with a checkpoint or an end. A run with a run.name that ends in such a number is another run, and so is one behind a
    number that is missing if it does not say for which name it was made.
    """
    found = None
    for place, number in enumerate(_numbers(config), 1):
        candidate = _numbered(config, number)
        asked, is_behind_gap = asked_name(candidate), number > place
        is_of_name = number == 1 or asked == config.run.name or not (asked or is_behind_gap)
        if is_of_name and (list_checkpoints(candidate) or is_complete(candidate, config)):
            found = candidate
    return found


def _numbers(config: Config) -> list[int]:
    """Return the numbers of the existing directories of a run's name, in order; run.name itself has the number 1."""
    parent, name = config.run_dir.parent, re.compile(re.escape(config.run.name) + r"(?:-([1-9]\d*))?")
    found = (name.fullmatch(path.name) for path in parent.iterdir()) if parent.is_dir() else ()
    return sorted(int(each[1] or 1) for each in found if each and each[1] != "1")


def is_complete(run_dir: Path, config: Config) -> bool:
    """Return whether a run has come to its end, with a summary: after run.steps steps, or earlier for its own reasons.

    Its own are run.seconds, a stop by the watcher, the program that trains, and a task with nothing left to
    learn. A run that Ctrl-C or SIGTERM has ended, that the watcher sends back, that went on after its summary or back
    to a checkpoint, or that ended without a step, which is an error, is not complete.
    """
    file = run_dir / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {INTERRUPTED: True}
    if INTERRUPTED in summary or "rolled_back" in summary:
        return False
    resumes = kept_resumes(run_dir)
    is_newest_end = summary.get("resumes", resumes) >= resumes
    has_gone_on = max(list_checkpoints(run_dir), default=0) > summary["steps"]
    if summary["steps"] >= config.run.steps:
        return is_newest_end or has_gone_on
    has_its_reason = summary["steps"] > 0 and ("ended" in summary or config.run.seconds > 0)
    return has_its_reason and is_newest_end and not has_gone_on


def is_of_newest_end(summary: Mapping[str, Any], last_step: int, run_dir: Path) -> bool:
    """Return whether a summary.json is of these steps: after it the run may have gone on, or back to a checkpoint."""
    steps, resumes = summary.get("steps"), lineage_of(run_dir)
    return isinstance(steps, int) and steps >= last_step and summary.get("resumes", resumes) >= resumes


def _numbered(config: Config, number: int) -> Path:
    return config.run_dir if number == 1 else config.run_dir.with_name(f"{config.run.name}-{number}")


def asked_name(run_dir: Path) -> str:
    """Return the run.name for which a directory was made; "" if it does not say."""
    file = run_dir / _ASKED_NAME
    return file.read_text() if file.is_file() else ""


def _has_step(run_dir: Path) -> bool:
    """Return whether metrics.jsonl holds a trained step; a new run that failed without one may be removed."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and any(json.loads(line)["step"] > 0 for line in whole_lines(metrics))


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory until the end of the block or of this process.

    Raises:
        ConfigError: another process holds the lock, the disk has no locks, or the directory can't be written.
    """
    try:
        file = (run_dir / _LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"{run_dir} must be a folder that this run can write, got {error.strerror}. A run goes on in its own "
            "directory: ask for the permission to write there, or copy all of it and resume the copy"
        ) from None
    with file as lock:
        if not has_locked(lock):
            raise ConfigError(f"{run_dir} is locked by another run that is still going on. Stop it first (Ctrl-C)")
        yield


def has_locked(file: TextIO) -> bool:
    """Lock a file until it is closed; return whether that could be done, as no other process holds the lock.

    Raises:
        ConfigError: the disk has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"run.dir must be on a disk with file locks, got {file.name}, which can't be locked: {error.strerror}. "
            "Set run.dir=... to another disk, or mount this one with them (Lustre: -o flock)"
        ) from None
    return True


def is_locked(run_dir: Path) -> bool:
    """Return whether a run in this directory is going on in another process. ConfigError: the disk has no locks."""
    file = run_dir / _LOCK_FILE
    if not file.is_file():
        return False
    with file.open("w") as lock:
        return not has_locked(lock)


_FILE = "watch_events.jsonl"
Answer = Literal["go-on", "rollback", "stop"]
Kind = Literal["pause", "go-on", "rollback", "resumed", "stop", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """An act of the watcher, or a person's answer to a pause."""

    kind: Kind
    """resumed: after a rollback, or from before a pause, the run has made a step or ended. ended: the pause came after
    the last step."""
    version: int
    back_to: int
    """The version before the trouble; of a rollback or a stop, its checkpoint."""
    rules: tuple[str, ...] = ()
    """The broken rules. After go-on they are accepted."""
    text: str = ""
    time_s: float = field(default_factory=time.time)


def read_events(run_dir: Path) -> list[WatchEvent]:
    """Return the events of a run, oldest first."""
    file = run_dir / _FILE
    found = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
    return [WatchEvent(**{**each, "rules": tuple(each["rules"])}) for each in found]


def add_event(run_dir: Path, event: WatchEvent) -> None:
    """Add an event to a run's events."""
    events = [*read_events(run_dir), event]
    write_whole(run_dir / _FILE, "".join(json.dumps(asdict(each)) + "\n" for each in events))


def newest_event(run_dir: Path, *kinds: Kind) -> WatchEvent | None:
    """Return the newest event if it is of one of `kinds`. A newest pause has no answer yet."""
    events = read_events(run_dir)
    return events[-1] if events and events[-1].kind in kinds else None


def accepted_rules(run_dir: Path) -> set[str]:
    """Return the rules that a person has accepted by going on."""
    return {name for event in read_events(run_dir) if event.kind == "go-on" for name in event.rules}


def rollbacks_of(resume: str) -> Decided:
    """Return watch.rollbacks, and run.resume: the checkpoint of a rollback that has not made a step yet.

    Args:
        resume: run.resume as asked for. A checkpoint that it names stays. Empty: a new run.
    """
    if not resume:
        return {"run.resume": "", "watch.rollbacks": 0}
    run_dir = run_dir_of(find_checkpoint(resume))
    rollbacks = sum(event.kind == "rollback" for event in read_events(run_dir))
    pending, is_named = newest_event(run_dir, "rollback"), Path(os.path.abspath(resume)) != run_dir
    if pending and not is_named and (folder := checkpoint_folder(run_dir, pending.back_to)).is_dir():
        resume = str(folder)
    return {"run.resume": resume, "watch.rollbacks": rollbacks}


def answer_pause(run_dir: Path, answer: Answer) -> None:
    """Leave a person's answer for a run. ConfigError: it is not paused, or has nothing to go back to."""
    pause = newest_event(run_dir, "pause")
    if pause is None:
        raise ConfigError(f"{run_dir} is not paused by its watcher: there is nothing to answer")
    if answer != "go-on" and checkpoint_before(run_dir, pause.back_to) is None:
        raise ConfigError(f"{run_dir} has no checkpoint to go back to. Let it go on, or end it by Ctrl-C")
    if not is_locked(run_dir):
        raise ConfigError(f"{run_dir} does not run. Resume it, it will pause again: async-rl train --resume {run_dir}")
    write_whole(run_dir / WATCH_ANSWER, answer)


def take_answer(run_dir: Path) -> Answer | None:
    """Return a person's answer, once."""
    file = run_dir / WATCH_ANSWER
    text = file.read_text() if file.is_file() else ""
    file.unlink(missing_ok=True)
    return next((answer for answer in get_args(Answer) if answer == text), None)
