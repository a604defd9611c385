"""The page has the charts of a run's rewards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from async_rl.view.answers import sibling
from async_rl.view.charts import reward_charts, staleness_charts
from async_rl.view.run_files import RunFiles
from async_rl.view.token_texts import TokenTexts
from tests.kit.view.run_dirs import text_group

KEYS = ("reward/mean", "reward/std", "reward/right", "reward/judge", "reward/judge/tokens", "time/step_s")


def test_the_overview_has_a_chart_of_the_named_rewards_and_one_of_their_metrics() -> None:
    scores, metrics = reward_charts(KEYS)
    assert scores.keys == (("reward/judge", "judge"), ("reward/right", "right"))
    assert metrics.keys == (("reward/judge/tokens", "judge/tokens"),)
    assert reward_charts(("reward/mean", "reward/std", "reward/rule_mean")) == []


def test_each_named_reward_has_a_chart_by_staleness() -> None:
    by_staleness = [f"by_staleness/{n}/reward/right" for n in (0, 2)]
    charts = staleness_charts([*KEYS, *by_staleness, "staleness/episodes_0", "staleness/episodes_2"])
    (chart,) = (chart for chart in charts if chart.title == "Reward right by staleness")
    assert chart.keys == tuple((key, f"staleness {key.split('/')[1]}") for key in by_staleness)


def test_an_answer_shows_its_reward_by_the_names_it_is_made_of(tmp_path: Path) -> None:
    group = text_group(5, ["right"], version=3)
    row = dataclasses.replace(group.rows[0], rewards={"right": 1.0, "right/tests": 3.0})
    found = sibling(dataclasses.replace(group, rows=(row,)), 0, TokenTexts(RunFiles(tmp_path)))
    assert found["rewards"] == {"right": 1.0, "right/tests": 3.0}
