"""Several cells of a sweep at once, and several sweeps of the same cells."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from async_rl.cli import main
from async_rl.tools.sweeps.cells import Cell, all_cells, key_axis, seed_axis, staleness_axis
from async_rl.tools.sweeps.sweep import CellPlace, cells_at_once, divide, gpus_by_name, plan_of, run_sweep, sole_sweep
from tests.kit.configs import make_config
from tests.kit.gpus import pretend_gpus
from tests.kit.sweeps import Trainer, base_yaml, make


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
    trainer = Trainer(meets=2)
    progress = run_sweep(make(tmp_path, parallel=None), trainer)
    assert len(progress.seconds) == 4 and progress.pending == []
    places = {CellPlace(("4", "5"), (0, 1, 2)), CellPlace(("6", "7"), (3, 4, 5))}
    assert set(trainer.places) == places and all(trainer.places.count(place) == 2 for place in places)
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


class OnGpus(Trainer):
    """Checks that no GPU has two cells at once."""

    def __init__(self) -> None:
        super().__init__(meets=3)  # 33 cells, four at once: three of them always wait for each other
        self.lock, self.busy = threading.Lock(), Counter[str]()

    def __call__(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
        with self.lock:
            self.busy.update(place.gpus)
            assert max(self.busy.values()) == 1
        try:
            return super().__call__(command, cell, place)
        finally:
            with self.lock:
                self.busy.subtract(place.gpus)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this a host with eight GPUs and 32 cores."""
    pretend_gpus(monkeypatch, 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_box_of_eight_gpus_sweeps_eleven_bounds_with_three_seeds(box: None, tmp_path: Path) -> None:
    trainer = OnGpus()
    bounds = ",".join(map(str, range(11)))
    axes = (staleness_axis(bounds), seed_axis(3, 0))
    progress = run_sweep(make(tmp_path, axes=axes, parallel=None), trainer)
    assert progress.pending == [] and len(progress.seconds) == len(set(trainer.cells)) == len(trainer.cells) == 33
    assert {place.gpus for place in trainer.places} == {("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")}


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


@pytest.mark.parametrize("servers", ["1,3", "3,1"])
def test_places_are_as_large_as_the_largest_cell_wants(box: None, tmp_path: Path, servers: str) -> None:
    axes = (staleness_axis("0"), key_axis(f"placement.rollout.servers={servers}"), seed_axis(1, 0))
    text = plan_of(make(tmp_path, axes=axes, parallel=None))
    assert "2 at once: GPU 0,1,2,3, core 0,1" in text and "; GPU 4,5,6,7, core 16" in text


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


def test_more_cells_at_once_than_gpus_or_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--parallel .*GPUs .*got 3"):
        divide(3, ["0", "1"], range(8))
    with pytest.raises(ConfigError, match=r"^--parallel .*cores .*got 3"):
        divide(3, [], range(2))


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


def test_a_dry_run_says_cells_places_and_time(box: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--staleness", "0,1,2,3,4,5,6,7,8,9,10", "--seeds", "3", "--seconds", "600", "--name", "s"]
    command = ["sweep", str(base_yaml(tmp_path)), f"run.dir={tmp_path}", *options, "--parallel", "auto", "--dry-run"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "4 at once: GPU 0,1, core 0,1,2,3,4,5,6,7; GPU 2,3, core 8" in text and "90 min" in text
    assert text.count("| starts |") == 33 and not (tmp_path / "s").exists()


def test_a_dry_run_counts_the_time_of_the_cells_of_this_command(box: None, tmp_path: Path) -> None:
    sweep = make(tmp_path, seconds=600.0)
    text, of_one = plan_of(sweep), plan_of(dataclasses.replace(sweep, max_cells=1))
    assert "40 min" in text and "10 min" in of_one
