"""The worker with agents that raise, hang, or wait for a place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.errors import RewardError
from async_rl.base.telemetry.status import Status
from rollout_server.worker.worker import Worker
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TalkingEngine
from tests.kit.episodes.envs_and_agents import CASES, no_reward
from tests.kit.models import save_tiny_model
from tests.kit.worker import metric_values, rolled_out


def agent_config(agent: str, folder: Path, **changes: Any) -> Config:
    save_tiny_model("tiny-qwen2", folder, seed=0)
    rollout = {"max_episode_tokens": 200, "max_turns": 4}
    return worker_config(folder, task={"agent": f"{CASES}:{agent}", **changes}, rollout=rollout)


def engine() -> TalkingEngine:
    return TalkingEngine(lambda last, number, n: "z")


def test_an_agent_that_some_replies_break_is_trained_on_them_with_reward_zero(tmp_path: Path) -> None:
    """The review's case: the tool of a framework raises KeyError for half of the items."""
    (batch,), reports, *_ = rolled_out(agent_config("break_by_turns", tmp_path), engine(), no_reward)
    for group in batch.groups:
        assert len(group.episodes) == 3, "none is left out"
        ends = {reward: facts.end for reward, facts in zip(group.episode_rewards, group.episodes, strict=True)}
        assert all(end == ("done" if reward else "error") for reward, end in ends.items())
    values = metric_values(reports)
    assert 0 < values["episode/end_error"] < 1 and values["episode/failed"] == values["rollout/failed"] == 0
    (note,) = [note for report in reports for note in report.notes]
    assert "`error`" in note and "KeyError: 'plum', at " in note and "envs_and_agents.py:" in note


def test_a_run_in_which_every_episode_errs_ends_with_the_error(tmp_path: Path) -> None:
    config = agent_config("break_always", tmp_path)
    with pytest.raises(RewardError, match=r"8 groups .*100%.*KeyError: 'plum', at .*envs_and_agents\.py:\d+$"):
        rolled_out(changed(config, timeouts={"batch_s": 3}), engine(), no_reward, steps=99)


def test_the_status_shows_the_agents_that_have_a_place_and_not_those_that_wait(tmp_path: Path) -> None:
    """One place for all episodes that take long: the wait that the watchdog sees is that of the running one."""
    config = agent_config("take_a_while", tmp_path, max_concurrent_calls=1)
    config = changed(config, timeouts={"episode_s": 30})
    statuses: list[Status] = []

    async def look(worker: Worker) -> None:
        while len(statuses) < 30:
            if (status := worker.status()).doing.startswith("plays"):
                statuses.append(status)
            await asyncio.sleep(0.01)

    rolled_out(config, engine(), no_reward, beside=look)
    assert {status.doing.partition(",")[0] for status in statuses} == {"plays 1 episodes"}
    of_agents = [status for status in statuses if status.waits_on == "its agent"]
    assert all(2 * 30 < status.limit_s < 2 * 30 + 60 for status in of_agents)
    begins = {round(status.since_s, 2) for status in of_agents}
    assert len(begins) > 1, "each episode's wait begins when it gets the place"
