"""The numbers that docs/depth.md quotes of the sweeps with depths below several bounds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from async_rl.sweeps.report import LEARNING, TAILS, TRADE_OFF
from async_rl.sweeps.settings import Setting
from async_rl.sweeps.significance import SPEEDS
from async_rl.sweeps.statistics import estimate, p_value
from benchmarks.credited_versions import gains_of
from tests.kit.quotes import RESULTS, ROOT, by_staleness, text_of

GRID = [f"{depth}/{bound}" for bound in (3, 4, 8) for depth in ("1", "1.25", "1.5", "2")]


def over_depths(rows: dict[str, Setting], bound: int, key: str) -> list[float]:
    """The mean over the four depths below a bound, for each seed."""
    values = [rows[name].values[key] for name in GRID if name.endswith(f"/{bound}")]
    return [float(np.mean(each)) for each in zip(*values, strict=True)]


def over_bounds(rows: dict[str, Setting], depth: str, key: str) -> list[float]:
    """A depth less the bound of the same number, in the mean over three larger bounds, for each seed."""
    below = zip(*(rows[f"{depth}/{bound}"].values[key] for bound in (3, 4, 8)), strict=True)
    return [float(np.mean(each)) - bound for each, bound in zip(below, rows[depth].values[key], strict=True)]


def seconds_of_reward(rows: dict[str, Setting]) -> str:
    """The time over which the reward of the policy is averaged, the same in all runs."""
    (seconds,) = {value for row in rows.values() for value in row.values["policy_seconds"]}
    return f"{seconds:.1f}"


@pytest.mark.parametrize(
    ("sweep", "others"),
    [("sweep_agent_grid", []), ("sweep_agent_sglang", ["auto/8"]), ("sweep_cpu_grid", ["auto/8"])],
)
def test_the_grids_of_depths_and_bounds_are_quoted_as_they_were_measured(sweep: str, others: list[str]) -> None:
    rows, page = by_staleness(sweep), (ROOT / "docs" / "depth.md").read_text()
    assert set(rows) == {"0", "1", "2", "4", "8", *GRID, *others}
    assert {len(row.runs) for row in rows.values()} == {5}
    formats = TRADE_OFF | LEARNING | TAILS | SPEEDS
    keys = (
        "steps_per_minute", "staleness_mean", "waited_for_late", "kl_p95", "is_variance_p95", "policy_reward",
        "effective_steps_sampled", "accuracy_end",
    )  # fmt: skip
    for name, row in rows.items():
        cells = [row.estimate(key).text(formats[key][1]) for key in keys]
        assert f"| {' | '.join([name, *cells])} |" in page
    for name, row in rows.items():
        assert row.estimate("staleness_max").mean <= row.staleness.max, name


def assert_gains_are_quoted(rows: dict[str, Setting], page: str) -> tuple[list[float], str, str]:
    """The page has what depths 1 and 2 gain over these bounds.

    Returns how many times the steps of bound 1 depth 1 makes, below each larger bound, and the texts of both gains in
    reward.
    """
    speed = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    times = {depth: [speed[f"{depth}/{bound}"] / speed[depth] for bound in (3, 4, 8)] for depth in ("1", "2")}
    assert "makes {:.2f}, {:.2f} and {:.2f} times as many steps as bound 1;".format(*times["1"]) in page
    assert "makes {:.2f}, {:.2f} and {:.2f} times as many as bound 2;".format(*times["2"]) in page
    more = {depth: over_bounds(rows, depth, "policy_reward") for depth in ("1", "2")}
    one, two = (estimate(more[depth]).text("{:.3f}") for depth in ("1", "2"))
    p_one, p_two = (float(stats.ttest_1samp(more[depth], 0.0).pvalue) for depth in ("1", "2"))
    assert f"is higher by {one} (p = {p_one:.4f}), for each in" in page and f"higher by {two} (p = {p_two:.2f})" in page
    for bound in (3, 4, 8):
        pairs = zip(rows[f"1/{bound}"].values["policy_reward"], rows["1"].values["policy_reward"], strict=True)
        assert all(depth > full for depth, full in pairs)
    ends = [estimate(over_bounds(rows, depth, "accuracy_end")).text("{:.3f}") for depth in ("1", "2")]
    assert f"the accuracy at the end by {ends[0]}." in page and f"the accuracy by {ends[1]}." in page
    return times["1"], one, two


def assert_tails_are_quoted(rows: dict[str, Setting], page: str, weight: str) -> None:
    """The page has the differences of the tails at depths 1 and 2; none is beyond 2.3 of its errors."""
    for key, form, text in (
        ("kl_p95", "{:.3f}", "differs by {} and {}, the largest"),
        ("kl_largest", "{:.3f}", "the largest KL by {} and {}"),
        ("is_variance_p95", "{:.3f}", "weights' variance by {} and {}"), ("is_weight_largest", "{:.0f}", weight),
    ):  # fmt: skip
        found = [estimate(over_bounds(rows, depth, key)) for depth in ("1", "2")]
        assert text.format(*(each.text(form) for each in found)) in page
        assert all(each.mean < 2.3 * each.error for each in found)


def test_what_the_grid_of_depths_and_bounds_says_is_what_is_written() -> None:
    rows, page, readme = by_staleness("sweep_agent_grid"), text_of("docs/depth.md"), text_of("README.md")
    times, one, two = assert_gains_are_quoted(rows, page)
    assert f"makes {min(times):.2f} to {max(times):.2f} times as many steps" in readme
    assert f"over the first {seconds_of_reward(rows)} s is higher by {one}; at that of bound 2 by {two}." in readme
    assert_tails_are_quoted(rows, page, "the largest weight by {} and {}.")
    for key, form, text in (
        ("steps_per_minute", "{:.1f}", "bound 8 makes {} more steps a minute than bound 3"),
        ("policy_reward", "{:.3f}", "has {} more reward, each in 5 of 5 seeds"),
        ("kl_p95", "{:.3f}", "The KL's 95th percentile differs by {},"),
        ("is_weight_largest", "{:.0f}", "the largest weight by {}."),
    ):  # fmt: skip
        pairs = zip(over_depths(rows, 8, key), over_depths(rows, 3, key), strict=True)
        differences = [large - small for large, small in pairs]
        assert text.format(estimate(differences).text(form)) in page
        assert "5 of 5" not in text or min(differences) > 0
    eight, near, keys = rows["8"], rows["1.5/8"], ("policy_reward", "accuracy_end")
    reward, end = ([row.estimate(key).text("{:.3f}") for row in (eight, near)] for key in keys)
    p_reward, p_end = (p_value(near.values[key], eight.values[key]) for key in keys)
    assert f"over the time, {reward[0]}, at seven versions" in page and f"accuracy of {end[0]}. `1.5/8` has" in page
    assert f"`1.5/8` has {reward[1]} (p = {p_reward:.2f}) and ends at {end[1]} (p = {p_end:.2f})." in page
    assert max(rows, key=lambda name: rows[name].estimate("policy_reward").mean) == "8"
    assert max(rows, key=lambda name: rows[name].estimate("effective_steps_sampled").mean) == "2/8"


def test_what_the_grid_with_sglang_says_is_what_is_written() -> None:
    rows, page, readme = by_staleness("sweep_agent_sglang"), text_of("docs/depth.md"), text_of("README.md")
    _, one, two = assert_gains_are_quoted(rows, page)
    seconds = seconds_of_reward(rows)
    assert f"With SGLang, over the first {seconds} s of 45, it is by {one} and {two}." in readme
    largest = max(rows["2/8"].values["is_weight_largest"])
    step = f"one run of `2/8` has a step with a weight of {largest:,.0f}."
    assert_tails_are_quoted(rows, page, f"the largest weight by {{}} and {{}}: {step}")
    faster, better = (
        estimate([a - b for a, b in zip(over_depths(rows, 8, key), over_depths(rows, 3, key), strict=True)])
        for key in ("steps_per_minute", "policy_reward")
    )
    assert f"bound 8 makes {faster.text('{:.1f}')} more steps a minute than bound 3, and" in page
    assert f"has {better.text('{:.3f}')} more reward. -" in page
    assert all(row.estimate("rollout").mean > 0.92 for name, row in rows.items() if name != "0")


def test_what_the_grid_of_equal_lengths_says_is_what_is_written() -> None:
    rows, page = by_staleness("sweep_cpu_grid"), text_of("docs/depth.md")
    page = page[page.index("### Answers of about equal length"):]
    assert f"is that of the policy in the first {seconds_of_reward(rows)} s):" in page
    speed = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    most = max(speed.values()) / speed["1"] - 1
    said = f"Bound 0 makes {speed['0'] / speed['1']:.2f} times the steps of bound 1"
    assert f"{said}, which no other setting exceeds by more than {100 * most:.0f} %," in page
    reward, end = ({name: row.values[key] for name, row in rows.items()} for key in ("policy_reward", "accuracy_end"))
    assert {max("01248", key=lambda name: np.mean(of[name])) for of in (reward, end)} == {"1"}
    p_end, p_reward = ({name: p_value(of["1"], of[name]) for name in "0248"} for of in (end, reward))
    assert f"bound 1 is above 0 (p = {p_end['0']:.4f}) and 2 (p = {p_end['2']:.2f}); by" in page
    assert f"above 0 (p = {p_reward['0']:.4f}) and 8 (p = {p_reward['8']:.3f}), and with 2 within" in page
    assert f"with 2 within the errors (p = {p_reward['2']:.2f})." in page
    assert f"run fell to an accuracy of {min(end['4']):.2f}, nothing" in page and p_end["4"] > 0.2 < p_reward["4"]
    gained = ([over_bounds(rows, depth, key) for depth in ("1", "2")] for key in ("policy_reward", "accuracy_end"))
    texts = [" and ".join(estimate(each).text("{:.3f}") for each in pair) for pair in gained]
    assert f"differ from the bounds 1 and 2 by {texts[0]} in reward, by {texts[1]} in accuracy." in page
    assert all(row.estimate("waited_for_late").mean < 0.001 for row in rows.values())
    assert_tails_are_quoted(rows, page, "the largest weight by {} and {}.")


def test_what_auto_does_with_answers_of_equal_length_is_what_is_written() -> None:
    rows, page = by_staleness("sweep_cpu_grid"), text_of("docs/depth.md")
    auto, one = rows["auto/8"], rows["1"]
    pairs = zip(auto.values["steps_per_minute"], one.values["steps_per_minute"], strict=True)
    staleness = auto.values["staleness_mean"]
    assert sum(each < 1.15 for each in staleness) == 4 and max(staleness) > 1.2
    said = f"It makes {estimate([a / b for a, b in pairs]).text('{:.2f}')} times the steps of bound 1"
    assert f"{said} at a mean staleness of {np.mean(staleness):.2f}, and has" in page
    reward, end = (auto.estimate(key).text("{:.3f}") for key in ("policy_reward", "accuracy_end"))
    p = {name: p_value(auto.values["policy_reward"], row.values["policy_reward"]) for name, row in rows.items()}
    assert f"has {reward} of reward: above the bounds 0 and 8 (p < 0.001) and 2 (p = {p['2']:.2f})," in page
    assert max(p["0"], p["8"]) < 0.001 and min(p["1"], p["4"]) > 0.15
    last = p_value(auto.values["accuracy_end"], one.values["accuracy_end"])
    assert f"end, {end}, is that of bound 1 within the errors (p = {last:.2f})." in page


def test_what_auto_does_with_sglang_is_what_is_written() -> None:
    rows, page = by_staleness("sweep_agent_sglang"), text_of("docs/depth.md")
    reward = {name: row.values["policy_reward"] for name, row in rows.items()}
    means = {name: estimate(values) for name, values in reward.items()}
    four, near, auto = (means[name].text("{:.3f}") for name in ("4", "2/4", "auto/8"))
    assert max("01248", key=lambda name: means[name].mean) == "4" and f"has the highest reward**, {four}: above" in page
    assert all(p_value(reward["4"], reward[name]) < 0.001 for name in "01")
    two, eight = (p_value(reward["4"], reward[name]) for name in "28")
    assert f"and 2 (p = {two:.2f}), and with that of 8 within the errors (p = {eight:.2f})." in page
    assert f"as much at half of its staleness, {near}." in page
    staleness = rows["auto/8"].estimate("staleness_mean").mean
    above = p_value(reward["auto/8"], reward["1"])
    assert f"has {auto} at a mean staleness of {staleness:.2f}: above bound 1 (p = {above:.4f})" in page
    others = [p_value(reward["auto/8"], reward[name]) for name in "248"]
    said = "the bounds 2, 4 and 8 (p = {:.2f}, {:.2f} and {:.2f}) and of the depths 1.25 to 2 below"
    assert said.format(*others) in page
    assert all(p_value(reward["auto/8"], reward[f"{depth}/8"]) > 0.05 for depth in ("1.25", "1.5", "2"))
    pairs = zip(rows["auto/8"].values["steps_per_minute"], rows["8"].values["steps_per_minute"], strict=True)
    times, waits = estimate([a / b for a, b in pairs]), rows["auto/8"].estimate("waited_for_late").mean
    assert f"It makes {times.text('{:.2f}')} times as many steps as bound 8, and waits for" in page
    assert f"waits for late groups {100 * waits:.1f} % of the time." in page


def test_what_the_version_for_which_an_answer_counts_changes_is_what_is_written() -> None:
    """The rewards of the journals, counted for the oldest version, are those of the metrics."""
    rows, page, metrics = by_staleness("sweep_agent_sglang"), text_of("docs/depth.md"), text_of("docs/metrics.md")
    rewards = json.loads((RESULTS / "sweep_agent_sglang" / "credited_versions.json").read_text())
    assert rewards.keys() == rows.keys()
    for name, row in rows.items():
        assert rewards[name]["oldest"] == pytest.approx(row.values["policy_reward"], abs=1e-5)
    means = {name: {way: float(np.mean(row[way])) for way in row} for name, row in rewards.items()}
    texts = [f"{means[name]['newest']:.3f}" for name in ("8", "4", "2/8")]
    olds = [f"{means[name]['oldest']:.3f}" for name in ("8", "4", "2/8")]
    assert "`8` has {} then in place of {}, `4` {} of {}, `2/8` {} of {}, and".format(
        *(text for pair in zip(texts, olds, strict=True) for text in pair)
    ) in metrics  # fmt: skip
    assert abs(means["1"]["newest"] - means["1"]["oldest"]) < 0.002 and "`1` the same within 0.002;" in metrics
    assert f"none has more than {max(row['oldest'] - row['middle'] for row in means.values()):.3f} less." in metrics
    one, two = (gains_of(rewards)[depth]["newest"] for depth in ("1", "2"))
    gained = f"{estimate(two).text('{:.3f}')} (p = {stats.ttest_1samp(two, 0.0).pvalue:.2f})"
    assert f"for the newest, depth 2 gains {gained} and depth 1 {estimate(one).text('{:.3f}')} (" in page
