"""Running a sweep: cells at once, failures, what is resumed, kept or left alone, Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.cli import main
from async_rl.tools.sweeps.cells import (
    Cell,
    all_cells,
    cell_config,
    note_start,
    read_record,
    seed_axis,
    staleness_axis,
)
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.sweep import (
    CellPlace,
    CellProcesses,
    Sweep,
    cells_at_once,
    divide,
    gpus_by_name,
    plan_of,
    run_sweep,
    sole_sweep,
    train_command,
)
from benchmarks.marked_command import wait_until
from tests.kit.configs import make_config
from tests.kit.gpus import pretend_gpus
from tests.kit.runs import make_checkpoint
from tests.kit.sweeps import Trainer, base_yaml, make, write_cell

pytestmark = pytest.mark.processes  # together they compute for long


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


def test_a_cell_that_can_not_start_says_why_and_leaves_a_log(tmp_path: Path) -> None:
    """A real process: the model folder does not exist."""
    sweep = make(tmp_path)
    cell = all_cells(sweep.axes, sweep.folder)[0]
    error = CellProcesses(sweep.folder / "logs").train(train_command(sweep, cell), cell, CellPlace())
    assert error.startswith("exit code 2")
    assert "model.path" in error
    assert (sweep.folder / "logs" / f"{cell.name}.log").exists()


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


def begin(sweep: Sweep, version: int | None = None) -> Cell:
    """Leave the first cell of a sweep as if it had been cut after a checkpoint of `version`, or before any."""
    cell = all_cells(sweep.axes, sweep.folder)[0]
    cell.folder.mkdir(parents=True, exist_ok=True)
    note_start(cell, cell_config(sweep.config, sweep.base_overrides(), cell))
    if version is not None:
        make_checkpoint(cell.folder, version)
    return cell


@pytest.mark.parametrize(("seconds", "goes_on"), [(0.0, True), (30.0, False)])
def test_a_cell_with_a_checkpoint_goes_on_unless_it_has_a_given_time(
    tmp_path: Path, seconds: float, goes_on: bool
) -> None:
    sweep, trainer = make(tmp_path, seconds=seconds, overrides=("run.steps=12",) if goes_on else ()), Trainer()
    cell = begin(sweep, 7)
    (cell.folder / "config.lineage_0.yaml").write_text("")
    run_sweep(sweep, trainer)
    assert (list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]) == goes_on
    assert checkpoint_folder(cell.folder, 7).exists() == goes_on
    assert read_record(cell.folder) is not None


def test_a_cell_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path), Trainer()
    left_over = begin(sweep).folder / "metrics.jsonl"
    left_over.write_text("{")
    run_sweep(sweep, trainer)
    assert left_over.read_text() != "{" and "--resume" not in trainer.commands[0]


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


@pytest.mark.parametrize("given", ["timeouts.batch_s=9000", "checkpoint.keep_last=5"])
def test_settings_that_change_no_result_may_differ_between_the_cells_of_a_sweep(tmp_path: Path, given: str) -> None:
    before, now = (make(tmp_path, overrides=("run.steps=12", *more)) for more in ((), (given,)))
    cell = begin(before, 7)
    run_sweep(dataclasses.replace(before, axes=(staleness_axis("1"), seed_axis(2, 0))), Trainer())
    trainer = Trainer()
    assert run_sweep(now, trainer).pending == []
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)] and len(trainer.cells) == 2
    assert len(read_runs(now.folder)) == 4


@pytest.mark.parametrize(
    ("version", "summary"),
    [(12, {}), (7, {"steps": 12, "interrupted": True}),
     (7, {"steps": 7, "ended": "stopped at version 7", "interrupted": True})],
)  # fmt: skip
def test_a_cell_that_was_cut_short_goes_on_for_its_end(tmp_path: Path, version: int, summary: dict[str, Any]) -> None:
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell = begin(sweep, version)
    if summary:
        (cell.folder / "summary.json").write_text(json.dumps(summary))
    run_sweep(sweep, trainer)
    assert list(trainer.commands[0][-2:]) == ["--resume", str(cell.folder)]


def test_a_cell_that_ended_without_its_sweep_is_kept(tmp_path: Path) -> None:
    """If a sweep is killed, the runs of its cells go on to their end."""
    sweep, trainer = make(tmp_path, overrides=("run.steps=12",)), Trainer()
    cell = begin(sweep)
    write_cell(cell, steps=12)
    assert f"| {cell.name} | is trained" in plan_of(sweep)
    progress = run_sweep(sweep, trainer)
    assert cell.name not in trainer.cells and len(trainer.cells) == 3 and not progress.pending
    assert read_record(cell.folder) is not None


@contextlib.contextmanager
def open_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory, as a run does in it."""
    with (run_dir / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_several_cells_run_at_once_each_with_its_part_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    trainer = Trainer(meets=2)  # which checks that no place has two cells at once
    progress = run_sweep(make(tmp_path, axes=(staleness_axis("0,1"), seed_axis(5, 0)), parallel=None), trainer)
    assert len(progress.seconds) == len(set(trainer.cells)) == 10 and progress.pending == []
    places = {CellPlace(("4", "5"), (0, 1, 2)), CellPlace(("6", "7"), (3, 4, 5))}
    assert set(trainer.places) == places
    assert places.pop().environment.keys() == {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    ("variable", "count", "found"),
    [
        ("-1", 0, []), ("2,-1,3", 1, ["2"]), ("4,GPU-8a", 2, ["4", "GPU-8a"]), ("", 0, []), (None, 2, ["0", "1"]),
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"]),  # of which a process sees one
    ],
)  # fmt: skip
def test_the_gpus_of_cells_are_those_that_cuda_may_use(
    variable: str | None, count: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, count)
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert gpus_by_name() == found


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this a host with eight GPUs and 32 cores."""
    pretend_gpus(monkeypatch, 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("settings", "gpus", "cores", "count"),
    [
        ({}, 8, 16, 4),  # a learner rank and a server each
        ({"learner": {"ranks": 2}, "rollout": {"servers": 1, "tp": 2}}, 8, 16, 2),
        ({"judge": {"servers": 1, "tp": 4}}, 8, 16, 1),
        ({"judge": {"servers": 1}, "rollout": {"servers": 1, "tp": 4}}, 12, 16, 2),
        ({"learner": {"ranks": 2}, "rollout": {"servers": 2}, "colocated": True}, 8, 16, 4),
        ({"rollout": {"servers": 3}}, 2, 16, 1),  # they share what there is
        ({}, 0, 16, 8),
        ({"rollout": {"servers": 3}}, 0, 16, 4),
        ({}, 0, 1, 1),
    ],
)
def test_as_many_cells_run_at_once_as_the_host_holds(
    settings: dict[str, Any], gpus: int, cores: int, count: int
) -> None:
    config = make_config(placement=settings, judge={"path": "judge" if "judge" in settings else ""})
    assert cells_at_once(config, gpus, cores) == count


@pytest.mark.parametrize("parallel", [None, 2])
def test_cells_that_would_run_on_a_ray_cluster_are_not_run_at_once(
    box: None, tmp_path: Path, parallel: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make(tmp_path, parallel=parallel)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="--parallel"):
        run_sweep(sweep, Trainer())
    assert run_sweep(dataclasses.replace(sweep, parallel=1), Trainer()).pending == []
    monkeypatch.delenv("RAY_ADDRESS")
    nodes = ("placement.learner.nodes=1", "placement.rollout.nodes=1")
    with pytest.raises(ConfigError, match="--parallel"):
        run_sweep(dataclasses.replace(sweep, overrides=nodes, folder=tmp_path / "nodes"), Trainer())


@pytest.mark.parametrize(("gpus", "cores"), [(["0", "1"], 8), ([], 2)])
def test_more_cells_at_once_than_gpus_or_cores_are_refused(gpus: list[str], cores: int) -> None:
    with pytest.raises(ConfigError, match=r"^--parallel .*got 3"):
        divide(3, gpus, range(cores))


def test_a_cell_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    """The run of a sweep that was killed goes on to its end."""
    sweep, trainer = make(tmp_path), Trainer()
    run_sweep(dataclasses.replace(sweep, max_cells=1), Trainer(fails="staleness-0.seed-0"))
    first = all_cells(sweep.axes, sweep.folder)[0]
    first.folder.mkdir(parents=True, exist_ok=True)
    with open_lock(first.folder):
        progress = run_sweep(sweep, trainer)
    assert first in progress.pending and len(trainer.cells) == 3
    assert run_sweep(sweep, Trainer()).pending == []


def test_a_second_sweep_in_the_folder_of_one_that_runs_is_refused(tmp_path: Path) -> None:
    sweep, trainer = make(tmp_path), Trainer()
    sweep.folder.mkdir()
    with sole_sweep(sweep.folder), pytest.raises(ConfigError, match="--name"):
        run_sweep(sweep, trainer)
    assert trainer.cells == []
    assert run_sweep(sweep, trainer).pending == []


@pytest.mark.parametrize(
    ("words", "is_terminal", "answer", "starts"),
    [
        ([], True, "n\n", False), ([], True, "", False), ([], True, "y\n", True), ([], False, "", True),
        (["--yes"], True, "", True),
    ],
)
def test_a_sweep_without_staleness_asks_on_a_terminal(
    words: list[str], is_terminal: bool, answer: str, starts: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started: list[Sweep] = []
    monkeypatch.setattr("async_rl.tools.sweeps.sweep.run_and_report", lambda sweep: started.append(sweep) or 0)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    assert main(["sweep", str(base_yaml(tmp_path)), f"run.dir={tmp_path}", *words]) == 0
    assert bool(started) is starts


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, signals: int) -> int:
    """Send signals to a sweep of three cells, two at once, which end at the last of them; return the exit code.

    The cells end after 20 s at the latest.
    """
    asked = folder / "asked"
    asked.mkdir()
    cell = folder / "cell"
    cell.write_text(
        "#!/bin/sh\ncount=0\n"
        f"trap 'count=$((count + 1)); echo > {asked}/$$.$count; [ $count -ge {signals} ] && exit 130' TERM\n"
        f"echo > {asked}/$$.0\n"
        "for i in $(seq 400); do sleep 0.05; done\n"
    )
    cell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(cell))

    def send() -> None:
        for number in range(signals):
            wait_until(lambda of=number: len([*asked.glob(f"*.{of}")]) == 2, 60, "both cells")  # type: ignore[misc]
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    words = ["--staleness", "0", "--seeds", "3", "--parallel", "2", f"run.dir={folder}", "timeouts.shutdown_s=1"]
    code = main(["sweep", str(base_yaml(folder)), *words])
    sender.join()
    assert {len([*asked.glob(f"*.{number}")]) for number in range(signals + 1)} == {2}
    return code


def test_no_cell_begins_once_its_sweep_is_stopping(tmp_path: Path) -> None:
    processes, cell = CellProcesses(tmp_path), all_cells(make(tmp_path).axes, tmp_path)[0]
    assert processes.stop() == 0
    assert processes.train(["async-rl", "--help"], cell, CellPlace())
    assert not (tmp_path / f"{cell.name}.log").read_text()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core holds one cell")
@pytest.mark.parametrize("signals", [1, 2])
def test_the_cells_of_an_interrupted_sweep_end_in_order_or_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signals: int
) -> None:
    assert interrupted(tmp_path, monkeypatch, signals) == 130
    assert "2 cells" in capfd.readouterr().err
