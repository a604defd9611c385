"""Runs whose depth moves again and again, as with staleness.depth auto, while the buffer dies and after a resume."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.depth.controller import DepthController, Move
from async_rl.driver.depth_tuner import DepthTuner
from async_rl.pipeline import run
from async_rl.storage.checkpoints import checkpoint_folder
from buffer.journal.journal import FILE_NAME
from buffer.stored_group import DROP_REASONS
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

BOUND, SIZE, STEPS = 3, 4, 16
START = 9
"""The slots of depth 1.25, with which runs begin."""


def configured(smoke_yaml: Path, folder: Path, *more: str) -> Config:
    return load_config(smoke_yaml, [
        f"run.dir={folder}", "run.name=moves", f"run.steps={STEPS}", "rollout.engine=hf", "eval.size=0",
        f"staleness.max={BOUND}", "staleness.depth=auto", "timeouts.wire_s=10", "checkpoint.every_steps=8", *more,
    ])  # fmt: skip


def move_at_random(monkeypatch: pytest.MonkeyPatch, also: Callable[[DepthTuner, int], None]) -> None:
    """Have the controller want another depth after each step but some, and call `also` when it was sent."""
    rng, send = random.Random(0), DepthTuner._send
    steps: list[int] = []

    def want(self: DepthController, version: int, values: Any, *, is_disturbed: bool) -> Move | None:
        steps.append(version)
        depth = rng.choice([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3])
        return Move(depth, round((depth + 1) * SIZE), f"{depth:g} was drawn") if version % 3 else None

    def send_and(self: DepthTuner, move: Move | None) -> None:
        send(self, move)
        also(self, steps[-1])

    monkeypatch.setattr(DepthController, "add_step", want)
    monkeypatch.setattr(DepthTuner, "_send", send_and)


def read(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / FILE_NAME)) as database:
        return database.execute(query).fetchall()


def check_slots(run_dir: Path, first_step: int = 1) -> None:
    """Batch number v was handed out with the slots of the last move up to the version that was served by then: v."""
    moves = dict(read(run_dir, "SELECT version, slots FROM moves"))
    assert len(set(moves.values())) > 2
    for record in logged(run_dir):
        if record["step"] >= first_step and "buffer/slots" in record:
            past = [version for version in moves if version <= record["step"] - 1]
            assert record["buffer/slots"] == (moves[max(past)] if past else START), record["step"]


def test_the_bound_holds_and_no_move_is_half_made_while_buffers_die(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer is killed when a move was just sent to the learner, which may be telling it to the buffer."""

    def kill(tuner: DepthTuner, version: int) -> None:
        if version in (4, 10) and "buffer" in tuner._processes.actors:
            tuner._processes.kill("buffer")

    move_at_random(monkeypatch, kill)
    config = configured(smoke_yaml, tmp_path)
    summary = run(config)
    counters = summary["buffer"]
    dropped = sum(counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS)
    assert (summary["steps"], counters["buffer/restarts"]) == (STEPS, 2)
    assert counters["buffer/admitted"] == counters["buffer/trained"] + dropped == SIZE * STEPS + dropped
    assert read(config.run_dir, "SELECT MAX(staleness) FROM trained")[0][0] <= BOUND
    check_slots(config.run_dir)
    told = [line for line in capsys.readouterr().out.splitlines() if " of at most 3 since step " in line]
    reasons = [reason for (reason,) in read(config.run_dir, "SELECT reason FROM moves ORDER BY version")]
    assert [line.partition(": ")[2] for line in told] == reasons


def test_a_resume_goes_on_with_the_slots_and_the_moves_of_its_checkpoint(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_at_random(monkeypatch, lambda tuner, version: None)
    config = configured(smoke_yaml, tmp_path, "run.steps=12", "checkpoint.keep_last=9")
    run(config)
    before = read(config.run_dir, "SELECT * FROM moves WHERE version <= 8")
    monkeypatch.setattr(DepthController, "add_step", lambda *args, **more: None)
    run(configured(smoke_yaml, tmp_path, "run.steps=11", f"run.resume={checkpoint_folder(config.run_dir, 8)}"))
    assert read(config.run_dir, "SELECT * FROM moves") == before
    again = [record for record in logged(config.run_dir) if record["step"] > 8 and "buffer/slots" in record][-3:]
    assert {record["buffer/slots"] for record in again} == {max(before)[1]}
