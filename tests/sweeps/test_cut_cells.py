"""Cells of a sweep that were cut short, or that went on to their end without it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.config import Config
from async_rl.config.loading import dump_config, load_config
from async_rl.config.yaml_text import read_yaml, write_yaml
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.storage.hub import pinned
from async_rl.sweeps.cells import Cell, all_cells, cell_config, seed_axis, staleness_axis
from async_rl.sweeps.cut_cells import run_seconds
from async_rl.sweeps.places import CellPlace
from async_rl.sweeps.records import read_record
from async_rl.sweeps.results import read_runs
from async_rl.sweeps.sweep import Sweep, is_kept, plan_of, resumed_version, run_sweep
from tests.kit.hub import open_hub
from tests.kit.models import save_tiny_model
from tests.kit.sweeps import Trainer, make, write_cell

MODEL, DATA = "Qwen/Qwen9-tiny", "openai/gsm8k"


def save(cell: Cell, version: int) -> Path:
    """Write a checkpoint into the folder of a cell."""
    folder = checkpoint_folder(cell.folder, version)
    folder.mkdir(parents=True)
    write_training_state(
        folder, TrainingState(version=version, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={})
    )
    return folder


def begin(sweep: Sweep) -> tuple[Cell, Config]:
    """Write the configuration of the first cell of a sweep into its folder."""
    cell = all_cells(sweep.axes, sweep.folder)[0]
    config = cell_config(sweep.config, sweep.base_overrides(), cell)
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / "config.yaml").write_text(dump_config(config))
    return cell, config


@pytest.mark.parametrize(("seconds", "goes_on"), [(0.0, True), (30.0, False)])
def test_a_cell_with_a_checkpoint_goes_on_unless_it_has_a_given_time(
    tmp_path: Path, seconds: float, goes_on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, trainer = make(tmp_path, seconds=seconds, overrides=("run.steps=12",) if goes_on else ()), Trainer()
    cell = all_cells(sweep.axes, sweep.folder)[0]
    folder = save(cell, 7)
    (cell.folder / "config.lineage_0.yaml").write_text("")
    (cell.folder / "config.yaml").write_text(dump_config(cell_config(sweep.config, sweep.base_overrides(), cell)))
    run_sweep(sweep, trainer)
    assert (list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]) == goes_on
    assert folder.exists() == goes_on
    record = read_record(cell.folder)
    assert record is not None and record.resumed == goes_on
    assert (f"{cell.name} goes on from step 7" in capsys.readouterr().out) == goes_on
    assert main(["report", str(sweep.folder)]) == 0
    assert (f"so their times are of parts: {cell.name}." in capsys.readouterr().out) == goes_on


def test_a_resumed_cell_has_the_time_of_all_its_parts(tmp_path: Path) -> None:
    class Resumed(Trainer):
        def __call__(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
            error = super().__call__(command, cell, place)
            with (cell.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 12, "time/written_at_s": 3600.0}) + "\n")
            return error

    sweep = make(tmp_path, overrides=("run.steps=12",))
    cell, _ = begin(sweep)
    save(cell, 7)
    progress = run_sweep(sweep, Resumed())
    record = read_record(cell.folder)
    assert record is not None and record.seconds == progress.seconds[cell.name] == 3600.0
    assert sorted(progress.seconds.values())[-2] < 3600.0, "the others began anew"


def test_a_cut_cell_that_began_with_other_settings_starts_anew_and_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = all_cells(make(tmp_path).axes, tmp_path / "sweep")[0]
    before = make(tmp_path, overrides=("run.steps=12", "learner.lr=0.5"))
    folder = save(cell, 7)
    (cell.folder / "config.yaml").write_text(dump_config(cell_config(before.config, before.base_overrides(), cell)))
    now, trainer = make(tmp_path, overrides=("run.steps=12", "learner.lr=0.25")), Trainer()
    for sweep, version in ((before, 7), (now, None)):
        assert resumed_version(sweep, cell, cell_config(sweep.config, sweep.base_overrides(), cell)) == version
    run_sweep(now, trainer)
    assert "--resume" not in trainer.commands[0] and not folder.exists()
    kept = tmp_path / "sweep" / "set_aside" / f"{cell.name}-1"
    assert (kept / "checkpoints" / folder.name / "training_state.json").is_file()
    told = f"{cell.name} starts anew, as it began with other settings: learner.lr 0.5 then and 0.25 now. Its run is in"
    assert f"{told} {kept}\n" in capsys.readouterr().out


def test_a_cell_set_aside_twice_is_kept_twice(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    for rate in ("0.5", "0.25"):
        cell, _ = begin(make(tmp_path, overrides=(f"learner.lr={rate}",)))
        (cell.folder / "cell.json").unlink(missing_ok=True)
        run_sweep(sweep, Trainer())
    kept = [tmp_path / "sweep" / "set_aside" / f"{cell.name}-{number}" for number in (1, 2)]
    assert [load_config(folder / "config.yaml").learner.lr for folder in kept] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("is_known", "given", "version"),
    [(True, "", 7), (False, "", 7), (True, "alarms.window_steps=3", None), (False, "learner.lr=0.5", None)],
)
def test_a_cut_cell_of_another_version_of_the_program_goes_on(
    tmp_path: Path, is_known: bool, given: str, version: int | None
) -> None:
    """It lacks a section, of which it had the defaults, and may have a key that this version does not know."""
    cell, _ = begin(make(tmp_path))
    file = cell.folder / "config.yaml"
    settings, _ = read_yaml(file.read_text())
    del settings["alarms"]
    if not is_known:
        settings["learner"]["of_before"] = 1
    file.write_text(write_yaml(settings))
    save(cell, 7)
    now = make(tmp_path, overrides=(given,) if given else ())
    assert resumed_version(now, cell, cell_config(now.config, now.base_overrides(), cell)) == version


@pytest.mark.parametrize("given", ["timeouts.work_s=9000", "logging.project=mine", "checkpoint.keep_last=5"])
def test_settings_that_change_no_result_may_differ_between_the_cells_of_a_sweep(tmp_path: Path, given: str) -> None:
    before, now = (make(tmp_path, overrides=("run.steps=12", *more)) for more in ((), (given,)))
    cell, _ = begin(before)
    save(cell, 7)
    run_sweep(dataclasses.replace(before, axes=(staleness_axis("1"), seed_axis(2, 0))), Trainer())
    trainer = Trainer()
    assert run_sweep(now, trainer).pending == []
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)] and len(trainer.cells) == 2
    assert len(read_runs(now.folder)) == 4


@pytest.mark.parametrize(
    "given",
    ["timeouts.tool_s=9", "checkpoint.every_steps=5", "checkpoint.keep_best=1", "learner.optimizer_params.eps=0.1"],
)
def test_settings_that_change_results_or_times_do_not(tmp_path: Path, given: str) -> None:
    evaluated = ("eval.every_steps=5", "checkpoint.every_steps=10")
    cell, _ = begin(make(tmp_path, overrides=evaluated))
    save(cell, 7)
    now = make(tmp_path, overrides=(*evaluated, given))
    assert resumed_version(now, cell, cell_config(now.config, now.base_overrides(), cell)) is None


def test_a_cut_cell_that_its_guard_has_rolled_back_goes_on(tmp_path: Path) -> None:
    sweep = make(tmp_path, overrides=("run.steps=12",))
    cell, config = begin(sweep)
    save(cell, 7)
    rolled_back = dataclasses.replace(config, guard=dataclasses.replace(config.guard, rollbacks=1))
    (cell.folder / "config.yaml").write_text(dump_config(rolled_back))
    assert resumed_version(sweep, cell, config) == 7


def test_a_cell_that_was_cut_short_after_its_last_step_goes_on_for_its_end(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell, config = begin(sweep)
    folder = save(cell, 12)
    assert resumed_version(sweep, cell, config) == 12
    run_sweep(sweep, trainer)
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)] and folder.exists()


def test_a_cell_that_ended_without_its_sweep_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a sweep is killed, the runs of its cells go on to their end."""
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell, _ = begin(sweep)
    write_cell(cell, steps=12)
    with (cell.folder / "metrics.jsonl").open("a") as file:
        for key, seconds in (("time/written_at_s", 31.0), ("eval/written_at_s", 33.5)):
            file.write(json.dumps({"step": 12, key: seconds}) + "\n")
    assert f"| {cell.name} | is trained, by a sweep that was ended before |" in plan_of(sweep)
    progress = run_sweep(sweep, trainer)
    assert cell.name not in trainer.cells and len(trainer.cells) == 3 and not progress.pending
    assert f"{cell.name} is trained, by a sweep that was ended before, and kept" in capsys.readouterr().out
    record = read_record(cell.folder)
    assert record is not None and (record.seconds, record.resumed) == (33.5, 0)
    assert run_seconds(cell.folder) == 33.5


