"""A worker whose rewards are slower than its engine."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from async_rl.config import TimeoutsConfig
from rollout_server import math_checker, rewards
from rollout_server.tasks import open_task
from tests.rollout_server.test_worker import TOKENIZER, EchoEngine, config_of, metric_values, rolled_out

SLOW = TimeoutsConfig(generate_s=0.5, reward_s=1, wire_s=5, batch_s=20, shutdown_s=5)


def test_math_checks_slower_than_the_engine_wait_their_turn_and_fail_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[str]:
        command = ["sh", "-c", "while read line; do sleep 0.3; echo true; done"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    checker = math_checker.MathChecker()
    monkeypatch.setattr(math_checker, "_start", start)
    monkeypatch.setattr(rewards, "_math_checker", lambda: checker)
    config = config_of(staleness=3, timeouts=SLOW)
    config = replace(config, task=replace(config.task, reward="math_verify"))
    reward = rewards.open_reward(config, open_task(config, TOKENIZER))
    batches, reports, server, _ = rolled_out(config, EchoEngine(), reward)
    assert len(batches) == 1
    assert metric_values(reports)["rollout/failed"] == server.counters()["buffer/dropped_failed"] == 0
