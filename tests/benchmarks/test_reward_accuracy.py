"""The accuracy of reward models against that of plain transformers: its table, and what the page quotes of it."""

from __future__ import annotations

import json
import math
import statistics

from benchmarks.reward_accuracy import LOOPS, OURS, SAME, SeedOutcome, accuracy_table
from tests.kit.documents import DOCUMENTS, ROOT

SEEDS = json.loads((ROOT / "benchmarks" / "results" / "reward_accuracy.json").read_text())["seeds"]


def accuracies(name: str) -> list[float]:
    return [seed["accuracies"][name] for seed in SEEDS]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def test_our_reward_models_are_as_accurate_as_those_of_plain_transformers() -> None:
    assert len(SEEDS) >= 5 and all(seed["held_out"] > 900 for seed in SEEDS)
    both = zip(accuracies(OURS), accuracies(SAME.name), strict=True)
    mean, error = mean_and_error([ours - plain for ours, plain in both])
    assert abs(mean) <= max(2 * error, 1e-9)  # which is the last bits of accuracies that are equal


def test_the_page_quotes_the_accuracies_that_were_measured() -> None:
    text = " ".join(DOCUMENTS["docs/rlhf.md"].split())
    ours, same, *others = (
        "{:.3f} ± {:.3f}".format(*mean_and_error(accuracies(name))) for name in (OURS, *(loop.name for loop in LOOPS))
    )
    assert f"are right on {ours} of about 1000 held-out comparisons each, and those of the plain loop on {same}" in text
    head, schedule, both = others
    assert f"comes to {head}, a rate that falls" in text and f"last fifth to {schedule}, and both to {both}." in text


def test_a_difference_is_that_of_the_same_seed() -> None:
    made = [{OURS: ours} | {loop.name: ours - 0.1 for loop in LOOPS} for ours in (0.7, 0.9)]
    found = [SeedOutcome(seed, 300, 1000, each, 0.4, 3.0, 0.1, (1.0, 1.0)) for seed, each in enumerate(made)]
    *_, means, differences = accuracy_table(found).rows
    assert means[1] == "0.800 ± 0.100" and differences[2:] == ["0.100 ± 0.000"] * len(LOOPS)
