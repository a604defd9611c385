"""Rewards of answers, episodes and groups: what they may return, their sum, their limits, and their cache."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import Config
from async_rl.base.config.section import section
from async_rl.base.errors import ConfigError, RewardError
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult, read_verdict
from rollout_server.rewards.scoring import NamedReward, Verdict, open_rewards
from tests.kit.rewards import is_right, named, of, scored


async def length(question: Question, response: str) -> RewardResult:
    await asyncio.sleep(0)
    return RewardResult(len(response) / 10, {"letters": len(response)})


def test_the_reward_is_the_weighted_sum_and_each_score_and_metric_is_named() -> None:
    rewards = [named(is_right, name="right"), named(length, name="length", weight=-0.5)]
    verdicts, _ = scored(rewards, "4", "three")
    assert verdicts == [
        Verdict(reward=1 - 0.05, values={"right": 1, "length": 0.1, "length/letters": 1}),
        Verdict(reward=0 - 0.25, values={"right": 0, "length": 0.5, "length/letters": 5}),
    ]


def test_numbers_besides_the_score_may_have_weights_too() -> None:
    def parts(question: Question, response: str) -> dict[str, float]:
        return {"score": float(response == "4"), "format": 0.5, "short": 1.0}

    weighted = named(parts, name="parts", weight=2.0, weights={"format": 0.2, "short": -1.0})
    (verdict,), _ = scored([weighted], "4")
    assert verdict.reward == pytest.approx(2 + 0.1 - 1)
    assert verdict.values == {"parts": 1, "parts/format": 0.5, "parts/short": 1}
    with pytest.raises(RewardError, match=r"parts .*steps"):
        scored([named(parts, name="parts", weights={"format": 0.2, "steps": 1.0})], "4")
    silent = named(lambda *_: None, name="parts", weight=0, weights={"format": 0.2})
    assert scored([silent], "4")[0][0].reward is None


def test_an_answer_without_a_verdict_has_no_reward_and_says_why() -> None:
    def judge(question: Question, response: str) -> RewardResult | float | None:
        return {"a": None, "b": RewardResult(None, reason="the reply had no score")}.get(response, 0.5)

    verdicts, counts = scored([named(is_right, name="right"), named(judge, name="judge")], "a", "b", "c")
    assert [each.reward for each in verdicts] == [None, None, 0.5] and "judge" in verdicts[0].reason
    assert verdicts[1].reason.endswith("the reply had no score") and verdicts[2].reason == ""
    assert counts["scoring/judge/no_verdict"] == 2 and counts["scoring/right/no_verdict"] == 0
    assert counts["scoring/judge/calls"] == 3 and counts["scoring/judge/group_s"] >= 0


def test_a_reward_of_weight_zero_is_logged_and_costs_no_answer_its_verdict() -> None:
    gold = [named(is_right, name="right"), named(lambda question, answer: None if answer else 1, name="gold", weight=0)]
    verdicts, _ = scored(gold, "4", "")
    assert verdicts == [Verdict(reward=1, values={"right": 1}), Verdict(reward=0, values={"right": 0, "gold": 1})]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_of_a_group_sees_all_its_answers(is_async: bool) -> None:
    def rank(question: Question, episodes: list[Episode]) -> list[float | None]:
        order = sorted(episodes, key=lambda each: len(each.answer))
        return [None if not each.answer else order.index(each) for each in episodes]

    async def rank_later(question: Question, episodes: list[Episode]) -> list[float | None]:
        return rank(question, episodes)

    verdicts, counts = scored([named(Reward(function=rank_later if is_async else rank, of="group"))], "abc", "", "a")
    assert [each.reward for each in verdicts] == [2, None, 1]
    assert counts["scoring/task/calls"] == 1


@pytest.mark.parametrize(("value", "named_by"), [
    (float("nan"), "nan"), ("1.0", "'1.0'"), (RewardResult(float("nan")), "nan"), (-(10**400), "float"),
    ({"reward": 1.0, "acc": 1.0}, "{'reward'"),  # which is the score?
    ({"score": 1.0, "steps": [1, 2]}, "steps"), ({"score": 1, "far": 10**5000}, "far"),
    (RewardResult(1.0, {f"{i}": 1 for i in range(65)}), "65"),
], ids=range(8))  # fmt: skip
def test_a_score_or_a_metric_that_is_no_finite_number_is_refused(value: Any, named_by: str) -> None:
    with pytest.raises(RewardError, match=named_by):
        read_verdict(value)


def test_a_mapping_with_a_score_is_a_verdict_with_metrics_as_verl_has_it() -> None:
    # verl's math_dapo: {"score": reward, "acc": correct, "pred": the answer that was found}
    assert read_verdict({"score": np.float32(-1), "acc": False, "pred": "42"}) == RewardResult(-1.0, {"acc": 0.0})
    assert read_verdict({"score": True}) == RewardResult(1.0)
    assert read_verdict({"score": None, "pred": None}) == RewardResult(None)
    verdicts, _ = scored([named(lambda question, answer: {"score": 0.5, "acc": answer == "4"})], "4", "5")
    assert [each.values["task/acc"] for each in verdicts] == [1, 0]
    assert [each.reward for each in verdicts] == [0.5, 0.5]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_hangs_or_raises_fails_its_group_with_its_name(is_async: bool) -> None:
    hung = threading.Event()

    async def hang(question: Question, response: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    slow = hang if is_async else lambda question, response: float(hung.wait(60))
    with pytest.raises(RewardError, match=r"^slow: .*task\.rewards\[1\]\.timeout_s"):
        scored([named(is_right), named(slow, name="slow", timeout_s=0.1, limit="task.rewards[1].timeout_s")], "4")
    hung.set()

    async def fail(question: Question, response: str) -> float:
        return 1 / 0

    with pytest.raises(RewardError, match=r"^bad: ZeroDivisionError: .*test_scoring\.py"):
        scored([named(fail if is_async else lambda question, response: 1 / 0, name="bad")], "4")


def test_no_more_calls_run_at_once_than_the_reward_allows() -> None:
    running, most = 0, 0

    async def count(question: Question, response: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    scored([named(count, concurrency=3)], *"abcdefgh")
    assert most == 3


def test_answers_of_a_group_are_scored_by_all_rewards_at_the_same_time() -> None:
    together = threading.Barrier(20, timeout=20)
    waits = [named(lambda *_: float(together.wait() >= 0), name=str(number), timeout_s=30.0) for number in range(5)]
    assert [each.reward for each in scored(waits, *"abcd")[0]] == [5] * 4


def opened(config: Config) -> tuple[NamedReward, ...]:
    return open_rewards(config, SimpleNamespace(verify=is_right))


@section("task.rewards.params")
class Short:
    """The settings of SHORT."""

    limit: int = 10


def is_short(question: Question, response: str, settings: Short) -> float:
    return float(len(response) <= settings.limit)


SHORT = Reward(function=is_short, settings=Short)
RANK = Reward(function=lambda question, episodes: [0.0] * len(episodes), of="group")


def test_a_reward_gets_the_settings_that_its_entry_declares() -> None:
    rewards = opened(of({"reward": f"{__name__}:SHORT", "params": {"limit": 2}}, {"reward": f"{__name__}:is_right"}))
    verdicts, _ = scored(list(rewards), "4", "four")
    assert [each.reward for each in verdicts] == [2, 0]
    with pytest.raises(ConfigError, match=r"task\.rewards\[0\]\.params\.limits"):
        opened(of({"reward": f"{__name__}:SHORT", "params": {"limits": 2}}))
    with pytest.raises(ConfigError, match=r"^task\.rewards\.params\.limit .*'x'"):
        opened(of({"reward": f"{__name__}:SHORT", "params": {"limit": "x"}}))


def test_a_reward_of_a_group_has_no_greedy_baseline() -> None:
    remax = of({"reward": f"{__name__}:RANK"}, algorithm={"advantage": "remax"})
    with pytest.raises(ConfigError, match=r"^task\.rewards\[0\]\.reward .*algorithm\.advantage remax"):
        opened(remax)
    assert opened(of({"reward": f"{__name__}:RANK"}))[0].reward is RANK
