"""The side-by-side benchmark: runs take turns, a repeated command goes on, and the table has the medians."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import load_config
from benchmarks import engines
from benchmarks.engines import comparison
from tests.kit.documents import DOCUMENTS, ROOT


def cell(number: int, engine: str, rate: float, **more: float) -> dict[str, Any]:
    return {"round": number, "tokens": 6, "engine": engine, "episodes_per_s": rate, "tokens_per_s": 6 * rate, **more}


def test_the_table_has_the_median_of_the_rounds_for_each_engine() -> None:
    cells = [cell(0, "a", 10.0, pause_ms=4.0), cell(0, "trl", 1.0), cell(1, "a", 40.0, pause_ms=6.0)]
    cells.append(cell(2, "a", 20.0))
    assert comparison(cells).rows == [
        ["6", "a", "3", "20.0", "10.0 to 40.0", "120", "5"], ["6", "trl", "1", "1.0", "1.0 to 1.0", "6", "-"],
    ]


def test_the_page_of_results_says_how_many_answers_a_step_has() -> None:
    page = (ROOT / "benchmarks" / "results" / "engines.md").read_text()
    overrides = re.findall(r" ([\w.]+=\S+)", re.findall(r"`python -m benchmarks\.engines (.*)`", page)[0])
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    text = f"{config.learner.prompts_per_step} prompts x {config.rollout.group_size} answers a step, a random model"
    assert text in " ".join(DOCUMENTS["docs/results.md"].split())


def test_a_repeated_command_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def train(engine: str, config: str, overrides: list[str], seconds: float, folder: Path) -> dict[str, float]:
        assert (folder / "model" / "config.json").exists()
        trained.append((engine, overrides[1]))
        return {"episodes_per_s": 1.0, "tokens_per_s": 6.0}

    monkeypatch.setattr(engines, "train", train)
    words = ["engines", "c.yaml", "--engines", "hf,trl", "--tokens", "6,64", "--rounds", "1", "--max-cells", "3"]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path / "out")])
    engines.main()
    engines.main()
    short, long = "rollout.max_response_tokens=6", "rollout.max_response_tokens=64"
    assert trained == [("hf", short), ("trl", short), ("hf", long), ("trl", long)]
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == 4
