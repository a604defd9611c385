"""The numbers that docs/depth.md quotes of committed sweeps and simulations."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.config.data import AUTO_START
from async_rl.sweeps.report import LAGGING, LEARNING, TAILS, TRADE_OFF
from async_rl.sweeps.results import read_results
from async_rl.sweeps.settings import settings_of
from async_rl.sweeps.statistics import estimate, p_value
from tests.kit.quotes import RESULTS, ROOT, by_staleness, lag_of, text_of


def test_the_table_at_the_head_shows_auto_beside_the_best_bound_of_each_sweep() -> None:
    page = text_of("docs/depth.md")

    def rewards(sweep: str, key: str) -> dict[str, str]:
        return {name: row.estimate(key).text("{:.3f}") for name, row in by_staleness(sweep).items()}

    short = rewards("sweep_cpu_auto_1_25", "policy_reward")
    assert f"| 1: {short['1']} | - | {short['auto/8']} (1.25) |" in page
    quiet = rewards("sweep_cpu_grid", "policy_reward")
    assert f"| 1: {quiet['1']} | 1.25 and 1.5: {quiet['1.25/8']}, {quiet['1.5/8']} | {quiet['auto/8']} (1.25) |" in page
    two, three = (rewards(sweep, "reward_less_lag") for sweep in ("sweep_agent_auto", "sweep_agent_auto_3"))
    assert f"| 8: {two['8']}, {three['8']} | - | {two['auto/8']}, {three['auto/8']} (1) |" in page
    rough, slow = (rewards(sweep, "reward_less_lag") for sweep in ("sweep_agent_hard", "sweep_agent_hard_7e-4"))
    assert f"| 4: {rough['4']} | 1.25: {rough['1.25/8']} | {rough['auto/8']} (1) |" in page
    assert f"| 2 of 1 and 2: {slow['2']} | 2: {slow['2/8']} | {slow['auto/8']} (1) |" in page
    assert f"| 2: {rewards('sweep_agent_drift', 'reward_less_lag')['2']} | - | 0.851, without a run" in page
    late, grid = rewards("sweep_agent_drift_120", "policy_reward"), rewards("sweep_agent_grid", "policy_reward")
    assert f"| 8: {grid['8']} | 1.5 and 2: {grid['1.5/8']}, {grid['2/8']} | - |" in page
    assert f"| 4: {late['4']} | - | {late['auto/8']} (1.25) |" in page
    sglang = rewards("sweep_agent_sglang", "policy_reward")
    assert f"| 4: {sglang['4']} | 2: {sglang['2/8']} | {sglang['auto/8']} (1.25) |" in page
    for each, best in ((two, "8"), (three, "8"), (rough, "4"), (late, "4"), (short, "1"), (quiet, "1"), (sglang, "4")):
        assert max((name for name in each if "/" not in name), key=each.__getitem__) == best
    pairs = [
        (auto, bound) for sweep in ("sweep_agent_auto", "sweep_agent_auto_3") for auto, bound in zip(
            *(by_staleness(sweep)[name].values["reward_less_lag"] for name in ("auto/8", "8")), strict=True
        )
    ]  # fmt: skip
    behind = estimate([bound - auto for auto, bound in pairs])
    assert all(auto < bound for auto, bound in pairs) and len(pairs) == 5
    assert f"below that of bound 8 in 5 of 5 seeds, by {behind.text('{:.3f}')}" in page


def test_the_documents_count_the_sweeps_in_which_auto_learned_less() -> None:
    sweeps = {folder.name: by_staleness(folder.name) for folder in RESULTS.glob("sweep_*/")}
    less = []
    for rows in (rows for rows in sweeps.values() if "auto/8" in rows):
        key = "policy_reward" if rows["auto/8"].has("policy_reward") else "reward_less_lag"
        best = max((name for name in rows if "/" not in name), key=lambda name: rows[name].estimate(key).mean)
        auto, bound = (rows[name].values[key] for name in ("auto/8", best))
        less.append(np.mean(auto) < np.mean(bound))
        assert less[-1] or p_value(auto, bound) > 0.05
    assert (len(less), sum(less)) == (10, 6)
    said = "it has learned more than the best bound in none beyond the errors, and less in the mean in six"
    assert f"in ten sweeps {said}" in text_of("README.md")
    assert f"In the ten sweeps with `auto` {said}." in text_of("docs/depth.md")


def test_the_documents_take_the_lag_off_the_rewards_that_they_compare() -> None:
    """The lag is staleness times the seconds of a step; the seconds of a run are those of its last evaluation."""
    page = text_of("docs/depth.md")
    hard, slow = by_staleness("sweep_agent_hard"), by_staleness("sweep_agent_hard_7e-4")
    for row in (hard["auto/8"], slow["2"]):
        for number, run in enumerate(row.runs):
            of = {key: values[number] for key, values in row.values.items()}
            lag_s, seconds = of["staleness_mean"] * 60 / of["steps_per_minute"], run.evals[-1][1]
            gained = of["accuracy_end"] - of["accuracy_start"]
            assert of["reward_less_lag"] == pytest.approx(of["reward_over_time"] + lag_s / seconds * gained)
    lags = [lag_of(hard[name]) for name in ("4", "1")]
    lagged = "at bound 4 of the harder episodes by {:.1f} s of the minute, at bound 1 by {:.1f} s"
    assert lagged.format(*lags) in page
    lagging, less = (
        [p_value(hard["auto/8"].values[key], hard[bound].values[key]) for bound in ("1", "2", "4")] for key in LAGGING
    )
    assert "with p = {:.2f}, {:.3f} and {:.3f}. Less the lag p is ".format(*lagging) in page
    assert "Less the lag p is {:.2f}, {:.2f} and {:.2f}: that `auto` learns more".format(*less) in page
    texts = []
    for pair in (("1.25/8", "1"), ("2/8", "2")):
        depth, bound = (slow[name].values["reward_less_lag"] for name in pair)
        texts.append(f"{np.mean(depth):.3f} against {np.mean(bound):.3f} (p = {p_value(depth, bound):.1g})")
    assert f"less the lag {texts[0]} and {texts[1]}." in page
    auto = slow["auto/8"].estimate("steps_per_minute").mean
    fewer = [1 - auto / slow[depth].estimate("steps_per_minute").mean for depth in ("1.25/8", "2/8")]
    assert "`auto` made {:.1f} and {:.1f} % fewer steps".format(*(100 * each for each in fewer)) in page


def test_the_documents_say_what_pairs_of_equal_seeds_say_of_the_worst_steps() -> None:
    page = text_of("docs/depth.md")
    hard, slow = by_staleness("sweep_agent_hard"), by_staleness("sweep_agent_hard_7e-4")
    higher = 0
    for rows in (hard, slow):
        for depth, bound in (("1.25/8", "1"), ("2/8", "2")):
            assert [run.labels["seed"] for run in rows[depth].runs] == [run.labels["seed"] for run in rows[bound].runs]
            higher += sum(
                a > b for key in ("kl_largest", "is_weight_largest")
                for a, b in zip(rows[depth].values[key], rows[bound].values[key], strict=True)
            )
    assert f"they are higher at the depth in {higher} of 40 pairs" in page
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


def test_the_page_of_staleness_says_in_how_many_seeds_a_depth_ends_above_its_bound() -> None:
    def above(sweep: str, depth: str, bound: str) -> str:
        rows = by_staleness(sweep)
        pairs = list(zip(*(rows[name].values["accuracy_end"] for name in (depth, bound)), strict=True))
        return f"{sum(a > b for a, b in pairs)} of {len(pairs)}"

    sweeps = ("sweep_agent_hard_7e-4", "sweep_agent_grid", "sweep_agent_sglang")
    near, two = ([above(sweep, *pair) for sweep in sweeps] for pair in (("1.25/8", "1"), ("2/8", "2")))
    page = text_of("docs/staleness.md")
    assert above("sweep_agent_hard", "1.25/8", "1") == "0 of 5" and "ended below bound 1 in 5 of 5 seeds" in page
    assert f"and `2/8` above bound 2 in {above('sweep_agent_hard', '2/8', '2')}. At 7e-4" in page
    assert "ended above bound 1 in {}, {} and {} seeds of three sweeps,".format(*near) in page
    assert "and `2/8` above bound 2 in {}, {} and {}. So".format(*two) in page


def test_the_tails_of_depths_and_bounds_are_those_of_the_sweeps() -> None:
    page = text_of("docs/depth.md")
    most = 0.0
    for rate, sweep in (("1.4e-3", "sweep_agent_hard"), ("7e-4", "sweep_agent_hard_7e-4")):
        rows, cells = by_staleness(sweep), []
        for depth, bound in (("1.25/8", "1"), ("2/8", "2")):
            variance = [rows[name].estimate("is_variance_p95") for name in (depth, bound)]
            cells += [each.text("{:.2g}") for each in variance]
            for pair in (variance, [rows[name].estimate("kl_p95") for name in (depth, bound)]):
                most = max(most, (pair[0].mean - pair[1].mean) / np.hypot(pair[0].error, pair[1].error))
        assert f"| variance of the weights, 95th percentile, {rate} | {' | '.join(cells)} |" in page
    assert most < 2  # within the errors


def test_where_old_tokens_make_the_largest_kl_is_what_the_committed_steps_say() -> None:
    """The columns: run, depth/bound, step, staleness, KL, share of it from old tokens, share of tokens, KL without."""
    page = text_of("docs/depth.md")
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
    shares, largest, without = ([step[i] for step in failing] for i in (3, 2, 4))
    assert f"In {len(failing)} of these {steps} steps they have {min(shares):.0f} to {max(shares):.0f} % of it" in page
    assert f"All {len(failing)} are at the higher rate" in page
    assert {sweep for sweep, *_ in many} == {"sweep_agent_hard"}
    text = f"more than 22 % of their tokens are that old, as in only {len(many) - len(failing)} of the other"
    assert f"{text} {steps - len(failing)}." in page
    text = f"the KL would be {min(without):.2f} to {max(without):.2f}"
    assert f"{text} in place of {min(largest):.2f} to {max(largest):.2f}" in page
    assert max(of_kl for _, _, _, of_kl, _ in few) < 50
    rows = by_staleness("sweep_agent_hard")
    speeds = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    made = {name: int(sum(run.evals[-1][0] for run in rows[name].runs)) for name in ("1.25/8", "2/8")}
    lost = {name: sum(step[1] == name for step in failing) for name in made}
    assert " and ".join(f"{lost[name]} of {made[name]}" for name in made) + ", taught nothing" in page
    full = [speeds["1.25/8"] / speeds["1"], speeds["2/8"] / speeds["2"]]
    left = [ratio * (1 - lost[name] / made[name]) for ratio, name in zip(full, made, strict=True)]
    assert f"make {left[0]:.2f} times as many steps as bound 1 in place of {full[0]:.2f}" in page
    assert f"`2/8` {left[1]:.2f} times as many as bound 2 in place of {full[1]:.2f}" in page


def test_where_durations_change_the_documents_say_that_auto_is_behind() -> None:
    results, rows = text_of("docs/depth.md"), by_staleness("sweep_agent_drift")
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
    results = (ROOT / "docs" / "depth.md").read_text()
    formats = TRADE_OFF | LEARNING | TAILS
    keys = ("steps_per_minute", "learner", "staleness_mean", "waited_for_late", "kl_p95", "policy_reward")
    for name, row in rows.items():
        cells = [row.estimate(key).text(formats[key][1]) for key in (*keys, "accuracy_end")]
        assert f"| {' | '.join([name, *cells])} |" in results
    results = text_of("docs/depth.md")
    rewards = {name: row.values["policy_reward"] for name, row in rows.items()}
    of_four = [p_value(rewards["4"], rewards[name]) for name in ("1", "2", "8")]
    assert "p is {:.3f} against 1 and {:.2f} against 2, and {:.2f} against 8".format(*of_four) in results
    assert f"`auto` is above bound 1 (p = {p_value(rewards['auto/8'], rewards['1']):.2f})" in results
    assert f"with one run at {min(rewards['auto/8']):.3f}." in results
    assert "({:.2f} and {:.2f})".format(*sorted(rewards["8"], reverse=True)[-2:]) in results
    speed = {name: row.estimate("steps_per_minute").mean for name, row in rows.items()}
    assert f"at {speed['auto/8'] / speed['1']:.1f} times as many steps" in results
    effective = [rows[name].estimate("effective_steps_sampled").text("{:.1f}") for name in ("8", "auto/8", "4")]
    assert "({} a minute; `auto` {}, bound 4 {})".format(*effective) in results
    assert max(rewards, key=lambda name: float(np.mean(rewards[name]))) == "4"


def test_the_documents_quote_what_a_step_size_by_ess_does_to_the_largest_steps() -> None:
    results = (ROOT / "docs" / "depth.md").read_text()
    page = " ".join(results.split())
    found = settings_of(read_results(RESULTS / "sweep_agent_hard_ess"))
    rows = {(str(row.staleness), dict(row.series)["learner.lr_by_ess"]): row for row in found}
    formats = TRADE_OFF | LEARNING | TAILS
    keys = ("steps_per_minute", "kl_median", "kl_p95", "kl_largest", "is_variance_p95", "is_weight_largest")
    for names, row in rows.items():
        cells = [row.estimate(key).text(formats[key][1]) for key in (*keys, "policy_reward", "accuracy_end")]
        assert f"| {' | '.join([*names, *cells])} |" in results
    tamed, wild, bound = (rows[name].estimate for name in (("2/8", "token"), ("2/8", "off"), ("2", "off")))
    tame, rough = (of("kl_largest").text("{:.2f}") for of in (tamed, wild))
    hard = {name: row.estimate("kl_largest").text("{:.2f}") for name, row in by_staleness("sweep_agent_hard").items()}
    assert f"{tame}, without it {rough}, and {hard['2/8']} in the sweep above; bound 2 has" in page
    assert f"bound 2 has {bound('kl_largest').text('{:.2f}')} and {hard['2']}. Five seeds" in page
    fewer = 1 - tamed("steps_per_minute").mean / wild("steps_per_minute").mean
    assert f"It costs {fewer:.0%} of the steps".replace("%", " %") in page
    with_it, without, two = (rows[name].values for name in (("2/8", "token"), ("2/8", "off"), ("2", "off")))
    for text, key, other in (
        ("(p = {:.2f} against itself without)", "kl_largest", without),
        ("of bound 2 (p = {:.2f})", "accuracy_end", two), ("is above it (p = {:.2f})", "policy_reward", two),
    ):  # fmt: skip
        assert text.format(p_value(with_it[key], other[key])) in page


def test_the_page_of_depths_quotes_the_table_of_short_simulated_runs() -> None:
    table = (ROOT / "tests" / "results" / "simulated_depths.md").read_text().partition("Short runs")[2]
    with_cost, _, without_cost = table.partition("With exponent 0:")

    def column(text: str) -> dict[str, float]:
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        at = lines[0].index(f"auto {AUTO_START:g}")
        return {line[0]: float(line[at]) for line in lines[2:]}

    costly, free = column(with_cost), column(without_cost)
    page = text_of("docs/depth.md")
    text = f"`auto` learns {costly['mean']:.3f} times as fast as the best of the depths 1, 1.25, 1.5 and 2"
    assert f"{text}, and {free['mean']:.3f} times where staleness costs nothing" in page
    assert f"nothing; at worst {min(free.values()):.3f} times, where tools come during the run" in page
    assert min(free, key=free.__getitem__) == "switch: short, tools, sensitive"
