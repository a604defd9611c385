"""The numbers that docs/depth.md quotes of what may tame the largest steps at a depth of 2."""

from __future__ import annotations

from async_rl.sweeps.report import LEARNING, TAILS, TRADE_OFF
from async_rl.sweeps.results import read_results
from async_rl.sweeps.settings import Setting, settings_of
from async_rl.sweeps.statistics import estimate, p_value
from tests.kit.quotes import RESULTS, by_staleness, text_of

RULES = {
    "the default": "{cap: 2.0}", "`cap: 1.0`": "{cap: 1.0}", "`kind: sequence_tis`": "{kind: sequence_tis}",
    "`masks.m2po: 0.04`": "{masks: {m2po: 0.04}}",
}  # fmt: skip
"""The rules of the page, and the values of algorithm.correction that they are in the sweep."""


def by_axis(sweep: str, axis: str) -> dict[str, Setting]:
    return {dict(row.series)[axis]: row for row in settings_of(read_results(RESULTS / sweep))}


def cells(row: Setting) -> str:
    formats = TRADE_OFF | LEARNING | TAILS
    keys = (
        "steps_per_minute", "kl_median", "kl_p95", "kl_largest", "is_variance_p95", "is_weight_largest",
        "policy_reward", "accuracy_end",
    )  # fmt: skip
    return " | ".join(row.estimate(key).text(formats[key][1]) for key in keys)


def test_what_may_tame_the_largest_steps_is_quoted_as_it_was_measured() -> None:
    page = text_of("docs/depth.md")
    rules = by_axis("sweep_agent_hard_tamers", "algorithm.correction")
    late = by_axis("sweep_agent_hard_mask", "staleness.late")
    assert {len(row.runs) for row in (*rules.values(), *late.values())} == {5}
    for said, value in RULES.items():
        assert f"| 2/8 | {said} | {cells(rules[value])} |" in page
    for value, row in late.items():
        assert f"| 2/4 | `staleness.late: {value}` | {cells(row)} |" in page
    seconds = [f"{row.values['policy_seconds'][0]:.1f}" for row in (rules["{cap: 2.0}"], late["wait"])]
    assert "that of the policy in the first {} and {} s): a cap".format(*seconds) in page


def test_no_rule_tames_the_largest_steps_as_is_written() -> None:
    page = text_of("docs/depth.md")
    rules = by_axis("sweep_agent_hard_tamers", "algorithm.correction")
    late = by_axis("sweep_agent_hard_mask", "staleness.late")
    pairs = [(rules[value], rules["{cap: 2.0}"]) for value in list(RULES.values())[1:]] + [(late["mask"], late["wait"])]
    found = []
    for rule, default in pairs:
        for key in ("kl_largest", "is_weight_largest"):
            assert rule.estimate(key).mean > default.estimate(key).mean
            found.append(p_value(rule.values[key], default.values[key]))
    assert f"none beyond the errors (p from {min(found):.2f} to {max(found):.2f})." in page
    times = late["mask"].estimate("steps_per_minute").mean / late["wait"].estimate("steps_per_minute").mean
    assert f"The mask of late tokens makes {times:.2f} times the steps of waiting" in page


def test_the_tails_of_all_runs_at_depth_2_and_at_bound_2_are_as_written() -> None:
    page = text_of("docs/depth.md")
    hard, tamed = by_staleness("sweep_agent_hard"), by_axis("sweep_agent_hard_tamers", "algorithm.correction")
    by_ess = settings_of(read_results(RESULTS / "sweep_agent_hard_ess"))
    plain = {str(row.staleness): row for row in by_ess if dict(row.series)["learner.lr_by_ess"] == "off"}
    runs = ([hard["2/8"], plain["2/8"], tamed["{cap: 2.0}"]], [hard["2"], plain["2"]])
    assert [sum(len(row.runs) for row in rows) for rows in runs] == [15, 10]
    for key, form, text, shows_p in (
        ("kl_p95", "{:.2f}", "the 95th percentile of the KL is {} and {},", False),
        ("kl_largest", "{:.2f}", "the largest KL {} and {}", True),
        ("is_variance_p95", "{:.1f}", "the 95th percentile of the variance {} and {},", False),
        ("is_weight_largest", "{:.0f}", "the largest weight {} and {}", True),
        ("accuracy_end", "{:.3f}", "the accuracy at the end {} and {}", True),
    ):
        depth, bound = ([value for row in rows for value in row.values[key]] for rows in runs)
        said = text.format(*(estimate(values).text(form) for values in (depth, bound)))
        assert said + (f" (p = {p_value(depth, bound):.2f})" if shows_p else "") in page
