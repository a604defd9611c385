from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.storage.guard_events import (
    GuardEvent,
    accepted_signals,
    add_guard_event,
    answer_pause,
    checkpoint_before,
    guard_text,
    open_pause,
    pending_rollback,
    read_guard_events,
    take_answer,
    with_rollbacks,
)
from tests.kit.configs import make_config


def config_of(run_dir: Path, resume: Path | str = "") -> Config:
    return make_config(run={"dir": str(run_dir.parent), "name": run_dir.name, "resume": str(resume)})


def add(run_dir: Path, kind: str) -> GuardEvent:
    event = GuardEvent(  # type: ignore[call-overload]
        kind=kind, version=30, back_to=15, signals=("kl", "proxy"), text="the KL is 12", time_s=1.0
    )
    add_guard_event(run_dir, event)
    return event


def add_checkpoints(run_dir: Path, *versions: int) -> None:
    for version in versions:
        folder = checkpoint_folder(run_dir, version)
        folder.mkdir(parents=True)
        state = TrainingState(version=version, lineage=0, ranks=1, networks={}, kl_coef=0.1, buffer={})
        write_training_state(folder, state)


@contextmanager
def running(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_events_are_read_as_they_were_written_without_a_line_that_was_cut_short(tmp_path: Path) -> None:
    assert read_guard_events(tmp_path) == []
    events = [add(tmp_path, "pause"), add(tmp_path, "go_on")]
    with (tmp_path / "guard_events.jsonl").open("a") as file:
        file.write('{"kind": "rollb')
    assert read_guard_events(tmp_path) == events
    events.append(add(tmp_path, "go_on"))
    assert read_guard_events(tmp_path) == events
    assert accepted_signals(tmp_path) == {"kl", "proxy"}


def test_a_pause_is_open_until_there_is_an_answer(tmp_path: Path) -> None:
    assert open_pause(tmp_path) is None
    event = add(tmp_path, "pause")
    assert open_pause(tmp_path) == event
    add(tmp_path, "go_on")
    assert open_pause(tmp_path) is None


def test_the_checkpoint_to_go_back_to_is_the_newest_before_or_else_the_oldest(tmp_path: Path) -> None:
    assert checkpoint_before(tmp_path, 5) is None
    add_checkpoints(tmp_path, 10, 20, 30)
    assert [checkpoint_before(tmp_path, version) for version in (5, 10, 29, 99)] == [10, 10, 20, 30]


def test_a_resume_goes_on_with_a_rollback_that_has_not_begun_and_counts_all(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, 15, 30)
    add(tmp_path, "rollback")
    add(tmp_path, "resumed")
    assert pending_rollback(tmp_path) is None, "the run has made a step since"
    add(tmp_path, "rollback")
    assert pending_rollback(tmp_path) == checkpoint_folder(tmp_path, 15)
    resumed = with_rollbacks(config_of(tmp_path, tmp_path))
    assert (resumed.run.resume, resumed.guard.rollbacks) == (str(checkpoint_folder(tmp_path, 15)), 2)
    named = with_rollbacks(config_of(tmp_path, checkpoint_folder(tmp_path, 30)))
    assert named.run.resume == str(checkpoint_folder(tmp_path, 30)), "the user has chosen this one"
    assert with_rollbacks(config_of(tmp_path)).guard.rollbacks == 0, "a new run"


def test_only_a_run_that_stands_paused_can_be_answered_and_it_gets_the_answer_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not paused by its guard"):
        answer_pause(tmp_path, "go_on")
    add(tmp_path, "pause")
    with pytest.raises(ConfigError, match="has no checkpoint to go back to"):
        answer_pause(tmp_path, "rollback")
    with pytest.raises(ConfigError, match=r"does not run\. Resume it"):
        answer_pause(tmp_path, "go_on")
    with running(tmp_path):
        answer_pause(tmp_path, "go_on")
    assert [take_answer(tmp_path), take_answer(tmp_path)] == ["go_on", None]


def test_the_text_of_a_guard_has_its_events_and_how_to_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not a run directory"):
        guard_text(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert guard_text(tmp_path) == "The guard has done nothing.\n"
    add(tmp_path, "rollback")
    add(tmp_path, "pause")
    assert guard_text(tmp_path).splitlines() == [
        "step 30: rollback to version 15: the KL is 12", "step 30: pause: the KL is 12",
        f"It waits for: async-rl guard {tmp_path} --go-on | --rollback | --stop",
    ]  # fmt: skip
