"""Verdicts that are kept in the run directory, so that no answer is scored twice."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult
from rollout_server.rewards.scoring import Scoring
from tests.kit.configs import changed, make_config
from tests.kit.rewards import is_right, named, scored, told


def with_folder(folder: Path) -> Config:
    config = changed(make_config(), run={"dir": folder})
    config.run_dir.mkdir(exist_ok=True)
    return config


def test_a_verdict_on_the_same_input_is_asked_for_once_also_by_the_next_run(tmp_path: Path) -> None:
    asked: list[str] = []

    def count(question: Question, response: str) -> RewardResult:
        asked.append(response)
        return RewardResult(len(response), {"seen": 1.0})

    reward = [named(Reward(function=count, is_function_of_input=True), name="count", identity=b"1")]
    config = with_folder(tmp_path)
    verdicts, counts = scored(reward, "a", "bb", "a", config=config, groups=2)
    assert asked == ["a", "bb"] and [each.reward for each in verdicts] == [1, 2, 1]
    assert verdicts[0].values == {"count": 1, "count/seen": 1}
    assert counts["scoring/count/cached"] == 1 + 3 and counts["scoring/count/calls"] == 2
    scored(reward, "a", config=config)
    assert asked == ["a", "bb"]
    other = [named(reward[0].reward, name="count", identity=b"2")]  # its code or settings have changed
    scored(other, "a", config=config)
    assert asked == ["a", "bb", "a"]
    with closing(sqlite3.connect(config.run_dir / "rewards.sqlite")) as database:
        kept = database.execute("SELECT reward, ground_truth, answer, score FROM verdicts ORDER BY answer").fetchall()
    assert kept == [("count", "4", "a", 1.0), ("count", "4", "a", 1.0), ("count", "4", "bb", 2.0)]


def test_neither_errors_nor_missing_verdicts_are_kept(tmp_path: Path) -> None:
    results = iter([None, 1 / 3])
    reward = [named(Reward(function=lambda *_: next(results), is_function_of_input=True))]
    assert [scored(reward, "a", config=with_folder(tmp_path))[0][0].reward for _ in range(3)] == [None, 1 / 3, 1 / 3]

    outcomes = [1 / 2, ValueError("down")]

    def fails_first(question: Question, response: str) -> float:
        outcome = outcomes.pop()
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    failing = [named(Reward(function=fails_first, is_function_of_input=True), identity=b"other")]
    with pytest.raises(RewardError, match="down"):
        scored(failing, "a", config=with_folder(tmp_path))
    assert scored(failing, "a", config=with_folder(tmp_path))[0][0].reward == 0.5


def test_a_cache_that_can_not_be_used_costs_a_warning(tmp_path: Path) -> None:
    config = with_folder(tmp_path)
    (config.run_dir / "rewards.sqlite").write_text("no database" * 100)
    with pytest.warns(UserWarning, match=r"rewards\.sqlite can't be used: file is not a database\. No verdict is kept"):
        reward = named(Reward(function=is_right, is_function_of_input=True))
        verdicts, _ = scored([reward], "4", config=config, groups=2)
    assert verdicts[0].reward == 1


def test_a_question_that_is_not_plain_is_scored_each_time(tmp_path: Path) -> None:
    asked = []
    reward = named(Reward(function=lambda question, response: asked.append(response) or 1, is_function_of_input=True))

    async def score() -> None:
        scoring = Scoring(with_folder(tmp_path), [reward])
        for _ in range(2):
            await scoring.score(Question(messages=(), ground_truth=object()), [told("a"), told("b")])
        await scoring.aclose()

    asyncio.run(score())
    assert sorted(asked) == ["a", "a", "b", "b"]
