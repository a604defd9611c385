from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from async_rl.base.config import TaskConfig
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import EPISODE_METRICS, Episode
from rollout_server.worker.worker_stats import EpisodeLog
from tests.kit.configs import make_config
from tests.kit.episodes.scripted_env import MORE, Scripted, played

CONFIG = make_config(task=TaskConfig(env="my_env:MyEnv"))

ROW = "row 7 of data.jsonl"


def log() -> EpisodeLog:
    return EpisodeLog("rollout/0", CONFIG)


def an_episode(**changes: Any) -> Episode:
    plain = Episode(
        rows=(), answer="", end="done", metrics=dict.fromkeys(EPISODE_METRICS, 2.0)
    )
    return replace(plain, **changes)


def test_errors_of_two_places_are_two_kinds(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("plum")

    def wrong(reward: float) -> Env:
        return Scripted({"reward": reward})  # type: ignore[arg-type]

    seen = log()
    for number in range(3):
        seen.add([played(wrong(number / 7), wrong(number / 7))], ROW, are_trained=True)
        seen.add([played(*(Scripted(MORE, Step(done=True), act=fail) for _ in range(2)))], ROW, are_trained=True)
    notes = seen.drain_notes()
    assert len(notes) == 2 and "Step" in notes[0] and f"KeyError: 'plum', at {__file__}:" in notes[1]
    (record,) = caplog.records  # the traceback is in the worker's log, once
    assert "Traceback (most recent call last)" in record.getMessage() and "in fail" in record.getMessage()


def test_held_out_and_greedy_episodes_do_not_count_in_the_metrics_of_the_training() -> None:
    seen = log()
    seen.add([an_episode()], ROW, are_trained=True)
    late = an_episode(metrics=dict.fromkeys(EPISODE_METRICS, 50.0), end="timeout", error="late")
    seen.add([late], ROW, are_trained=False)
    values = reduce_metrics(seen.drain_metrics())
    assert values["episode/turns"] == 2 and values["episode/end_done"] == 1 and values["episode/end_timeout"] == 0
    assert len(seen.drain_notes()) == 1
    assert reduce_metrics(seen.drain_metrics()) == {} and seen.drain_notes() == ()
