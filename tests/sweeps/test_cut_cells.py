"""Cells that were cut short: resumed, kept, or refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.cli import main
from async_rl.tools.sweeps.cells import (
    Cell,
    all_cells,
    cell_config,
    note_start,
    read_record,
    run_seconds,
    seed_axis,
    staleness_axis,
)
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.sweep import CellPlace, Sweep, plan_of, run_sweep
from tests.kit.sweeps import Trainer, make, write_cell


def begin(sweep: Sweep, version: int | None = None) -> Cell:
    """Leave the first cell of a sweep as if it had been cut after a checkpoint of `version`, or before any."""
    cell = all_cells(sweep.axes, sweep.folder)[0]
    cell.folder.mkdir(parents=True, exist_ok=True)
    note_start(cell, cell_config(sweep.config, sweep.base_overrides(), cell))
    if version is not None:
        folder = checkpoint_folder(cell.folder, version)
        folder.mkdir(parents=True)
        write_training_state(
            folder, TrainingState(version=version, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={})
        )
    return cell


@pytest.mark.parametrize(("seconds", "goes_on"), [(0.0, True), (30.0, False)])
def test_a_cell_with_a_checkpoint_goes_on_unless_it_has_a_given_time(
    tmp_path: Path, seconds: float, goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, trainer = make(tmp_path, seconds=seconds, overrides=("run.steps=12",) if goes_on else ()), Trainer()
    cell = begin(sweep, 7)
    (cell.folder / "config.lineage_0.yaml").write_text("")
    run_sweep(sweep, trainer)
    assert (list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]) == goes_on
    assert checkpoint_folder(cell.folder, 7).exists() == goes_on
    record = read_record(cell.folder)
    assert record is not None and record.resumed == goes_on
    capsys.readouterr()
    assert main(["report", str(sweep.folder)]) == 0
    assert (f": {cell.name}." in capsys.readouterr().out) == goes_on, "its time is that of its parts"


def test_a_cell_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path), Trainer()
    left_over = begin(sweep).folder / "metrics.jsonl"
    left_over.write_text("{")
    run_sweep(sweep, trainer)
    assert left_over.read_text() != "{" and "--resume" not in trainer.commands[0]


def test_a_resumed_cell_has_the_time_of_all_its_parts(tmp_path: Path) -> None:
    class Resumed(Trainer):
        def __call__(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
            error = super().__call__(command, cell, place)
            if "--resume" in command:
                with (cell.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": 12, "time/written_at_s": 3600.0}) + "\n")
            return error

    sweep = make(tmp_path, overrides=("run.steps=12",))
    cell = begin(sweep, 7)
    progress = run_sweep(sweep, Resumed())
    record = read_record(cell.folder)
    assert record is not None and record.seconds == progress.seconds[cell.name] == 3600.0
    assert sorted(progress.seconds.values())[-2] < 3600.0, "the others began anew"


@pytest.mark.parametrize("given", ["learner.lr=0.5", "timeouts.tool_s=9", "checkpoint.every_steps=5"])
def test_a_cut_cell_that_began_with_other_settings_is_refused(tmp_path: Path, given: str) -> None:
    begin(make(tmp_path), 7)
    trainer = Trainer()
    with pytest.raises(ConfigError, match=given.partition("=")[0]):
        run_sweep(make(tmp_path, overrides=(given,)), trainer)
    assert trainer.cells == []


def test_a_run_that_no_sweep_has_started_is_refused(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    write_cell(all_cells(sweep.axes, sweep.folder)[0], steps=12)
    with pytest.raises(ConfigError, match=str(all_cells(sweep.axes, sweep.folder)[0].folder)):
        run_sweep(sweep, Trainer())


@pytest.mark.parametrize("given", ["timeouts.batch_s=9000", "logging.project=mine", "checkpoint.keep_last=5"])
def test_settings_that_change_no_result_may_differ_between_the_cells_of_a_sweep(tmp_path: Path, given: str) -> None:
    before, now = (make(tmp_path, overrides=("run.steps=12", *more)) for more in ((), (given,)))
    cell = begin(before, 7)
    run_sweep(dataclasses.replace(before, axes=(staleness_axis("1"), seed_axis(2, 0))), Trainer())
    trainer = Trainer()
    assert run_sweep(now, trainer).pending == []
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)] and len(trainer.cells) == 2
    assert len(read_runs(now.folder)) == 4


def test_a_cell_that_was_cut_short_after_its_last_step_goes_on_for_its_end(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell = begin(sweep, 12)
    run_sweep(sweep, trainer)
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]


def test_a_cell_that_ended_without_its_sweep_is_kept(tmp_path: Path) -> None:
    """If a sweep is killed, the runs of its cells go on to their end."""
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell = begin(sweep)
    write_cell(cell, steps=12)
    with (cell.folder / "metrics.jsonl").open("a") as file:
        for key, seconds in (("time/written_at_s", 31.0), ("eval/written_at_s", 33.5)):
            file.write(json.dumps({"step": 12, key: seconds}) + "\n")
    assert f"| {cell.name} | is trained" in plan_of(sweep)
    progress = run_sweep(sweep, trainer)
    assert cell.name not in trainer.cells and len(trainer.cells) == 3 and not progress.pending
    record = read_record(cell.folder)
    assert record is not None and (record.seconds, record.resumed) == (33.5, 0)
    assert run_seconds(cell.folder) == 33.5


@pytest.mark.parametrize("summary", [{"steps": 12}, {"steps": 7, "ended": "stopped at version 7"}])
def test_a_cell_that_was_interrupted_is_not_kept(tmp_path: Path, summary: dict[str, object]) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell = begin(sweep, 7)
    (cell.folder / "summary.json").write_text(json.dumps(summary | {"interrupted": True}))
    run_sweep(sweep, trainer)
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]
