"""The numbers that README.md and docs/results.md quote of committed sweeps."""

from __future__ import annotations

from async_rl.sweeps.report import LAGGING, TRADE_OFF
from async_rl.sweeps.results import read_results
from async_rl.sweeps.settings import WORTH, settings_of
from async_rl.sweeps.statistics import ratio_text
from tests.kit.quotes import RESULTS, text_of


def test_the_documents_quote_what_the_committed_sweeps_say() -> None:
    readme, results, depth = map(text_of, ("README.md", "docs/results.md", "docs/depth.md"))
    rows = {row.staleness.max: row for row in settings_of(read_results(RESULTS / "sweep_cpu"))}
    speeds = {bound: row.values["effective_steps_per_minute"] for bound, row in rows.items()}
    times, _, interval = ratio_text(speeds[1], speeds[0]).partition(" ")
    assert f"a minute teaches {times} times as much (95 % interval {interval[1:-1]})" in readme
    assert f"{times} times as many effective steps a minute as staleness 0 (95 % interval {interval[1:-1]}" in results
    columns = {key: TRADE_OFF[key] for key in WORTH}
    for row in rows.values():
        worth, speed = (row.estimate(key).text(form) for key, (_, form) in columns.items())
        assert f"| {worth} |" in results.replace("*", "") and f"| {speed} |" in results.replace("*", "")
    for sweep in ("sweep_agent_hard", "sweep_agent_hard_7e-4", "sweep_agent_drift"):
        for row in settings_of(read_results(RESULTS / sweep)):
            if sweep == "sweep_agent_drift" and "/" in str(row.staleness):
                continue  # a run of auto lost everything: the page tells its runs apart
            lagging, less = (row.estimate(key).text("{:.3f}") for key in LAGGING)
            assert f"| {row.staleness} | " in depth and f"| {lagging} | {less} |" in depth
    exact = {
        (dict(row.series)["correction"], row.staleness.max): row.estimate("efficiency").text("{:.2f}")
        for row in settings_of(read_results(RESULTS / "exact"))
    }
    names = {"no correction": "none", "coupled": "coupled", "decoupled, token TIS": "decoupled_tis"}
    for name, correction in names.items():
        line = " | ".join(exact[correction, staleness] for staleness in (1, 2, 4, 8, 10))
        assert f"| {name} | {line} |" in results
