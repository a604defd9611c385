"""The curve of proxy and gold against KL, of runs whose numbers are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.config.loading import load_config
from async_rl.storage.guard_events import GuardEvent, add_guard_event
from benchmarks.over_optimisation import (
    FREE,
    GUARDED,
    KINDS,
    ROOT,
    Curve,
    band,
    curve_table,
    draw,
    fit,
    guard_table,
    is_over,
    kept,
    mean_table,
    numbers_of,
    read_curve,
    read_curves,
    summary,
)

E = float(np.e)


def gao(a: float, b: float, kind: str = FREE, seed: int = 0, start: float = -1.0) -> Curve:
    """A run whose gold is exactly d (a - b log d) above its start, and whose proxy rises."""
    kl = np.linspace(0.0, 36.0, 200)
    d = np.sqrt(np.maximum(kl, 1e-6))
    gold = d * (a - b * np.log(d)) + start
    gold[0] = start
    return Curve(kind, seed, kl, proxy=d, gold=gold)


def guarded(curve: Curve, version: int, **values: object) -> Curve:
    """The same run, which its guard has ended with this version."""
    cut = {name: getattr(curve, name)[:version] for name in ("kl", "proxy", "gold")}
    return replace(curve, kind=GUARDED, ends_at=version, **cut, **values)  # type: ignore[arg-type]


def test_the_form_of_gao_is_found_again_also_in_runs_with_other_starts() -> None:
    one, other = gao(3.0, 2.0), gao(3.0, 2.0, seed=1, start=4.0)
    assert fit([one]) == pytest.approx((3.0, 2.0, 1.0), abs=0.02)
    assert fit([one, other]) == pytest.approx((3.0, 2.0, 1.0), abs=0.02)
    assert fit([one, gao(1.0, 0.0)])[0] == pytest.approx(2.0, abs=0.02)
    assert fit([one, gao(1.0, 0.0)])[2] < 0.9


def test_a_run_that_falls_is_told_from_one_that_does_not() -> None:
    fallen, sound = gao(3.0, 2.0), gao(2.0, 0.1, "ppo.yaml")
    assert fallen.kept < 0.5 < sound.kept == pytest.approx(1.0)
    lines = summary([fallen, sound]).splitlines()
    assert len(lines) == 2
    assert "no penalty, 1 seeds" in lines[0] and "in 1 it lost more than half of its gain" in lines[0]
    assert "It ended above its start in 1; in 0 it lost" in lines[1]
    rows = curve_table([fallen, sound]).rows
    assert [row[0] for row in rows] == ["no penalty", "ppo.yaml"]
    # d (3 - 2 log d) is largest at log d = 1/2, where it is 2 d
    assert float(rows[0][3]) == pytest.approx(2 * E**0.5 - 1, abs=0.02) and rows[0][6] == "2.71"
    assert not guard_table([fallen, sound]).rows


def test_the_guard_is_measured_by_the_gain_of_the_run_without_it() -> None:
    curves = []
    for seed, version in enumerate((16, 51)):  # KL 2.71, the peak; KL 9.05, d = 3.01
        free = gao(3.0, 2.0, seed=seed)
        curves += [free, guarded(free, version, rollbacks=((40, 15), (35, 15)))]
    shares = [kept(curves[0], curves[1]), kept(curves[2], curves[3])]
    assert shares == pytest.approx([1.0, 3.01 * (3 - 2 * np.log(3.01)) / (2 * E**0.5)], abs=0.01)
    assert "The guard kept 0.86 of the gain of the run without it in the mean" in summary(curves)
    assert summary(curves).endswith("at least 0.9 in 1 of 2 seeds.")
    first, second = guard_table(curves).rows
    assert first == ["0", "-1.00", "2.30", "-4.50", "2.30", "1.00", "40 to 15, 35 to 15", "16"]
    assert second[-1] == "51"
    rows = mean_table(curves).rows
    assert rows[0][:5] == ["no penalty", "2", "-1.00 ± 0.00", "2.30 ± 0.00", "-4.50 ± 0.00"]
    assert rows[0][-3:] == ["3.00", "2.00", "1.00"]
    assert rows[1][4] == "1.85 ± 0.45"


def test_the_mean_of_the_seeds_is_drawn_where_at_least_half_of_them_are(tmp_path: Path) -> None:
    x = [np.array([0.1, 0.2, 0.6]), np.array([0.3, 0.9]), np.array([0.4, 1.6])]
    y = [np.array([1.0, 3.0, 5.0]), np.array([4.0, 7.0]), np.array([6.0, 9.0])]
    centres, mean, deviation = band(x, y, 0.5)
    assert centres.tolist() == [0.25, 0.75] and mean.tolist() == [4.0, 6.0]
    assert deviation.tolist() == pytest.approx([(8 / 3) ** 0.5, 1.0])
    draw([gao(3.0, 2.0), guarded(gao(3.0, 2.0), 30)], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def write_run(folder: Path) -> None:
    lines = [{"step": 0, "eval/reward": 1.0}]
    lines += [{"step": n, "reward/mean": 2.0 * n, "reward/rule_mean": 1.0, "kl/reference": 0.1,
               "response/length_mean": 5.0 * n} for n in range(1, 8)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_curve_is_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    curve = read_curve(tmp_path, "ppo.yaml", 3)
    assert curve.kl.tolist() == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 2.75, 3.0])  # means over up to five steps
    assert curve.proxy.tolist() == pytest.approx([4.0, 5.0, 6.0, 8.0, 10.0, 11.0, 12.0])
    assert curve.gold.tolist() == pytest.approx([1.0] * 7)
    assert (curve.rollbacks, curve.ends_at) == ((), 0)


def test_a_curve_ends_with_the_version_that_the_guard_keeps_and_is_the_same_when_read_again(tmp_path: Path) -> None:
    write_run(tmp_path)
    for kind, version, back_to in (("rollback", 6, 3), ("resumed", 6, 3), ("stop", 7, 4)):
        add_guard_event(tmp_path, GuardEvent(kind=kind, version=version, back_to=back_to))  # type: ignore[arg-type]
    curve = read_curve(tmp_path, GUARDED, 3)
    assert curve.kl.tolist() == pytest.approx([1.0, 1.25, 1.5, 2.0])
    assert (curve.rollbacks, curve.ends_at) == (((6, 3),), 4)
    (tmp_path / "curves.json").write_text(json.dumps({"curves": [numbers_of(curve)]}))
    (again,) = read_curves(tmp_path / "curves.json")
    assert numbers_of(again) == numbers_of(curve) and again.rollbacks == curve.rollbacks


def test_a_run_that_a_rollback_has_ended_is_not_over(tmp_path: Path) -> None:
    assert not is_over(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 30, "rolled_back": 15}')
    assert not is_over(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 120}')
    assert is_over(tmp_path)


def test_the_guard_of_the_benchmark_has_its_own_limits_and_makes_smaller_steps() -> None:
    config = load_config(ROOT / "configs" / "rlhf" / "ppo.yaml", KINDS[GUARDED])
    default = load_config(ROOT / "configs" / "rlhf" / "ppo.yaml").guard
    assert replace(config.guard, action="auto", tighten="kl") == default
    assert (config.guard_action, config.guard.tighten, config.eval.size) == ("rollback", "lr", 64)
