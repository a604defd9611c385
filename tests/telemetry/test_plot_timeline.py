"""The timeline plot of a run, which leaves pyplot and its backend to the program that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from async_rl.base.telemetry.plots import plot_timeline
from async_rl.base.telemetry.timeline import Span


def test_the_lanes_of_a_run_are_drawn_with_its_steps_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(Axes, "set_xlabel", lambda self, text: labels.append(text))
    spans = [Span("learner/0", "busy", i, i + 0.5) for i in range(4)]
    spans += [Span("rollout/0", "busy", 0, 4), Span("rollout/0", "sync", 1.5, 1.7)]
    busy = {"learner/0": 0.5, "rollout/0": 0.9}
    path = plot_timeline(iter(spans), busy, [1.0, 2.0, 3.0, 4.0], tmp_path / "timeline.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    assert len(labels) == 1 and "2 to 4" in labels[0]
