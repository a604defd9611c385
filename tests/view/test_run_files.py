"""The state of a run as its files tell it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.changed_settings import changed_settings
from async_rl.config.loading import dump_config, load_config
from async_rl.telemetry.status import write_status
from async_rl.view.journal_reader import JournalError
from async_rl.view.run_files import RunFiles, read_json
from tests.kit.view.run_dirs import make_run


def test_a_run_that_goes_on_says_how_long_it_takes(tmp_path: Path) -> None:
    run = RunFiles(make_run(tmp_path / "run", steps=12, note="running"))
    assert run.state.name == "running"
    run.metrics.refresh()
    assert run.time_left_s == pytest.approx(8.0)  # 8 of 20 steps are left, at 1 s a step


@pytest.mark.parametrize(("keep", "every", "kept"), [(100, 100, 200), (300, 100, 300), (-1, 100, -1)])
def test_the_steps_for_which_tokens_are_kept_are_those_of_the_journal(
    tmp_path: Path, keep: int, every: int, kept: int
) -> None:
    run_dir = make_run(tmp_path / "run")
    file = run_dir / "config.yaml"
    settings = [f"buffer.journal_keep_steps={keep}", f"checkpoint.every_steps={every}"]
    config = load_config(file, settings)
    file.write_text(dump_config(config))
    assert RunFiles(run_dir).kept_steps == config.journal_kept_steps == kept
    file.unlink()
    assert RunFiles(run_dir).kept_steps == 0


def set_limits(run_dir: Path, **limits: float) -> None:
    config = run_dir / "config.yaml"
    saved = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(saved | {"run": saved["run"] | limits}))


@pytest.mark.parametrize(
    ("limits", "text", "share", "left_s"),
    [
        ({"steps": 1_000_000, "seconds": 44.0}, "step 12, 11 of 44 s", 0.25, 33.0),
        ({"steps": 20, "seconds": 3600.0}, "step 12 of 20", 0.6, 8.0),
        ({"steps": 1_000_000, "seconds": 10.0}, "step 12, 11 of 10 s", 1.0, 0.0),
        ({"steps": 12, "seconds": 11.04}, "step 12 of 12", 1.0, 0.0),
    ],
)
def test_progress_and_time_left_are_those_of_the_nearer_limit(
    tmp_path: Path, limits: dict[str, Any], text: str, share: float, left_s: float
) -> None:
    run_dir = make_run(tmp_path / "run", steps=12, note="running")
    set_limits(run_dir, **limits)
    run = RunFiles(run_dir)
    run.metrics.refresh()
    assert (run.progress.text, run.progress.share) == (text, pytest.approx(share))
    assert run.time_left_s == pytest.approx(left_s)


def test_the_seconds_of_a_run_count_anew_from_a_resume_on(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=12, note="running")
    set_limits(run_dir, steps=1_000_000, seconds=44.0)
    (run_dir / ".resuming").write_text("lineage_0 5")
    run = RunFiles(run_dir)
    run.metrics.refresh()
    assert run.time_left_s == pytest.approx(44.0)


def test_the_reason_of_an_end_is_told_only_of_the_newest_end(run_dir: Path) -> None:
    run = RunFiles(run_dir)
    run.metrics.refresh()
    before = run.revision()
    (run_dir / "summary.json").write_text(json.dumps({"steps": 12, "resumes": 0, "ended": "the task is solved"}))
    assert run.end_reason == "the task is solved"
    assert [key for key, text in run.revision().items() if text != before[key]] == ["status"]
    (run_dir / "summary.json").write_text(json.dumps({"steps": 11, "resumes": 0, "ended": "the task is solved"}))
    assert run.end_reason == ""
    (run_dir / "summary.json").write_text(json.dumps({"steps": 12, "resumes": 0, "ended": "the task is solved"}))
    (run_dir / "config.lineage_0.yaml").touch()  # it went back to a checkpoint since
    assert run.end_reason == ""
    (run_dir / "config.lineage_0.yaml").unlink()
    write_status(run_dir, [], "running")
    assert run.end_reason == ""


def test_a_run_that_ended_has_no_time_left(run_dir: Path) -> None:
    run = RunFiles(run_dir)
    run.metrics.refresh()
    assert (run.state.name, run.state.text) == ("ended", "The run ended normally.")
    assert run.time_left_s is None


def test_a_run_that_its_guard_has_paused_says_why(tmp_path: Path) -> None:
    note = "paused by the guard since step 8: the KL is 12. It waits for: async-rl guard"
    run = RunFiles(make_run(tmp_path / "run", steps=12, note=note))
    assert (run.state.name, run.state.text) == ("paused", f"The run is {note}")
    assert run.state.processes and run.time_left_s is None


def test_a_driver_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", note="running")
    saved = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(saved | {"time_s": time.time() - 7200}))
    state = RunFiles(run_dir).state
    assert state.name == "stopped writing"
    assert "2 hours ago" in state.text


@pytest.mark.parametrize("note, age_s", [("ended normally", 3600.0), ("running", 3600.0)])
def test_a_resume_that_starts_is_told_from_a_run_that_ended(tmp_path: Path, note: str, age_s: float) -> None:
    run_dir = make_run(tmp_path / "run", note=note)
    saved = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(saved | {"time_s": time.time() - age_s}))
    (run_dir / ".resuming").write_text("lineage_0 5")
    state = RunFiles(run_dir).state
    assert state.name == "resuming"
    assert "A resume began 0 seconds ago and has made no step yet" in state.text
    (run_dir / "trajectories.sqlite").unlink()
    with pytest.raises(JournalError, match="A resume of this run is starting"):
        RunFiles(run_dir).journal.choices()


def test_a_resume_whose_driver_reports_runs(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", note="running")
    (run_dir / ".resuming").write_text("lineage_0 5")
    assert RunFiles(run_dir).state.name == "running"


@pytest.mark.parametrize("note", ["ended: staleness.max must be 0", "ended: staleness.max must be 0."])
def test_a_reason_is_one_sentence_with_one_full_stop(tmp_path: Path, note: str) -> None:
    assert RunFiles(make_run(tmp_path / "run", note=note)).state.text == "The run ended: staleness.max must be 0."


def test_the_name_of_a_task_is_listed_only_where_it_is_set() -> None:
    found = changed_settings({"task": {"name": "", "env": "a:B"}, "model": {"path": "models/a"}})
    assert ("model.path", "models/a", ...) in found
    assert ("task.env", "a:B", "") in found
    assert all(key != "task.name" for key, _, _ in found)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"note": "running", "time_s": "soon"}'])
def test_a_damaged_status_is_an_unknown_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert RunFiles(tmp_path).state.name == "unknown"


def test_a_missing_or_damaged_config_leaves_settings_out(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    assert (run.config, run.steps, run.setting("a.b", 3)) == ({}, None, 3)
    (tmp_path / "config.yaml").write_text("run: [unclosed")
    assert RunFiles(tmp_path).config == {}


def test_only_settings_that_differ_from_the_defaults_are_listed(run_dir: Path) -> None:
    found = {key: (value, default) for key, value, default in changed_settings(RunFiles(run_dir).config)}
    assert found["staleness.max"] == (2, 0)
    assert "learner.lr" not in found


def test_settings_that_a_resume_has_changed_are_listed(run_dir: Path) -> None:
    run = RunFiles(run_dir)
    assert ("run.seconds", 44.0, 0.0) not in run.changed_settings
    set_limits(run_dir, seconds=44.0)
    assert ("run.seconds", 44.0, 0.0) in run.changed_settings


def test_settings_of_another_version_have_no_default() -> None:
    found = changed_settings({"staleness": {"max": 0, "new_setting": 1}, "algorithm": {"preset": "unheard of"}})
    assert ("staleness.new_setting", 1, ...) in found


def test_a_file_that_is_no_object_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    assert read_json(tmp_path / "a.json") == {}
