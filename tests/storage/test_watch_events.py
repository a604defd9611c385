from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import checkpoint_before, checkpoint_folder
from async_rl.base.run_dir.watch_events import (
    Kind,
    WatchEvent,
    add_event,
    answer_pause,
    rollbacks_of,
    take_answer,
)
from tests.kit.runs import make_checkpoint


def add(run_dir: Path, kind: Kind) -> WatchEvent:
    event = WatchEvent(kind=kind, version=30, back_to=15, rules=("gold", "reward"), text="gold fell", time_s=1.0)
    add_event(run_dir, event)
    return event


def add_checkpoints(run_dir: Path, *versions: int) -> None:
    for version in versions:
        make_checkpoint(run_dir, version)


@contextmanager
def running(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_the_checkpoint_to_go_back_to_is_the_newest_before_or_else_the_oldest(tmp_path: Path) -> None:
    assert checkpoint_before(tmp_path, 5) is None
    add_checkpoints(tmp_path, 10, 20, 30)
    assert [checkpoint_before(tmp_path, version) for version in (5, 10, 29, 99)] == [10, 10, 20, 30]


def test_a_resume_continues_a_rollback_that_has_not_begun_and_counts_all(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, 15, 30)
    add(tmp_path, "rollback")
    add(tmp_path, "resumed")
    once = rollbacks_of(str(tmp_path))
    assert once == {"run.resume": str(tmp_path), "watch.rollbacks": 1}, "the run has made a step since"
    add(tmp_path, "rollback")
    twice = rollbacks_of(str(tmp_path))
    assert twice == {"run.resume": str(checkpoint_folder(tmp_path, 15)), "watch.rollbacks": 2}
    named = str(checkpoint_folder(tmp_path, 30))
    assert rollbacks_of(named)["run.resume"] == named, "the user has chosen this one"


def test_only_a_paused_run_that_goes_on_can_be_answered_and_it_gets_the_answer_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        answer_pause(tmp_path, "go-on")
    add(tmp_path, "pause")
    with running(tmp_path), pytest.raises(ConfigError):  # there is no checkpoint
        answer_pause(tmp_path, "rollback")
    with pytest.raises(ConfigError):  # it does not run
        answer_pause(tmp_path, "go-on")
    with running(tmp_path):
        answer_pause(tmp_path, "go-on")
    assert [take_answer(tmp_path), take_answer(tmp_path)] == ["go-on", None]
