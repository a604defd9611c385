"""The numbers that README.md and docs/ quote of committed sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.config.data import AUTO_START
from async_rl.sweeps.report import LAGGING, TRADE_OFF
from async_rl.sweeps.results import read_results
from async_rl.sweeps.settings import WORTH, Setting, settings_of
from async_rl.sweeps.statistics import p_value, ratio_text

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


def test_the_documents_quote_what_the_committed_sweeps_say() -> None:
    readme, results = map(text_of, ("README.md", "docs/results.md"))
    rows = {row.staleness.max: row for row in settings_of(read_results(RESULTS / "sweep_cpu"))}
    speeds = {bound: row.values["effective_steps_per_minute"] for bound, row in rows.items()}
    times, _, interval = ratio_text(speeds[1], speeds[0]).partition(" ")
    assert f"a minute teaches {times} times as much (95 % interval {interval[1:-1]})" in readme
    assert f"{times} times as many effective steps a minute as staleness 0 (95 % interval {interval[1:-1]}" in results
    columns = {key: TRADE_OFF[key] for key in WORTH}
    for row in rows.values():
        worth, speed = (row.estimate(key).text(form) for key, (_, form) in columns.items())
        assert f"| {worth} |" in results.replace("*", "") and f"| {speed} |" in results.replace("*", "")
    hard = by_staleness("sweep_agent_hard")
    auto, four = (
        [hard[name].estimate(key).mean for key in ("steps_per_minute", "staleness_mean")] for name in ("auto/8", "4")
    )
    assert f"({auto[0]:.1f} and {four[0]:.1f}) at a mean staleness of {auto[1]:.2f} in place of {four[1]:.2f}" in readme
    rewards = {name: row.estimate("reward_less_lag") for name, row in hard.items()}
    best = max((each for name, each in rewards.items() if "/" not in name), key=lambda each: each.mean)
    auto_reward = rewards["auto/8"].text("{:.3f}")
    assert f"is about {auto_reward}; that of the best bound is about {best.text('{:.3f}')}" in readme
    for sweep in ("sweep_agent_hard", "sweep_agent_hard_7e-4", "sweep_agent_drift"):
        for row in settings_of(read_results(RESULTS / sweep)):
            if sweep == "sweep_agent_drift" and "/" in str(row.staleness):
                continue  # a run of auto lost everything: the page tells its runs apart
            lagging, less = (row.estimate(key).text("{:.3f}") for key in LAGGING)
            assert f"| {row.staleness} | " in results and f"| {lagging} | {less} |" in results
    exact = {
        (dict(row.series)["correction"], row.staleness.max): row.estimate("efficiency").text("{:.2f}")
        for row in settings_of(read_results(RESULTS / "exact"))
    }
    names = {"no correction": "none", "coupled": "coupled", "decoupled, token TIS": "decoupled_tis"}
    for name, correction in names.items():
        line = " | ".join(exact[correction, staleness] for staleness in (1, 2, 4, 8, 10))
        assert f"| {name} | {line} |" in results


def test_the_documents_take_the_lag_off_the_rewards_that_they_compare() -> None:
    """The lag is staleness times the seconds of a step; the seconds of a run are those of its last evaluation."""
    results = text_of("docs/results.md")
    hard, slow = by_staleness("sweep_agent_hard"), by_staleness("sweep_agent_hard_7e-4")
    for row in (hard["auto/8"], slow["2"]):
        for number, run in enumerate(row.runs):
            of = {key: values[number] for key, values in row.values.items()}
            lag_s, seconds = of["staleness_mean"] * 60 / of["steps_per_minute"], run.evals[-1][1]
            gained = of["accuracy_end"] - of["accuracy_start"]
            assert of["reward_less_lag"] == pytest.approx(of["reward_over_time"] + lag_s / seconds * gained)
    lags = [lag_of(hard[name]) for name in ("4", "1", "auto/8")]
    lagged = "at bound 4 by {:.1f} s of the minute, at bound 1 by {:.1f} s, with `auto` by {:.1f} s"
    assert lagged.format(*lags) in results
    lagging, less = (
        [p_value(hard["auto/8"].values[key], hard[bound].values[key]) for bound in ("1", "2", "4")] for key in LAGGING
    )
    assert "with p = {:.2f}, {:.3f} and {:.3f}. Less the lag it has ".format(*lagging) in results
    assert "and p is {:.2f}, {:.2f} and {:.2f}: that `auto` learns more".format(*less) in results
    texts = []
    for pair in (("1.25/8", "1"), ("2/8", "2")):
        depth, bound = (slow[name].values["reward_less_lag"] for name in pair)
        texts.append(f"{np.mean(depth):.3f} against {np.mean(bound):.3f} (p = {p_value(depth, bound):.1g})")
    assert f"less the lag {texts[0]} and {texts[1]}." in results
    auto = slow["auto/8"].estimate("steps_per_minute").mean
    fewer = [1 - auto / slow[depth].estimate("steps_per_minute").mean for depth in ("1.25/8", "2/8")]
    assert "`auto` made {:.1f} and {:.1f} % fewer steps".format(*(100 * each for each in fewer)) in results


def test_the_documents_say_what_pairs_of_equal_seeds_say_of_the_worst_steps() -> None:
    page = text_of("docs/staleness.md")
    hard, slow = by_staleness("sweep_agent_hard"), by_staleness("sweep_agent_hard_7e-4")
    higher = 0
    for rows in (hard, slow):
        for depth, bound in (("1.25/8", "1"), ("2/8", "2")):
            assert [run.labels["seed"] for run in rows[depth].runs] == [run.labels["seed"] for run in rows[bound].runs]
            higher += sum(
                a > b for key in ("kl_largest", "is_weight_largest")
                for a, b in zip(rows[depth].values[key], rows[bound].values[key], strict=True)
            )
    assert f"they are higher below 8 in {higher} of 40 pairs" in page
    quoted = (
        (slow, "2/8", "2", "is_weight_largest", 1, "({:.1f} and {:.1f} in the mean)"),
        (hard, "1.25/8", "1", "kl_largest", 1, "({:.3f} and {:.3f})"),
        (hard, "1.25/8", "1", "accuracy_end", -1, ""), (slow, "1.25/8", "1", "accuracy_end", 1, ""),
    )  # fmt: skip
    for rows, depth, bound, key, sign, form in quoted:
        pairs = list(zip(rows[depth].values[key], rows[bound].values[key], strict=True))
        assert len(pairs) == 5 and all(sign * (a - b) > 0 for a, b in pairs)
        a, b = (rows[name].estimate(key) for name in (depth, bound))
        assert (form.format(a.mean, b.mean) or f"({a.text('{:.3f}')} and {b.text('{:.3f}')})") in page
    more = [
        rows[depth].estimate("steps_per_minute").mean / rows[bound].estimate("steps_per_minute").mean
        for rows, depth, bound in ((slow, "2/8", "2"), (hard, "1.25/8", "1"))
    ]
    assert f"maximum there, {more[0]:.2f} and {more[1]:.1f} times as many" in page


def test_the_start_of_auto_is_explained_by_the_table_of_short_runs() -> None:
    table = (ROOT / "tests" / "results" / "simulated_depths.md").read_text().partition("Short runs")[2]
    mean = next(line for line in table.splitlines() if line.startswith("| mean |"))
    one, best, more = mean.strip("| ").split(" | ")[-3:]
    text = f"learns {best} times as fast as the best of four constant depths if it begins with {AUTO_START:g}"
    assert f"{text}, {one} times with 1 and {more} times with 1.5" in text_of("docs/staleness.md")
