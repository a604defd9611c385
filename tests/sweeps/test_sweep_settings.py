"""The settings of a sweep next to its axes, on the command line and in its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.tools.sweeps.cells import key_axis
from tests.kit.sweeps import base_yaml


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["staleness.max=4"], "staleness.max"),
        (["staleness={on_late: drop}"], "staleness"),
        (["run.seed=7"], "run.seed"),
        (["--mode", "exact", "weight_sync.on_update=in_place"], "weight_sync.on_update"),
        (["--axis", "task.params={a: 1},{a: 2}", "task.params.a=3"], "task.params"),
        (["--seconds", "60", "run.steps=100"], "run.steps"),
        (["--seconds", "60", "--axis", "run.seconds=10,20"], "run.seconds"),
    ],
)
def test_a_key_that_is_set_twice_is_refused(
    tmp_path: Path, words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--staleness", "0,1", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *words, "--dry-run"]
    assert main(["sweep", str(base_yaml(tmp_path)), *given]) == 2
    assert re.search(rf"each key once.*\b{re.escape(key)}\b", capsys.readouterr().err)


def test_a_sweep_below_a_file_names_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ["--staleness", "0", "--seeds", "1", f"run.dir={tmp_path / 'file' / 'runs'}"]
    assert main(["sweep", str(base_yaml(tmp_path)), *words]) == 2
    assert "run.dir" in capsys.readouterr().err


def test_lists_may_be_levels() -> None:
    assert list(key_axis("task.tools=[a:b,c:d],[e:f],[]").levels) == ["[a:b,c:d]", "[e:f]", "[]"]


@pytest.mark.parametrize(
    "settings", [["weight_sync.every_steps=2"], ["buffer.max_uses=2", "buffer.fresh_fraction=0.5"]]
)
def test_a_config_that_is_valid_at_the_bounds_of_the_sweep_alone_is_swept(tmp_path: Path, settings: list[str]) -> None:
    file = base_yaml(tmp_path)
    assert main(["train", str(file), *settings, "--dry-run"]) == 2
    words = ["--staleness", "2,4", "--seeds", "1", f"run.dir={tmp_path / 'runs'}", *settings, "--dry-run"]
    assert main(["sweep", str(file), *words]) == 0
