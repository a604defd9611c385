"""The numbers that README.md and docs/ quote of committed sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_rl.config.data import AUTO_START
from async_rl.sweeps.report import LAGGING, LEARNING, TAILS, TRADE_OFF
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


def test_the_tails_of_depths_and_bounds_are_those_of_the_sweeps() -> None:
    page = text_of("docs/staleness.md")
    most = 0.0
    for rate, sweep in (("1.4e-3", "sweep_agent_hard"), ("7e-4", "sweep_agent_hard_7e-4")):
        rows, cells = by_staleness(sweep), []
        for depth, bound in (("1.25/8", "1"), ("2/8", "2")):
            variance = [rows[name].estimate("is_variance_p95") for name in (depth, bound)]
            cells.append(" / ".join(each.text("{:.2g}") for each in variance))
            for pair in (variance, [rows[name].estimate("kl_p95") for name in (depth, bound)]):
                most = max(most, (pair[0].mean - pair[1].mean) / np.hypot(pair[0].error, pair[1].error))
        assert f"| {rate}, variance of the weights, 95th percentile | {cells[0]} | {cells[1]} |" in page
    assert most < 2  # within the errors


def test_where_old_tokens_make_the_largest_kl_is_what_the_committed_steps_say() -> None:
    """The columns: run, depth/bound, step, staleness, KL, share of it from old tokens, share of tokens, KL without."""
    page = text_of("docs/staleness.md")
    many: list[tuple[str, str, float, float, float]] = []
    few: list[tuple[str, str, float, float, float]] = []
    for sweep in ("sweep_agent_hard", "sweep_agent_hard_7e-4"):
        for line in (RESULTS / sweep / "kl_spikes.md").read_text().splitlines():
            cells = line.strip("| ").split(" | ")
            if len(cells) == 8 and cells[1] in ("1.25/8", "2/8") and cells[2].isdigit():
                kl, of_kl, of_tokens, without = (float(cell.rstrip("%")) for cell in cells[4:])
                (many if of_tokens > 22 else few).append((sweep, cells[1], kl, of_kl, without))
    failing = [step for step in many if step[3] > 50]
    steps = len(many) + len(few)
    assert f"{len(many)} of these {steps} steps, all at the higher rate, and in {len(failing)} of them" in page
    assert {sweep for sweep, *_ in many} == {"sweep_agent_hard"}
    shares, largest, without = ([step[i] for step in failing] for i in (3, 2, 4))
    text = f"have {min(shares):.0f} to {max(shares):.0f} % of the KL; without them it would be"
    text += f" {min(without):.2f} to {max(without):.2f} in place of {min(largest):.2f} to {max(largest):.2f}"
    assert text in page
    others = sorted((of_kl, kl) for _, _, kl, of_kl, _ in few)
    assert f"the other {len(few)} steps they have at most {others[-2][0]:.0f} % of it, but for one" in page
    assert others[-1][1] < 0.06
    rows = by_staleness("sweep_agent_hard")
    speeds = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    made = {name: int(sum(run.evals[-1][0] for run in rows[name].runs)) for name in ("1.25/8", "2/8")}
    lost = {name: sum(step[1] == name for step in failing) for name in made}
    assert " and ".join(f"{lost[name]} of {made[name]}" for name in made) + ", taught nothing" in page
    full = [speeds["1.25/8"] / speeds["1"], speeds["2/8"] / speeds["2"]]
    left = [ratio * (1 - lost[name] / made[name]) for ratio, name in zip(full, made, strict=True)]
    text = "make {:.2f} times as many steps as bound 1, and depth 2 {:.2f} times as many as bound 2, in place of"
    assert f"{text.format(*left)} {full[0]:.2f} and {full[1]:.2f}" in page
    rewards = [rows[name].estimate("reward_less_lag").text("{:.3f}") for name in ("1.25/8", "1", "2/8", "2")]
    assert "is {} at 1.25 and {} at bound 1, {} at 2 and {} at bound 2".format(*rewards) in page


def test_where_durations_change_the_documents_say_that_auto_is_behind() -> None:
    results, rows = text_of("docs/results.md"), by_staleness("sweep_agent_drift")
    less, end = ({name: row.values[key] for name, row in rows.items()} for key in ("reward_less_lag", "accuracy_end"))
    kept = [i for i, reward in enumerate(less["auto/8"]) if reward > 0.1]
    assert len(kept) == 2
    auto, ends = ([values["auto/8"][i] for i in kept] for values in (less, end))
    ranges = [f"({min(less[name]):.3f} to {max(less[name]):.3f})" for name in ("2", "1")]
    text = f"they have {auto[0]:.3f} and {auto[1]:.3f}, below every run of bound 2 {ranges[0]} and above every run of"
    assert f"{text} bound 1 {ranges[1]}" in results
    assert max(auto) < min(less["2"]) and min(auto) > max(less["1"])
    two, one = (rows[name].estimate("accuracy_end").text("{:.3f}") for name in ("2", "1"))
    text = f"at the end, {ends[0]:.3f} and {ends[1]:.3f}, are below bound 2 with {two} and bound 1 with {one}, of"
    assert f"{text} which no run has less than {min(end['1']):.3f}" in results
    assert max(ends) < min(end["1"]) < min(end["2"])


def test_the_documents_quote_the_sweep_whose_durations_change_for_80_s() -> None:
    rows = by_staleness("sweep_agent_drift_120")
    results = (ROOT / "docs" / "results.md").read_text()
    formats = TRADE_OFF | LEARNING | TAILS
    keys = ("steps_per_minute", "learner", "staleness_mean", "waited_for_late", "kl_p95", "policy_reward")
    for name, row in rows.items():
        cells = [row.estimate(key).text(formats[key][1]) for key in (*keys, "accuracy_end")]
        assert f"| {' | '.join([name, *cells])} |" in results
    results = text_of("docs/results.md")
    rewards = {name: row.values["policy_reward"] for name, row in rows.items()}
    of_four = [p_value(rewards["4"], rewards[name]) for name in ("1", "2", "8")]
    assert "p is {:.3f} against 1 and {:.2f} against 2, and {:.2f} against 8".format(*of_four) in results
    assert f"it is above bound 1 (p = {p_value(rewards['auto/8'], rewards['1']):.2f})" in results
    assert f"with one run at {min(rewards['auto/8']):.3f}." in results
    assert "({:.2f} and {:.2f})".format(*sorted(rewards["8"], reverse=True)[-2:]) in results
    speed = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    assert f"at {speed['auto/8'] / speed['1']:.1f} times as many steps" in results
    staleness = [rows[name].estimate("staleness_mean").mean for name in ("auto/8", "4")]
    text = "at a mean staleness of {:.1f} in place of the {:.1f} of the best, bound 4"
    assert text.format(*staleness) in text_of("docs/staleness.md")
    assert max(rewards, key=lambda name: float(np.mean(rewards[name]))) == "4"


def test_the_documents_quote_what_a_step_size_by_ess_does_to_the_largest_steps() -> None:
    results, staleness = (ROOT / "docs" / "results.md").read_text(), text_of("docs/staleness.md")
    found = settings_of(read_results(RESULTS / "sweep_agent_hard_ess"))
    rows = {(str(row.staleness), dict(row.series)["learner.lr_by_ess"]): row for row in found}
    formats = TRADE_OFF | LEARNING | TAILS
    keys = ("steps_per_minute", "kl_median", "kl_p95", "kl_largest", "is_variance_p95", "is_weight_largest")
    for names, row in rows.items():
        cells = [row.estimate(key).text(formats[key][1]) for key in (*keys, "policy_reward", "accuracy_end")]
        assert f"| {' | '.join([*names, *cells])} |" in results
    tamed, wild, bound = (rows[name].estimate for name in (("2/8", "token"), ("2/8", "off"), ("2", "off")))
    for key, text in {
        "kl_largest": "of 2 below 8 is {} with it, {} without, and {} at bound 2",
        "kl_p95": "the 95th percentile is {}, {} and {}.",
    }.items():
        assert text.format(*(of(key).text("{:.2f}") for of in (tamed, wild, bound))) in staleness
    weights = [of("is_weight_largest").text("{:.0f}") for of in (tamed, bound)]
    assert "The largest weight, {}, stays above the {} of bound 2".format(*weights) in staleness
    fewer = 1 - tamed("steps_per_minute").mean / wild("steps_per_minute").mean
    assert f"for {fewer:.0%} of".replace("%", " %") in text_of("docs/results.md")
    for key in ("kl_median", "kl_p95", "kl_largest"):
        assert tamed(key).mean < bound(key).mean
    tame, rough, two = (rows[name].values for name in (("2/8", "token"), ("2/8", "off"), ("2", "off")))
    for text, key, other in (
        ("the steps (p = {:.2f})", "steps_per_minute", rough), ("p is {:.2f} for the largest KL", "kl_largest", rough),
        ("of bound 2 (p = {:.2f})", "accuracy_end", two), ("is above it (p = {:.2f})", "policy_reward", two),
    ):  # fmt: skip
        assert text.format(p_value(tame[key], other[key])) in text_of("docs/results.md")


def test_the_start_of_auto_is_explained_by_the_table_of_short_runs() -> None:
    table = (ROOT / "tests" / "results" / "simulated_depths.md").read_text().partition("Short runs")[2]
    mean = next(line for line in table.splitlines() if line.startswith("| mean |"))
    one, best, more = mean.strip("| ").split(" | ")[-3:]
    text = f"learns {best} times as fast as the best of four constant depths if it begins with {AUTO_START:g}"
    assert f"{text}, {one} times with 1 and {more} times with 1.5" in text_of("docs/staleness.md")
    without_cost = table.partition("With exponent 0:")[2].splitlines()
    names = next(line for line in without_cost if line.startswith("| world |")).strip("| ").split(" | ")
    losses: list[tuple[float, dict[str, str]]] = []
    for line in without_cost:
        cells = line.strip("| ").split(" | ")
        if len(cells) == len(names) and cells[0] not in ("world", "mean") and "---" not in line:
            values = dict(zip(names, cells, strict=True))
            losses.append((1 - float(values["auto 1.25"]) / float(values["depth 1.5"]), values))
    loss, values = max(losses, key=lambda each: each[0])
    text = f"up to {100 * loss:.1f} % to a constant depth of 1.5 ({values['auto 1.25']} against {values['depth 1.5']}"
    assert text in text_of("docs/staleness.md")
