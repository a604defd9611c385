"""The plots of a report: sweeps that have more of something than there are colours, and plots that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.sweeps.plots import MARKERS, OKABE_ITO
from async_rl.sweeps.report import write_report
from tests.kit.sweeps import make_sweep


def test_depths_below_more_bounds_than_there_are_colours_are_drawn(tmp_path: Path) -> None:
    bounds = [1, *(f"1/{bound}" for bound in range(2, 2 + max(len(OKABE_ITO), len(MARKERS))))]
    sweep = make_sweep(tmp_path, bounds, seeds=1, steps=12)
    write_report(sweep)
    assert (sweep / "plots" / "depth_beside_bound.png").is_file()


def test_a_plot_that_fails_takes_no_table_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path, (0, 1), seeds=1, steps=12)

    def fail(*_: object) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr("async_rl.sweeps.report.draw_all", fail)
    with pytest.raises(ValueError, match="no such colour"):
        write_report(sweep)
    assert all((sweep / name).is_file() for name in ("table.md", "table.csv", "runs.csv", "evals.csv"))