@pytest.mark.parametrize("text", [None, "", "run: [", "model"])
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_cell_whose_run_does_not_say_its_settings_starts_anew_and_is_set_aside(
    tmp_path: Path, is_complete: bool, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell, config = begin(sweep)
    write_cell(cell, steps=12)
    folder = save(cell, 7)
    if is_complete:
        shutil.rmtree(folder.parent)
    else:
        (cell.folder / "summary.json").unlink()
    assert is_kept(cell, config) == is_complete
    assert resumed_version(sweep, cell, config) == (None if is_complete else 7)
    (cell.folder / "config.yaml").unlink()
    if text is not None:
        (cell.folder / "config.yaml").write_text(text)
    assert not is_kept(cell, config) and resumed_version(sweep, cell, config) is None
    run_sweep(sweep, trainer)
    assert "--resume" not in trainer.commands[0] and not folder.exists() and len(trainer.cells) == 4
    kept = tmp_path / "sweep" / "set_aside" / f"{cell.name}-1"
    assert (kept / "metrics.jsonl").is_file()
    assert f"{cell.name} starts anew, as it has no whole config.yaml, which would say" in capsys.readouterr().out


@pytest.mark.parametrize("summary", [{"steps": 12}, {"steps": 7, "ended": "stopped at version 7"}])
def test_a_cell_that_was_interrupted_is_not_kept(tmp_path: Path, summary: dict[str, object]) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell, _ = begin(sweep)
    save(cell, 7)
    (cell.folder / "summary.json").write_text(json.dumps(summary | {"interrupted": True}))
    run_sweep(sweep, trainer)
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]


