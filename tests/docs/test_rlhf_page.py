"""The page on the three stages quotes what was measured of over-optimisation, and what the guard made of it."""

from __future__ import annotations

import re

from benchmarks.over_optimisation import WITH_GOLD, gone_back, kept, read_curves
from benchmarks.reward_curves import by_kind, fit, mean_table
from tests.kit.documents import DOCUMENTS, ROOT

PAGE = DOCUMENTS["docs/rlhf.md"]
WORDS = " ".join(PAGE.split())
CURVES = read_curves(ROOT / "benchmarks" / "results" / "over_optimisation.json")
KINDS = by_kind(CURVES)


def test_the_table_of_trainings_is_that_of_the_results() -> None:
    for row in mean_table(CURVES).rows:
        assert f"| {' | '.join(row[index] for index in (0, 2, 3, 4, 6, 8))} |" in PAGE


def test_gold_falls_in_as_many_seeds_and_on_the_curve_that_the_page_says() -> None:
    free = KINDS["no penalty"]
    fell = sum(each.kept < 0.5 and each.proxy[-1] > each.proxy[each.peak] for each in free)
    assert f"in {fell} of {len(free)} seeds of {max(len(each.gold) for each in free)} steps" in WORDS
    a, b, r_squared = fit(free)
    assert f"= {a:.2f} and β = {b:.2f} fit all runs without a penalty with R² = {r_squared:.2f}" in WORDS


def test_the_guard_went_back_and_kept_as_often_as_the_page_says() -> None:
    free, weak = ([each for each in KINDS[kind] if each.rollbacks] for kind in list(KINDS)[1:3])
    seeds = len(KINDS["no penalty"])
    keep = [sum(kept(each) >= 0.9 for each in back) for back in (free, weak)]
    right = sum(gone_back(each, each.troubles[WITH_GOLD][1]) >= 0.9 for each in free)
    assert f"sent {len(free)} of {seeds} runs without a penalty back, {right} of them to a version with" in WORDS
    assert f"{keep[0]} of the {seeds} ended with at least nine tenths of the most that they had gained" in WORDS
    assert f"{sum(bool(each.ends_at) for each in free)} by its word and the others at the last step" in WORDS
    assert f"it sent {len(weak)} of {seeds} back, {keep[1]} of which ended with that" in WORDS


def test_the_penalty_ends_highest_at_the_least_kl() -> None:
    """The page says so of ppo.yaml."""
    rows = {row[0]: [float(re.split(" ±", cell)[0]) for cell in (row[4], row[8])] for row in mean_table(CURVES).rows}
    assert max(rows, key=lambda kind: rows[kind][0]) == min(rows, key=lambda kind: rows[kind][1]) == "ppo.yaml"
