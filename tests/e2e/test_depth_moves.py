"""Runs whose depth moves again and again, as with staleness.depth auto, while processes die or groups are late."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.depth.controller import DepthController
from async_rl.driver.depth_tuner import DepthTuner
from async_rl.pipeline import run
from async_rl.storage.checkpoints import checkpoint_folder, list_checkpoints
from benchmarks.marked_command import MarkedCommand, wait_until
from buffer.journal.journal import FILE_NAME
from buffer.stored_group import DROP_REASONS
from tests.kit.depth.random_moves import move_at_random
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

BOUND, SIZE, STEPS = 3, 4, 16
START = 9
"""The slots of depth 1.25, with which runs begin."""


def options(folder: Path, *more: str) -> list[str]:
    return [
        f"run.dir={folder}", "run.name=moves", f"run.steps={STEPS}", "rollout.engine=hf", "eval.size=0",
        f"staleness.max={BOUND}", "staleness.depth=auto", "timeouts.wire_s=10", "checkpoint.every_steps=8", *more,
    ]  # fmt: skip


def configured(smoke_yaml: Path, folder: Path, *more: str) -> Config:
    return load_config(smoke_yaml, options(folder, *more))


def read(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(run_dir / FILE_NAME)) as database:
        return database.execute(query).fetchall()


def check_slots(run_dir: Path, start: int = START, least: int = 3) -> None:
    """Batch number v was handed out with the slots of the last move up to the version that was served by then: v."""
    moves = dict(read(run_dir, "SELECT version, slots FROM moves"))
    assert len(set(moves.values())) >= least
    for record in logged(run_dir):
        if "buffer/slots" in record:
            past = [version for version in moves if version <= record["step"] - 1]
            assert record["buffer/slots"] == (moves[max(past)] if past else start), record["step"]


@pytest.mark.nightly
def test_the_bound_holds_and_no_move_is_half_made_while_buffers_die(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer is killed when a move was just sent to the learner, which may be telling it to the buffer."""

    def kill(tuner: DepthTuner, version: int) -> None:
        if version in (4, 10) and "buffer" in tuner._processes.actors:
            tuner._processes.kill("buffer")

    move_at_random(monkeypatch.setattr, sent=kill)
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


@pytest.mark.nightly
def test_a_resume_goes_on_with_the_slots_and_the_moves_of_its_checkpoint(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_at_random(monkeypatch.setattr)
    config = configured(smoke_yaml, tmp_path, "run.steps=12", "checkpoint.keep_last=9")
    run(config)
    before = read(config.run_dir, "SELECT * FROM moves WHERE version <= 8")
    monkeypatch.setattr(DepthController, "add_step", lambda *args, **more: None)
    run(configured(smoke_yaml, tmp_path, "run.steps=11", f"run.resume={checkpoint_folder(config.run_dir, 8)}"))
    assert read(config.run_dir, "SELECT * FROM moves") == before
    again = [record for record in logged(config.run_dir) if record["step"] > 8 and "buffer/slots" in record][-3:]
    assert {record["buffer/slots"] for record in again} == {max(before)[1]}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", [5, 7])
@pytest.mark.parametrize("victim", ["learner", "driver"])
def test_no_move_is_half_made_where_learner_or_driver_die_while_one_is_pending(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, version: int
) -> None:
    """They are killed when the move was just sent to the learner, after step `version`, and the run is resumed."""
    asked = options(tmp_path, "checkpoint.every_steps=2")
    program = (sys.executable, "-m", "tests.kit.depth.killed_at_a_move", victim, str(version), str(smoke_yaml))
    command = MarkedCommand(asked, tmp_path / "killed.log", program)
    try:
        assert command.wait(400) != 0
        wait_until(lambda: not command.processes(), 90, "every process of the run to end")
    finally:
        command.kill()
    run_dir = tmp_path / "moves"
    checkpoint = max(list_checkpoints(run_dir))
    assert checkpoint >= version - 3
    before = read(run_dir, f"SELECT * FROM moves WHERE version <= {checkpoint}")
    move_at_random(monkeypatch.setattr)
    config = load_config(smoke_yaml, [*asked, f"run.resume={run_dir}"])
    counters = run(config)["buffer"]
    assert read(run_dir, f"SELECT * FROM moves WHERE version <= {checkpoint}") == before
    assert [record["step"] for record in logged(run_dir) if "buffer/slots" in record][-1] == STEPS
    dropped = sum(counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS)
    assert counters["buffer/trained"] == SIZE * STEPS and counters["buffer/unaccounted"] == 0
    assert counters["buffer/admitted"] == counters["buffer/trained"] + dropped
    assert read(run_dir, "SELECT MAX(staleness) FROM trained")[0][0] <= BOUND
    # Without its driver the learner may have trained some more steps, or all, before Ray ended it.
    check_slots(run_dir, least=3 if checkpoint <= version else 1)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy",
    [
        ("staleness.late=drop",), ("staleness.late=mask",), ("buffer.max_uses=2", "buffer.fresh_fraction=0.5"),
        ("staleness.late=mask", "buffer.max_uses=2", "buffer.fresh_fraction=0.5"),
    ],
    ids=" ".join,
)
def test_moves_keep_the_bound_where_groups_are_dropped_masked_or_used_again(
    smoke_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: tuple[str, ...]
) -> None:
    """A third of the prompts take so long that at bound 1 their groups are late. Reuse wants depths above 1."""
    move_at_random(monkeypatch.setattr)
    bound = 1 if len(policy) == 1 else BOUND
    slow = ("task.reward=tests.e2e.test_policies:slow_for_some", "checkpoint.every_steps=0", f"staleness.max={bound}")
    config = configured(smoke_yaml, tmp_path, *policy, *slow)
    counters = run(config)["buffer"]
    dropped = {reason: counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS}
    assert counters["buffer/unaccounted"] == 0
    assert counters["buffer/admitted"] == counters["buffer/trained"] + sum(dropped.values())
    check_slots(config.run_dir, config.slots)
    steps = logged(config.run_dir)
    assert max(step.get("staleness/max", 0.0) for step in steps) <= bound
    is_masked = any(step.get("staleness/masked_fraction") for step in steps)
    if len(policy) == 1:  # a group of which no token is young enough is dropped where others are masked, too
        assert dropped["late"] > 0 or is_masked
    else:
        assert counters["buffer/uses"] > counters["buffer/trained"]
