"""Reads documents and committed sweeps, for tests that compare them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.sweeps.results import read_results
from async_rl.sweeps.settings import Setting, settings_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def text_of(name: str) -> str:
    """The document as one line."""
    return " ".join((ROOT / name).read_text().split())


def by_staleness(sweep: str) -> dict[str, Setting]:
    return {str(row.staleness): row for row in settings_of(read_results(RESULTS / sweep))}


def lag_of(row: Setting) -> float:
    """The mean over the seeds of staleness times the seconds of a step."""
    pairs = zip(row.values["staleness_mean"], row.values["steps_per_minute"], strict=True)
    return float(np.mean([60 * staleness / speed for staleness, speed in pairs]))
