"""A worker whose rewards are slower than its engine."""

from __future__ import annotations

import itertools
import time

import pytest

from async_rl.base.config import TimeoutsConfig
from async_rl.base.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.contract import RewardResult
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import EchoEngine
from tests.kit.worker import evaluated, metric_values, plain_reward, rolled_out

SLOW = TimeoutsConfig(generate_s=0.5, reward_s=1, buffer_s=5, batch_s=20, shutdown_s=5)
ENDS = TimeoutsConfig(generate_s=0.5, reward_s=1, buffer_s=2, batch_s=3, shutdown_s=5)
"""For a worker that ends without a batch, for which the learner waits as long as batch_s."""


def test_rewards_slower_than_the_engine_wait_their_turn_and_fail_no_group() -> None:
    def slow(question: Question, text: str) -> float:
        time.sleep(0.3)
        return 1.0

    config = worker_config(staleness={"max": 3}, timeouts=SLOW)
    batches, reports, server, _ = rolled_out(config, EchoEngine(), [plain_reward(config, slow, concurrency=1)])
    assert len(batches) == 1
    assert metric_values(reports)["rollout/failed"] == server.counters()["buffer/dropped_failed"] == 0


def test_answers_without_a_verdict_leave_their_group_and_are_counted() -> None:
    """The judge has no verdict on one of three answers."""
    calls = itertools.count()

    def judge(question: Question, text: str) -> RewardResult | None:
        return None if next(calls) % 3 == 0 else RewardResult(0.5, {"sure": 1.0})

    config = worker_config(timeouts=SLOW)
    rewards = [plain_reward(config, judge, name="judge", logs_score=True, concurrency=1)]
    batches, reports, _, _ = rolled_out(config, EchoEngine(), rewards)
    groups = [group for batch in batches for group in batch.groups]
    assert [len(group.rows) for group in groups] == [2] * 4
    assert all(group.left_out == ("the reward judge gave no verdict",) for group in groups)
    assert all(row.rewards == {"judge": 0.5, "judge/sure": 1.0} for group in groups for row in group.rows)
    values = metric_values(reports)
    assert values["scoring/judge/no_verdict"] >= 4 and values["rollout/failed"] == 0
    assert values["scoring/judge/calls"] >= 3 * values["scoring/judge/no_verdict"], "groups in flight count too"
    notes = [note for report in reports for note in report.notes if "no verdict" in note]
    assert len(notes) == 1


def test_a_group_in_which_too_few_answers_have_a_verdict_is_dropped_as_failed() -> None:
    config = changed(worker_config(timeouts=ENDS), task={"max_failures": 3})
    with pytest.raises(RewardError, match=r"^3 groups .*the reward task gave no verdict"):
        rolled_out(config, EchoEngine(), lambda *_: None)


def test_held_out_answers_without_a_verdict_are_left_out_of_the_means() -> None:
    config = worker_config(timeouts=SLOW)
    calls = itertools.count()
    rewards = [plain_reward(
        config, lambda *_: None if next(calls) % 4 == 0 else 1.0, name="gold", logs_score=True, concurrency=1
    )]

    values, _ = evaluated(config, EchoEngine(), rewards)
    assert (values["eval/no_verdict"], values["eval/failed"]) == (3, 0)  # of 6 prompts with 2 answers each
    assert values["eval/accuracy"] == values["eval/reward"] == values["eval/reward/gold"] == 1
    assert values["eval/avg_at_2"] == values["eval/pass_at_2"] == 1
