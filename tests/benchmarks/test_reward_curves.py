"""The curves of proxy and gold against KL, of runs whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reward_curves import Curve, band, curve_table, draw, fit, mean_table
from tests.kit.reward_curves import E, gao


def test_the_form_of_gao_is_found_again_also_in_runs_with_other_starts() -> None:
    one, other = gao(3.0, 2.0), gao(3.0, 2.0, seed=1, start=4.0)
    assert fit([one]) == pytest.approx((3.0, 2.0, 1.0), abs=0.02)
    assert fit([one, other]) == pytest.approx((3.0, 2.0, 1.0), abs=0.02)
    assert fit([one, gao(1.0, 0.0)])[0] == pytest.approx(2.0, abs=0.02)
    assert fit([one, gao(1.0, 0.0)])[2] < 0.9


def test_a_run_that_falls_is_told_from_one_that_does_not() -> None:
    fallen, sound = gao(3.0, 2.0), gao(2.0, 0.1, "ppo.yaml")
    assert fallen.kept < 0.5 < sound.kept == pytest.approx(1.0)
    rows = curve_table([fallen, sound]).rows
    assert [row[0] for row in rows] == ["no penalty", "ppo.yaml"]
    # d (3 - 2 log d) is largest at log d = 1/2, where it is 2 d
    assert float(rows[0][3]) == pytest.approx(2 * E**0.5 - 1, abs=0.02) and rows[0][6] == "2.71"


def test_means_are_over_the_seeds_of_a_kind_and_have_standard_errors() -> None:
    first, second, other = gao(3.0, 2.0), gao(3.0, 2.0, seed=1, start=1.0), gao(1.0, 0.0, "ppo.yaml")
    rows = mean_table([first, other, second]).rows
    assert [row[:2] for row in rows] == [["no penalty", "2"], ["ppo.yaml", "1"]]
    assert rows[0][2:5] == ["0.00 ± 1.00", "3.30 ± 1.00", "-3.50 ± 1.00"]
    assert rows[0][-3:] == ["3.00", "2.00", "1.00"]


def test_the_mean_of_the_seeds_is_drawn_where_at_least_half_of_them_are(tmp_path: Path) -> None:
    x = [np.array([0.1, 0.2, 0.6]), np.array([0.3, 0.9]), np.array([0.4, 1.6])]
    y = [np.array([1.0, 3.0, 5.0]), np.array([4.0, 7.0]), np.array([6.0, 9.0])]
    centres, mean, deviation = band(x, y, 0.5)
    assert centres.tolist() == [0.25, 0.75] and mean.tolist() == [4.0, 6.0]
    assert deviation.tolist() == pytest.approx([(8 / 3) ** 0.5, 1.0])
    curve: Curve = gao(3.0, 2.0)
    draw([curve, replace(curve, kind="guard", first_gold=np.arange(30.0))], tmp_path / "curve.png",
         shows_steps=True)  # fmt: skip
    assert (tmp_path / "curve.png").stat().st_size > 5000
