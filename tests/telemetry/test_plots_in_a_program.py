"""Plots are drawn without pyplot, so that the backend and the figures of a program that trains stay its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from async_rl.base.telemetry.plots import STATE_COLORS, plot_learning_curve, plot_timeline
from async_rl.base.telemetry.timeline import Span

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture(autouse=True)
def no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of pyplot or the choice of a backend fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setattr(matplotlib, "use", pytest.fail)


FEW = [{"step": 0, "eval/accuracy": 0.2}, {"step": 1, "reward/mean": 0.3}]
MANY = [{"step": i, "reward/mean": i / 30, "staleness/mean": None, "staleness/max": 1.0} for i in range(1, 31)]


@pytest.mark.parametrize(("records", "is_drawn"), [(FEW, True), (MANY, True), ([], False)])
def test_a_learning_curve_is_drawn_from_the_file_alone(
    records: list[dict[str, float | None]], is_drawn: bool, tmp_path: Path
) -> None:
    run_dir = tmp_path / "a$b^$c"  # no mathematics
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot = plot_learning_curve(run_dir)
    assert plot.read_bytes().startswith(b"\x89PNG") if plot and is_drawn else plot is None and not is_drawn


def test_a_timeline_leaves_the_backend_of_the_program(tmp_path: Path) -> None:
    spans = [Span("learner/0", "busy", i, i + 0.5) for i in range(4)]
    assert plot_timeline(spans, {"learner/0": 0.5}, [1.0, 2.0, 3.0, 4.0], tmp_path / "timeline.png")


def test_the_lane_of_a_server_is_empty_while_it_is_not_there(tmp_path: Path) -> None:
    """Of the two shown seconds it is there for one."""

    def pixels(there: dict[str, list[tuple[float, float]]]) -> int:
        file, pool = tmp_path / "timeline.png", "rollout/1"
        assert plot_timeline([Span(pool, "sync", 0, 3)], {pool: 1.0}, [1.0, 2.0, 3.0], file, there=there)
        colour = to_rgb(STATE_COLORS["sync"])
        return int((np.abs(imread(file)[..., :3] - colour).max(axis=-1) < 0.01).sum())

    assert pixels({"rollout/1": [(0.5, 1.25), (2.25, 9.0)]}) / pixels({}) == pytest.approx(0.5, abs=0.05)
