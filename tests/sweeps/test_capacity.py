from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.sweeps import capacity
from async_rl.sweeps.capacity import ModelSpeed, loads
from rollout_server import eval_worker

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODEL = ModelSpeed("1B", "a GPU", tokens_per_s=8000.0)


def test_each_part_is_used_by_what_passes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 servers sample 80,000 tokens/s in groups of 4 x 1,000, so 20 groups a second."""
    monkeypatch.setattr(capacity, "BUFFER_S_PER_GROUP", 1e-3)
    monkeypatch.setattr(capacity, "BUFFER_S_PER_TOKEN", 1e-6)
    monkeypatch.setattr(capacity, "WORKER_S_PER_GROUP", 2e-3)
    monkeypatch.setattr(capacity, "WORKER_S_PER_TOKEN", 2e-6)
    monkeypatch.setattr(capacity, "DRIVER_S_PER_REPORT", 1e-3)
    found = {load.part.partition(",")[0]: load for load in loads(MODEL, 10, 1000.0, 4, link_gbps=1.0)}
    assert found["buffer"].used == pytest.approx(20 * (1e-3 + 4000e-6))
    assert found["buffer"].servers == pytest.approx(100)
    assert found["driver"].used == pytest.approx(10 * 2 * 1e-3)
    many = {load.part: load for load in loads(MODEL, 5000, 1000.0, 4, link_gbps=1.0)}
    assert many["driver, one core"].used == pytest.approx(200 * 1e-3)  # more workers report less often
    assert found["each rollout worker"].used == pytest.approx(2 * (2e-3 + 8e-3))
    assert found["network of the buffer's node"].used == pytest.approx(2 * 80_000 * 13 * 8 / 1e9)


def test_the_costs_are_those_that_were_measured() -> None:
    """By group: batches of 1,024 groups of short answers. By token: from 100 to 32,000 tokens an answer, 4 a group."""
    cells = {
        (cell["workers"], cell["groups"], cell["tokens"]): cell
        for cell in json.loads((RESULTS / "scale.json").read_text())["cells"]
    }
    short, long, many = cells[8, 256, 100], cells[8, 256, 32_000], cells[64, 1024, 500]
    for part, per_group_s, per_token_s in (
        ("buffer_us", capacity.BUFFER_S_PER_GROUP, capacity.BUFFER_S_PER_TOKEN),
        ("workers_us", capacity.WORKER_S_PER_GROUP, capacity.WORKER_S_PER_TOKEN),
    ):
        assert round(cells[8, 1024, 100][part], -2) == pytest.approx(1e6 * per_group_s)
        per_token_us = (long[part] - short[part]) / (4 * (32_000 - 100))
        assert round(per_token_us, 2) == pytest.approx(1e6 * per_token_s)
    log_ms = 1e-3 * many["driver_us"] * many["groups_per_s"] / (64 * capacity.REPORTS_PER_S)
    page = " ".join((RESULTS / "scale.md").read_text().split())
    said = re.search(r"A report takes ([\d.]+) ms of the driver here, and ([\d.]+) ms more in Ray's stream", page)
    assert said and float(said[1]) == pytest.approx(round(log_ms, 2))
    assert float(said[1]) + float(said[2]) == pytest.approx(1e3 * capacity.DRIVER_S_PER_REPORT)


def test_the_figures_of_reports_are_those_of_the_worker() -> None:
    assert capacity.MOST_REPORTS_PER_S == eval_worker.MOST_REPORTS_PER_S
    assert 1 / capacity.REPORTS_PER_S == eval_worker.REPORT_INTERVAL_S


def test_the_answer_prints_what_it_assumes_and_which_part_is_full_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--servers", "1000"]) == 0
    text = capsys.readouterr().out
    assert "1,000 rollout servers that are always full, groups of 8 answers of 4,000 tokens" in text
    assert "A 7B model, 10,000 tokens/s a server (1 GPU of 80 GB; assumed)" in text
    assert "A 70B model" in text and text.count("Full first: buffer, one core, at") == 2


@pytest.mark.parametrize("option", ["--servers", "--tokens", "--group-size"])
def test_sizes_of_nothing_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--servers", "1000", option, "0"]
    assert main(words) != 0
    assert f"{option} must be above 0 and finite, got 0" in capsys.readouterr().err
