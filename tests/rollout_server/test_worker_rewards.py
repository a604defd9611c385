"""A worker whose rewards are slower than its engine."""

from __future__ import annotations

import asyncio
import subprocess
import time

import pytest

from async_rl.config import Config, TimeoutsConfig
from async_rl.errors import RewardError
from async_rl.telemetry.status import Status
from rollout_server.engines.base import GenerationRequest
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.players.single_turn import SingleTurnPlayer
from rollout_server.question import Question
from rollout_server.rewards import math_checker, rules
from rollout_server.rewards.base import open_reward
from rollout_server.scored_player import ScoredPlayer
from rollout_server.tasks.base import open_task
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.worker import metric_values, rolled_out

pytestmark = pytest.mark.processes

SLOW = TimeoutsConfig(generate_s=0.5, reward_s=1, wire_s=5, work_s=20, shutdown_s=5)


def test_math_checks_slower_than_the_engine_wait_their_turn_and_fail_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[str]:
        command = ["sh", "-c", "while read line; do sleep 0.3; echo true; done"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    checker = math_checker.MathChecker()
    monkeypatch.setattr(math_checker, "_start", start)
    monkeypatch.setattr(rules, "_math_checker", lambda: checker)
    config = worker_config(staleness={"max": 3}, timeouts=SLOW)
    config = changed(config, task={"reward": "math_verify"})
    reward = open_reward(config, open_task(config, TOKENIZER))
    batches, reports, server, _ = rolled_out(config, EchoEngine(), reward)
    assert len(batches) == 1
    assert metric_values(reports)["rollout/failed"] == server.counters()["buffer/dropped_failed"] == 0


def test_groups_in_which_nothing_can_be_scored_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimesOut(SingleTurnPlayer):
        async def play(self, request: GenerationRequest) -> list[Episode]:
            late = Episode(rows=(), answer="", end="timeout", error="it took too long")
            return [late] * request.n

    monkeypatch.setattr("rollout_server.scored_player.open_player", lambda *arguments: TimesOut(*arguments[1:3]))
    with pytest.raises(RewardError, match=r"groups in a row failed .* 0 of a group's 3 .* it took too long"):
        rolled_out(worker_config(timeouts=SLOW), EchoEngine(), lambda *_: 1.0)


def test_the_status_of_groups_that_queue_for_their_rewards_has_the_true_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.scored_player.num_threads", lambda config: 1)
    config = worker_config(timeouts=SLOW)
    statuses = asyncio.run(statuses_of_evaluation(config))
    scoring = [status for status in statuses if status.doing.startswith("scores")]
    assert scoring[0].doing == "scores 6 requests" and scoring[0].waits_on == "its reward"
    # The first: 2 calls of at most 1 s in one thread, after the one that may run: 3 rounds, and twice that.
    assert scoring[0].limit_s == 6
    # The last: the same, behind 10 calls of which the thread may have taken one.
    assert scoring[-1].limit_s in (24, 26)


async def statuses_of_evaluation(config: Config) -> list[Status]:
    def reward(question: Question, text: str) -> float:
        time.sleep(0.1)
        return 1.0

    task = open_task(config, TOKENIZER)
    player = ScoredPlayer(config, 0, EchoEngine(), task, reward, TOKENIZER)
    statuses: list[Status] = []
    evaluation = asyncio.create_task(player.evaluate(0, beside_training=False))
    while not evaluation.done():
        await asyncio.sleep(0.01)
        statuses.append(player.stats.status())
    await player.aclose()
    evaluation.result()
    return statuses
