"""Pushes that drain while episodes of several turns run: workers hold back turns, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from async_rl.config import Config, StalenessConfig, TaskConfig, WeightSyncConfig
from buffer.client import LearnerClient, WorkerClient
from tests.buffer.factories import make_config, make_group, serving
from tests.buffer.running import TIMEOUTS, with_worker


@pytest.fixture
def config() -> Config:
    config = make_config(prompts_per_step=1)
    return replace(
        config, staleness=StalenessConfig(max=2), weight_sync=WeightSyncConfig(on_update="drain"),
        task=TaskConfig(env="somewhere:Env", max_prompt_tokens=config.task.max_prompt_tokens),
    )


def test_a_push_begins_once_the_worker_holds_its_turns_and_ends_the_hold(config: Config) -> None:
    events: list[Any] = []
    with serving(config) as server:
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)

        def push() -> None:
            learner.take(0)
            learner.trained(1)
            events.append("asks")
            learner.await_push(1)
            events.append("pushes")
            learner.served(1)

        async def run(worker: WorkerClient) -> None:
            slots = await worker.admit(2)
            await worker.put(make_group(slots[0]))
            pushing = asyncio.create_task(asyncio.to_thread(push))
            assert await worker.turns(False) is True
            await asyncio.sleep(0.1)
            assert events == ["asks"], "a reply may still be sampled"
            events.append("holds")
            assert await worker.turns(True) is False
            await pushing
            assert events == ["asks", "holds", "pushes"]

        with_worker(server.address, run)
        learner.close()


def test_a_late_repetition_of_a_request_does_not_hold_turns_again(config: Config) -> None:
    """The answer that ends a hold was lost, so the request is sent again while the worker samples already."""
    with serving(config) as server:
        operations = server._operations

        async def run(worker: WorkerClient) -> None:
            request = 7
            asked = asyncio.create_task(worker._call(request, "turns", "", holds=True, wait_s=0.05))
            assert (await asked).result == {"hold": False}
            again = await worker._call(request, "turns", "", holds=True, wait_s=60.0)
            assert again.result == {"hold": False}
            assert ("turns", "rollout/0") not in operations._parked

        with_worker(server.address, run)
