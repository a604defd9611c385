from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from async_rl import pipeline
from async_rl.cli import main

ENDED = "16 groups in a row had the same reward, 0, for every answer. Choose an easier one."


@pytest.mark.parametrize(("steps", "code"), [(0, 1), (3, 0)])
def test_a_run_that_ends_without_a_step_has_a_non_zero_exit(
    steps: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary: dict[str, Any] = {"steps": steps, "ended": ENDED, "run_dir": str(tmp_path)}
    monkeypatch.setattr(pipeline, "check_names", lambda config: None)
    monkeypatch.setattr(pipeline, "check_inputs", lambda config: [])
    monkeypatch.setattr(pipeline, "open_run_dir", lambda config, decided: contextlib.nullcontext(decided))
    monkeypatch.setattr(pipeline, "train_once", lambda *_: summary)
    (tmp_path / "config.yaml").write_text("model: {path: m}\ntask: {name: reasoning_gym/chain_sum}\n")
    assert main(["train", str(tmp_path / "config.yaml")]) == code
    assert (ENDED in capsys.readouterr().err) == bool(code)
