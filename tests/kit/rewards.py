"""Rewards of a run, and what they say of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from async_rl.base.config import Config, RewardConfig
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.episodes.episode import Episode
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward
from rollout_server.rewards.scoring import NamedReward, Scoring, Verdict
from tests.kit.configs import make_config

QUESTION = Question(messages=({"role": "user", "content": "2 + 2?"},), ground_truth="4")


def named(reward: Reward | Callable[..., Any], **values: Any) -> NamedReward:
    """One of several rewards of a run: an entry, or a function of an answer."""
    entry = reward if isinstance(reward, Reward) else Reward(function=reward)
    return NamedReward(**{"reward": entry, "timeout_s": 5.0, "logs_score": True, **values})


def scored(
    rewards: list[NamedReward], *answers: str, config: Config | None = None, groups: int = 1
) -> tuple[list[Verdict], dict[str, float]]:
    """The verdicts on a group of answers, the last of `groups` equal ones, and the counts of all."""

    async def score() -> tuple[list[Verdict], dict[str, float]]:
        scoring = Scoring(config or make_config(), rewards)
        try:
            for _ in range(groups):
                verdicts = await scoring.score(QUESTION, [told(answer) for answer in answers])
            return verdicts, reduce_metrics(scoring.drain_metrics())
        finally:
            await scoring.aclose()

    return asyncio.run(score())


def told(answer: str, **values: Any) -> Episode:
    """An episode with this answer."""
    return Episode(rows=(), answer=answer, end="done", **values)


def of(*rewards: dict[str, Any], **sections: Any) -> Config:
    """A configuration with these of task.rewards."""
    return make_config(task={"rewards": tuple(RewardConfig(**each) for each in rewards)}, **sections)


def is_right(question: Question, response: str) -> float:
    """Whether the response is the right answer."""
    return float(response == question.ground_truth)
