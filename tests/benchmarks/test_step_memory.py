"""A learner rank takes as much memory as the dry run says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.step_memory import compare, save_models

pytestmark = [pytest.mark.nightly, pytest.mark.processes]


@pytest.mark.parametrize("case", ["deep, two ranks", "wide head"])
def test_the_plan_is_within_15_percent_of_the_measured_peak(case: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    said, measured = compare(case, tmp_path)
    assert said.peak == pytest.approx(measured, rel=0.15)
