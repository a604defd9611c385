"""Cells, resuming and failures of a sweep, with a stand-in for the training of a cell."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.config.presets import PRESETS
from async_rl.base.errors import ConfigError
from async_rl.cli import main
from async_rl.tools.sweeps.cells import (
    CORRECTIONS,
    MODES,
    Cell,
    all_cells,
    bounds_of,
    cell_config,
    key_axis,
    named_axis,
    seed_axis,
    staleness_axis,
)
from async_rl.tools.sweeps.sweep import CellPlace, CellProcesses, Progress, run_sweep, train_command
from benchmarks.marked_command import wait_until
from tests.kit.sweeps import Trainer, base_yaml, make


def test_the_seed_varies_slowest_and_every_setting_is_in_the_name(tmp_path: Path) -> None:
    axes = [staleness_axis("0,2"), key_axis("learner.lr=1e-4,3e-4"), seed_axis(2, 5)]
    cells = all_cells(axes, tmp_path)
    assert [cell.name for cell in cells[:5]] == [
        "staleness-0.learner.lr-1e-4.seed-5", "staleness-0.learner.lr-3e-4.seed-5",
        "staleness-2.learner.lr-1e-4.seed-5", "staleness-2.learner.lr-3e-4.seed-5",
        "staleness-0.learner.lr-1e-4.seed-6",
    ]  # fmt: skip
    assert set(cells[1].overrides) == {
        "staleness.max=0", "staleness.depth=max", "learner.lr=3e-4", "run.seed=5"
    }


@pytest.mark.parametrize("name", ["runs #2", "a: b", "[x]", "ü ß", "2024"])
def test_a_cell_runs_in_its_folder_whatever_yaml_reads_in_its_path(tmp_path: Path, name: str) -> None:
    cell = all_cells([staleness_axis("0"), seed_axis(1, 0)], Path(name) / "s")[0]
    config = cell_config(str(base_yaml(tmp_path)), (), cell)
    assert config.run_dir == cell.folder
    command = train_command(make(tmp_path), cell)
    assert load_config(command[2], command[3:]).run_dir == cell.folder


def test_two_cells_in_one_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path-m_a\.seed-0"):
        all_cells([key_axis("model.path=m/a,m_a"), seed_axis(1, 0)], tmp_path)


def test_the_documented_axes_of_presets_and_corrections_load(tmp_path: Path) -> None:
    quickstart = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    presets = [key_axis(f"algorithm.preset={','.join(PRESETS)}"), staleness_axis("2"), seed_axis(1, 0)]
    critic = ("rollout.engine=hf", "critic.lr=1e-3", "critic.warmup_steps=10")
    configs = [cell_config(quickstart, critic, cell) for cell in all_cells(presets, tmp_path)]
    assert {config.algorithm.preset for config in configs} == PRESETS.keys()
    corrections = named_axis("correction", ",".join(CORRECTIONS), CORRECTIONS)
    exact = [named_axis("mode", "exact", MODES), corrections, staleness_axis("0,8"), seed_axis(1, 0)]
    cells = {(cell.labels["correction"], cell.labels["staleness"]): cell for cell in all_cells(exact, tmp_path)}
    found = {key: cell_config(quickstart, (), cell) for key, cell in cells.items()}
    assert {name: (found[name, "8"].algorithm.old_logprobs, found[name,
        "8"].correction_kind) for name in CORRECTIONS} == {
        "none": ("recompute", "none"), "coupled": ("rollout", "none"), "decoupled_tis": ("recompute", "token_tis"),
    }  # fmt: skip
    assert found["none", "0"].staleness.max == 0


@pytest.mark.parametrize("text", ["0,-1", "0,,1", "two", "1.5", "", "1/", "/8", "auto/8", "9/8", "1.3/8"])
def test_bounds_and_depths_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--staleness"):
        bounds_of(text)


def test_a_depth_below_a_bound_is_a_level_of_the_staleness_axis(tmp_path: Path) -> None:
    quickstart = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    cells = all_cells([staleness_axis("8,1.25/8,0,1"), seed_axis(1, 0)], tmp_path)
    assert [cell.labels["staleness"] for cell in cells] == ["0", "1", "1.25/8", "8"]
    configs = [cell_config(quickstart, ("staleness.depth=0",), cell) for cell in cells]
    assert [(config.staleness.max, config.staleness.depth) for config in configs] == [
        (0, "max"), (1, "max"), (8, 1.25), (8, "max")
    ]
    assert len({cell.folder for cell in cells}) == 4


def test_an_axis_that_is_not_understood_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--axis"):
        key_axis("learner.lr")
    with pytest.raises(ConfigError, match=r"^--mode .*'loose'"):
        named_axis("mode", "bounded,loose", {"bounded": (), "exact": ()})


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--seeds", "0"], "--seeds"), (["--first-seed", "-1"], "run.seed"), (["--max-cells", "0"], "--max-cells"),
        (["--name", "a/b"], "--name"), (["--name", ".."], "--name"), (["--name", ""], "--name"),
        (["run.resume=/runs/a"], "run.resume"),
    ],
)
def test_options_that_can_not_be_used_are_refused_before_anything_starts(
    tmp_path: Path, options: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(base_yaml(tmp_path)), f"run.dir={tmp_path / 'runs'}", *options]) == 2
    assert f"{key} must be " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_key_that_does_not_exist_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    trainer = Trainer()
    sweep = make(tmp_path, axes=(staleness_axis("0"), seed_axis(1, 0), key_axis("learner.rate=1")))
    with pytest.raises(ConfigError, match=r"cell staleness-0.*learner\.rate"):
        run_sweep(sweep, trainer)
    assert trainer.cells == []


def test_a_failed_cell_is_reported_does_not_stop_the_rest_and_is_tried_again(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path), Trainer(fails="staleness-1.seed-0")
    progress = run_sweep(sweep, trainer)
    assert trainer.cells == [f"staleness-{k}.seed-{seed}" for seed in (0, 1) for k in (0, 1)]
    assert progress.failed == {"staleness-1.seed-0": "it did not work"}
    assert len(progress.seconds) == 3
    again = Trainer()
    assert run_sweep(sweep, again).failed == {}
    assert again.cells == ["staleness-1.seed-0"]  # finished ones are kept


def test_a_sweep_in_pieces_goes_on_where_it_stopped_and_grows_by_seeds(tmp_path: Path) -> None:
    first, second, third = Trainer(), Trainer(), Trainer()
    assert len(run_sweep(make(tmp_path, max_cells=3), first).pending) == 1
    assert run_sweep(make(tmp_path), second).pending == []
    assert (len(first.cells), len(second.cells)) == (3, 1)
    run_sweep(make(tmp_path, axes=(staleness_axis("0,1"), seed_axis(3, 0))), third)
    assert third.cells == ["staleness-0.seed-2", "staleness-1.seed-2"]


def test_a_sweep_of_another_config_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run_sweep(make(tmp_path), Trainer())
    with pytest.raises(ConfigError, match=r"rollout\.group_size 8 .* 4 .*--name"):
        run_sweep(make(tmp_path, overrides=("rollout.group_size=4",)), Trainer())


def test_other_bounds_with_another_setting_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    axes = (staleness_axis("2"), seed_axis(1, 0))
    run_sweep(make(tmp_path), Trainer())
    with pytest.raises(ConfigError, match=r"learner\.lr .* 0\.5 .*staleness-2"):
        run_sweep(make(tmp_path, axes=axes, overrides=("learner.lr=0.5",)), Trainer())
    assert run_sweep(make(tmp_path, axes=axes), Trainer()).pending == []


def test_a_changed_setting_that_an_axis_also_sets_is_refused_for_finished_cells(tmp_path: Path) -> None:
    axes = (staleness_axis("1"), seed_axis(2, 0), key_axis("algorithm.preset=grpo,dr_grpo"))
    key = "algorithm.entropy_coef"
    run_sweep(make(tmp_path, axes=axes, overrides=(f"{key}=0.0",), max_cells=2), Trainer())
    with pytest.raises(ConfigError, match=re.escape(key)):
        run_sweep(make(tmp_path, axes=axes, overrides=(f"{key}=0.5",)), Trainer())
    assert run_sweep(make(tmp_path, axes=axes, overrides=(f"{key}=0.0",)), Trainer()).pending == []


def test_equal_time_for_every_cell_is_a_limit_in_seconds(tmp_path: Path) -> None:
    overrides = make(tmp_path, seconds=30.0).base_overrides()
    assert "run.seconds=30.0" in overrides
    assert any(override.startswith("run.steps=") for override in overrides)
    assert not any(override.startswith("run.s") for override in make(tmp_path).base_overrides())


def test_trackers_are_off_in_cells_unless_the_command_sets_them(tmp_path: Path) -> None:
    asked = ("logging.wandb=offline", "logging.trackio=true")
    assert make(tmp_path, overrides=asked).base_overrides() == (
        "logging.wandb=disabled", "logging.trackio=false", *asked,
    )  # fmt: skip


def test_the_time_left_is_that_of_the_average_finished_cell(tmp_path: Path) -> None:
    cells = all_cells(make(tmp_path).axes, tmp_path)
    progress = Progress(cells, seconds={"staleness-0.seed-0": 120.0, "staleness-1.seed-0": 60.0})
    assert " 3 min" in progress.time_left() and " min" not in Progress(cells).time_left()


@pytest.mark.processes
def test_a_cell_that_can_not_start_says_why_and_leaves_a_log(tmp_path: Path) -> None:
    """A real process: the model folder does not exist."""
    sweep = make(tmp_path)
    cell = all_cells(sweep.axes, sweep.folder)[0]
    error = CellProcesses(sweep.folder / "logs").train(train_command(sweep, cell), cell, CellPlace())
    assert error.startswith("exit code 2")
    assert "model.path" in error
    assert (sweep.folder / "logs" / f"{cell.name}.log").exists()


@pytest.mark.processes
def test_an_interrupted_sweep_ends_the_runs_of_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, cells = CellProcesses(tmp_path / "logs"), all_cells(make(tmp_path).axes, tmp_path)[:2]
    program, errors = tmp_path / "python", list[str]()
    # Short naps: a signal that comes just before a nap begins is seen only after it.
    program.write_text("#!/bin/sh\ntrap 'exit 130' TERM\necho on\nfor i in $(seq 1200); do sleep 0.05; done\n")
    program.chmod(0o755)

    monkeypatch.setattr(sys, "executable", str(program))

    def run(cell: Cell) -> None:
        errors.append(processes.train(["async-rl"], cell, CellPlace()))

    threads = [threading.Thread(target=run, args=[cell]) for cell in cells]
    for thread in threads:
        thread.start()
    logs = [tmp_path / "logs" / f"{cell.name}.log" for cell in cells]
    wait_until(lambda: all(log.is_file() and log.read_text() for log in logs), 20, "both to start")
    processes.stop()
    for thread in threads:
        thread.join(20)
    assert [error.partition(",")[0] for error in errors] == ["exit code 130"] * 2
    logs[0].unlink()
    assert processes.train(["async-rl"], cells[0], CellPlace()) and not logs[0].read_text(), "no other begins"


def test_a_sweep_remembers_its_axes_and_the_machine_and_is_reported_and_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make(tmp_path)
    run_sweep(sweep, Trainer())
    plan = json.loads((sweep.folder / "sweep.json").read_text())
    assert plan["axes"] == {"staleness": ["0", "1"], "seed": ["0", "1"]} and plan["machine"]["processor"]
    assert main(["report", str(sweep.folder)]) == main(["plan", str(sweep.folder), "--staleness", "0,1"]) == 0
    told = capsys.readouterr().out
    assert "effective steps per minute" in told and "staleness.max = 1" in told
