"""The runs in a folder, and the state of a run by its files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.status import write_status
from async_rl.tools.view.runs import RunFiles, Runs
from tests.kit.view.run_dirs import make_run


def set_status(run_dir: Path, **changes: Any) -> None:
    saved = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(saved | changes))


def refreshed(run_dir: Path) -> RunFiles:
    run = RunFiles(run_dir)
    run.metrics.refresh()
    return run


def test_the_runs_of_a_folder_are_found_with_the_newest_first(tmp_path: Path) -> None:
    for name in ("old", "new"):
        make_run(tmp_path / name, steps=1, groups=0)
    write_status(tmp_path / "new", [], "running")
    (tmp_path / "no run").mkdir()
    runs = Runs(tmp_path)
    assert [run.name for run in runs.all()] == ["new", "old"]
    assert [run.name for run in Runs(tmp_path / "old").all()] == ["old"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigError, match="FOLDER"):
            Runs(folder)


@pytest.mark.parametrize(
    ("limits", "text", "share", "left_s"),
    [
        ({"steps": 1_000_000, "seconds": 44.0}, "step 12 of 1000000, 11 of 44 s", 0.25, 33.0),
        ({"steps": 20, "seconds": 3600.0}, "step 12 of 20, 11 of 3600 s", 0.6, 8.0),
        ({"steps": 1_000_000, "seconds": 10.0}, "step 12 of 1000000, 11 of 10 s", 1.0, 0.0),
    ],
)
def test_progress_and_time_left_are_those_of_the_nearer_limit(
    tmp_path: Path, limits: dict[str, Any], text: str, share: float, left_s: float
) -> None:
    run_dir = make_run(tmp_path / "run", steps=12, note="running")
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(saved | {"run": saved["run"] | limits}))
    run = refreshed(run_dir)
    assert run.progress == (text, pytest.approx(share))
    assert run.time_left_s == pytest.approx(left_s)


def test_a_run_that_ended_says_why_it_ended_early_and_nothing_of_its_processes(run_dir: Path) -> None:
    run = refreshed(run_dir)
    assert (run.state.name, run.state.text, run.state.processes, run.time_left_s) == ("ended", "", (), None)
    (run_dir / "summary.json").write_text(json.dumps({"ended": "the task is solved"}))
    assert run.state.text == "the task is solved"
    set_status(run_dir, note="ended: staleness.max must be 0")
    assert "staleness.max must be 0" in run.state.text


def test_a_driver_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", note="running")
    set_status(run_dir, time_s=time.time() - 7200)
    state = RunFiles(run_dir).state
    assert state.name == "stopped writing"
    assert "120 minutes" in state.text


@pytest.mark.parametrize("note, age_s, name", [
    ("ended normally", 3600.0, "resuming"), ("running", 3600.0, "resuming"), ("running", 0.0, "running"),
])  # fmt: skip
def test_a_resume_that_starts_is_told_from_a_run_that_ended(
    tmp_path: Path, note: str, age_s: float, name: str
) -> None:
    run_dir = make_run(tmp_path / "run", note=note)
    set_status(run_dir, time_s=time.time() - age_s)
    (run_dir / ".resuming").write_text("lineage_0 5")
    assert RunFiles(run_dir).state.name == name


def test_a_change_of_a_file_changes_its_text(run_dir: Path) -> None:
    before = RunFiles(run_dir).changes()
    write_status(run_dir, [], "running")
    after = RunFiles(run_dir).changes()
    assert [kind for kind in before if before[kind] != after[kind]] == ["status"]
