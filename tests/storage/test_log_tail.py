from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from async_rl.base.run_dir.files import log_tail, split_tails
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import Origin
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import StopSignals
from tests.kit.configs import make_config
from tests.kit.fake_actors import FakeReservation


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(100 * 2**20)  # without blocks on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nRuntimeError: no memory\n")
    tracemalloc.start()
    try:
        assert log_tail(log, 5).endswith("\n    RuntimeError: no memory")
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_the_logs_in_a_message_are_told_from_its_cause() -> None:
    a, b = "last lines of a.log:\n    one\n    two", "last lines of b.log:\n    3"
    message = f"rollout/0 died. Lower x.\n{a}\nraised in h\n{b}"
    assert split_tails(message) == (f"{a}\n{b}", "rollout/0 died. Lower x.\nraised in h")
    assert split_tails("a.key must be 1, got 2\n    indented") == ("", "a.key must be 1, got 2\n    indented")


def test_the_death_of_a_process_is_not_explained_by_the_log_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.remote", lambda _: Mock())
    origin = Origin(str(tmp_path), make_config())
    processes = ActorGroup(tmp_path, cast(Reservation, FakeReservation()), StopSignals(), origin)
    log = tmp_path / "logs" / "learner-0.log"
    log.parent.mkdir()
    log.write_text("CUDA out of memory, three days ago\n")
    processes.start("learner/0", Mock)
    assert processes.log_tail("learner/0") == f"\n{log_tail(log, log.stat().st_size)}"
    with log.open("a") as file:
        file.write("no memory today\n")
    assert processes.log_tail("learner/0") == f"\nlast lines of {log}:\n    no memory today"
