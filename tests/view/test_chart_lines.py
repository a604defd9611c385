"""The lines of the charts: which metrics they show, and under which names."""

from __future__ import annotations

from async_rl.view.charts import EPISODE_CHARTS, staleness_charts
from rollout_server.episodes.episode import ENDS


def test_all_ways_in_which_episodes_end_are_shown() -> None:
    (chart,) = (chart for chart in EPISODE_CHARTS if chart.title == "How episodes end")
    assert {key for key, _ in chart.keys} == {f"episode/end_{end}" for end in ENDS}


def test_the_last_line_by_staleness_is_of_all_older_answers_too() -> None:
    keys = ["by_staleness/9/reward", "by_staleness/10/reward", "staleness/episodes_9", "staleness/episodes_13"]
    (chart,) = staleness_charts(keys)
    assert chart.keys == (
        ("by_staleness/9/reward", "staleness 9"), ("by_staleness/10/reward", "staleness 10 or more"),
    )  # fmt: skip