def test_a_cell_with_a_model_and_data_of_the_hub_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run writes down the commits of what its settings name on the hub. The dry run counts the size of the model."""
    save_tiny_model("tiny-qwen2", tmp_path / "tiny", seed=0)
    names = (f"model.path={MODEL}", f"task.path=hf://{DATA}:main/train", "rollout.engine=hf")
    sweep = make(tmp_path, overrides=("run.steps=12", "task.name=", "task.reward=math", *names))
    with open_hub() as hub:
        hub.add_model(MODEL, tmp_path / "tiny")
        hub.add_dataset(DATA, {"main/train.jsonl": b"{}"})
        hub.use(monkeypatch, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        cell, config = begin(sweep)
        written = pinned(config)
        assert written.model.path.startswith(f"hf://{MODEL}@") and written != config
        (cell.folder / "config.yaml").write_text(dump_config(written))
        save(cell, 7)
        hub.add_dataset(DATA, {"main/train.jsonl": b"{}", "more": b""})  # the cell stays with the commit of its start
        assert resumed_version(sweep, cell, config) == 7
        counted: list[Config] = []

        def count(config: Config, checkpoint_bytes: int) -> int:
            counted.append(config)
            return 0

        monkeypatch.setattr("async_rl.sweeps.sweep.run_bytes", count)
        assert "disk: at most 0.0 GiB more" in plan_of(sweep)
    assert len(counted) == 4 and all((Path(each.model.path) / "model.safetensors").is_file() for each in counted)
    other = dataclasses.replace(written, model=dataclasses.replace(written.model, path=f"hf://other/name@{'a' * 40}"))
    (cell.folder / "config.yaml").write_text(dump_config(other))
    assert resumed_version(sweep, cell, config) is None
