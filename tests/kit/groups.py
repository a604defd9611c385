"""Groups, configs and a running buffer for the tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from async_rl.config import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    RolloutPlacement,
    StalenessConfig,
    TaskConfig,
    TimeoutsConfig,
)
from async_rl.messages.codec import check_group, encode_group
from async_rl.messages.limits import Limits
from async_rl.types import Group, Row, Slot
from buffer.journal.journal import Journal
from buffer.server import BufferServer
from buffer.staleness import Rules
from buffer.stored_group import Arrival, State, StoredGroup


def make_config(
    max_staleness: int = 0, prompts_per_step: int = 4, group_size: int = 2, workers: int = 1, **timeouts: float
) -> Config:
    return Config(
        model=ModelConfig(path="none"),
        task=TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=16),
        rollout=RolloutConfig(group_size=group_size, max_response_tokens=32),
        staleness=StalenessConfig(max=max_staleness),
        algorithm=AlgorithmConfig(filter_zero_variance=False),  # the groups of `make_group` have equal rewards
        buffer=BufferConfig(journal=False),
        learner=LearnerConfig(prompts_per_step=prompts_per_step),
        placement=PlacementConfig(rollout=RolloutPlacement(servers=workers)),
        timeouts=TimeoutsConfig(**{"wire_s": 5.0, "work_s": 20.0, "shutdown_s": 5.0, **timeouts}),
    )


def plain_rules(max_staleness: int, prompts_per_step: int, **changes: Any) -> Rules:
    sizes = {"max_staleness": max_staleness, "prompts_per_step": prompts_per_step, "fresh_per_step": prompts_per_step}
    return Rules(**{**sizes, **changes})


def make_arrival(newest_version: int = 0, **changes: Any) -> Arrival:
    fields = {
        "newest_version": newest_version, "response_tokens": 4.0, "reward": 0.5, "equal_rewards": False,
        "duration_s": 1.0,
    }
    return Arrival(**{**fields, **changes})


def make_row(length: int = 3, version: int = 0, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "logprobs": np.linspace(-2.0, -0.5, length, dtype=np.float32),
        "versions": np.full(length, version, np.int32),
        "mask": np.ones(length, np.bool_),
        "reward": 0.5,
        "finish_reason": "stop",
    }
    return Row(**{**fields, **changes})


def make_group(slot: Slot, group_size: int = 2, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "group_id": slot.group_id,
        "prompt_index": slot.prompt_index,
        "start_version": slot.start_version,
        "temperature": 1.0,
        "prompt_tokens": np.array([7, 8], np.int32),
        "rows": tuple(make_row(3 + i, slot.start_version) for i in range(group_size)),
        "duration_s": 1.5,
        "worker": "rollout/0",
    }
    return Group(**{**fields, **changes})


def record_arrival(journal: Journal, group: Group, state: State, limits: Limits) -> None:
    """Record a group that arrived, as the buffer does."""
    payload = encode_group(group)
    columns = check_group(payload, limits)
    journal.record_group(columns)
    journal.record(StoredGroup(
        group.group_id, group.prompt_index, group.start_version, group.worker, data_row=group.data_row, state=state,
        arrival=Arrival.of(columns), payload=payload, trained_versions=(0,) if state == "trained" else (),
    ))  # fmt: skip


@contextlib.contextmanager
def serving(config: Config) -> Iterator[BufferServer]:
    """A buffer with its loop in a thread; closing it checks the accounting."""
    server = BufferServer(config)
    stop, crashes = threading.Event(), []

    def serve() -> None:
        try:
            server.serve(stop)
        except BaseException as error:
            crashes.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10)
        server.close()
        assert not crashes, crashes
