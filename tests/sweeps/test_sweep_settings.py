"""The settings of a sweep beside its axes, on the command line and in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.config.loading import dump_config, load_config
from async_rl.sweeps.cells import MODES, Axis, all_cells, key_axis, named_axis, seed_axis, staleness_axis
from async_rl.sweeps.sweep import checked_cells
from tests.kit.sweeps import base_yaml, make


@pytest.mark.parametrize(
    ("options", "setting", "axis"),
    [
        ([], "staleness.max=4", "the axis staleness, which sets staleness.max"),
        ([], "staleness.depth=1", "the axis staleness, which sets staleness.depth"),
        ([], "staleness={late: drop}", "the axis staleness, which sets staleness.depth"),
        ([], "run.seed=7", "the axis seed, which sets run.seed"),
        (["--mode", "exact"], "weight_sync.on_update=in_place", "the axis mode, which sets weight_sync.on_update"),
        (["--axis", "task.params={a: 1},{a: 2}"], "task.params.a=3", "the axis task.params, which sets task.params"),
    ],
)
def test_a_setting_that_no_cell_would_have_is_refused(
    tmp_path: Path, options: list[str], setting: str, axis: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--staleness", "0,1", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *options, setting, "--dry-run"]
    assert main(["sweep", str(base_yaml(tmp_path)), *words]) == 2
    told = capsys.readouterr().err
    assert f"no axis of the sweep sets, got {setting} and {axis}. Leave one of them out, or set it by the other" in told


@pytest.mark.parametrize(
    ("setting", "key"), [("run.steps=100", "run.steps"), ("run.seconds=9", "run.seconds"), ("run={}", "run.seconds")]
)
def test_a_setting_that_the_given_time_would_replace_is_refused(
    tmp_path: Path, setting: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--staleness", "0", "--seeds", "1", "--seconds", "60", f"run.dir={tmp_path / 'runs'}", setting]
    assert main(["sweep", str(base_yaml(tmp_path)), *words, "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"that --seconds does not set, got {setting} and --seconds, which sets {key}. Leave the setting out" in told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--axis", "run.seconds=10,20"], "got the axis run.seconds, which sets run.seconds=10, and --seconds, whi"),
        (["--axis", "run.steps=10,20"], "got the axis run.steps, which sets run.steps=10, and --seconds, which"),
        (["guard.action=rollback", "checkpoint.every_steps=5"], "guard.action must be any but rollback with --seconds"),
    ],
)
def test_cells_of_a_given_time_have_that_time(
    tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--staleness", "0", "--seeds", "1", "--seconds", "60", f"run.dir={tmp_path / 'runs'}", *words]
    given += ["guard.tighten=lr", "eval.every_steps=5", "--dry-run"]
    assert main(["sweep", str(base_yaml(tmp_path)), *given]) == 2
    assert why in capsys.readouterr().err


def test_a_sweep_below_a_file_names_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ["--staleness", "0", "--seeds", "1", f"run.dir={tmp_path / 'file' / 'runs'}"]
    assert main(["sweep", str(base_yaml(tmp_path)), *words]) == 2
    assert "run.dir, run.name: " in (told := capsys.readouterr().err) and "can't be created: Not a directory" in told


def test_lists_may_be_levels_and_long_levels_have_short_folders(tmp_path: Path) -> None:
    lists = key_axis("task.tools=[a:b,c:d],[e:f],[]")
    assert list(lists.levels) == ["[a:b,c:d]", "[e:f]", "[]"]
    long = [f"model.path=/{'long' * 60}/{name}" for name in "ab"]
    axis = Axis("model.path", {text: (text,) for text in long})
    names = {cell.name for cell in all_cells([axis, seed_axis(1, 0)], tmp_path)}
    assert len(names) == 2 and all(len(name) <= 200 for name in names)


def test_a_setting_that_only_some_levels_replace_goes_for_the_others(tmp_path: Path) -> None:
    axes = (staleness_axis("1"), seed_axis(1, 0), named_axis("mode", "bounded,exact", MODES))
    _, configs = checked_cells(make(tmp_path, axes=axes, overrides=("weight_sync.on_update=abort",)))
    assert [config.weight_sync.on_update for config in configs.values()] == ["abort", "drain"]


@pytest.mark.parametrize(("depth", "is_told"), [("1.25", True), ("max", False)])
def test_a_depth_of_the_file_that_no_cell_has_is_told(
    tmp_path: Path, depth: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = base_yaml(tmp_path)
    file.write_text(dump_config(load_config(file, ["staleness.max=8", f"staleness.depth={depth}"])))
    assert main(["sweep", str(file), "--staleness", "4,8", f"run.dir={tmp_path / 'runs'}", "--dry-run"]) == 0
    assert (f"staleness.depth 1.25 of {file} is not used: --staleness sets" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize(
    "settings", [["weight_sync.every_steps=2"], ["buffer.max_uses=2", "buffer.fresh_fraction=0.5"]]
)
def test_a_config_that_is_valid_at_the_bounds_of_the_sweep_alone_is_swept(
    tmp_path: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = base_yaml(tmp_path)
    assert main(["train", str(file), *settings, "--dry-run"]) == 2
    words = ["--staleness", "2,4", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *settings, "--dry-run"]
    assert main(["sweep", str(file), *words]) == 0
    assert f"more in {tmp_path / 'runs'}/" in capsys.readouterr().out
