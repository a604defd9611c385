"""The curve of proxy and gold against KL, of runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.over_optimisation import Curve, curve_table, draw, fit, read_curve, summary, write_curves


def gao(a: float, b: float, kind: str = "no penalty", seed: int = 0) -> Curve:
    """A run whose gold is exactly d (a - b log d) above its start, and whose proxy rises."""
    kl = np.linspace(0.0, 36.0, 50)
    d = np.sqrt(np.maximum(kl, 1e-6))
    return Curve(kind, seed, kl, proxy=d, gold=d * (a - b * np.log(d)) - 1.0)


def test_the_form_of_gao_is_found_again() -> None:
    a, b, r2 = fit(gao(3.0, 2.0))
    assert (a, b, r2) == (pytest.approx(3.0, abs=0.1), pytest.approx(2.0, abs=0.1), pytest.approx(1.0, abs=1e-3))


def test_a_run_that_falls_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    fallen, sound = gao(3.0, 2.0), gao(2.0, 0.1, "ppo.yaml")
    assert fallen.kept < 0.5 < sound.kept == pytest.approx(1.0)
    lines = summary([fallen, sound]).splitlines()
    assert "no penalty, 1 seeds" in lines[0] and "in 1 it lost more than half of its gain" in lines[0]
    assert "It ended above its start in 1; in 0 it lost" in lines[1]
    rows = curve_table([fallen, sound]).rows
    assert [row[0] for row in rows] == ["no penalty", "ppo.yaml"]
    assert float(rows[0][3]) == pytest.approx(3.0 * np.sqrt(2.718) - 2 * np.sqrt(2.718) * 0.5 - 1, abs=0.02)
    write_curves([fallen], tmp_path / "curve.csv")
    assert (tmp_path / "curve.csv").read_text().splitlines()[1].startswith("no penalty,0,1,0.0000,")
    draw([fallen, sound], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_a_curve_is_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/reward": 1.0}]
    lines += [{"step": n, "reward/mean": 2.0 * n, "reward/rule_mean": 1.0, "kl/reference": 0.1,
               "response/length_mean": 5.0 * n} for n in range(1, 8)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = read_curve(tmp_path, "ppo.yaml", 3)
    assert curve.kl.tolist() == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 2.75, 3.0])  # means over up to five steps
    assert curve.proxy.tolist() == pytest.approx([4.0, 5.0, 6.0, 8.0, 10.0, 11.0, 12.0])
    assert curve.gold.tolist() == pytest.approx([1.0] * 7)
