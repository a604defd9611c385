"""A worker with `staleness.on_late: drop`: groups that the buffer drops are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from async_rl.base.config import StalenessConfig
from async_rl.base.types import Prompt
from buffer.client import LearnerClient, WorkerClient
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.tasks.base import open_task
from rollout_server.worker.scored_player import ScoredPlayer
from rollout_server.worker.worker import Worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.groups import make_group, make_row
from tests.kit.worker import SCORED, metric_values, plain_reward, rolled_out


class SlowOnceEngine(EchoEngine):
    """Never answers the first group."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[int] = []

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        if request.group_id == 0:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.cancelled.append(request.group_id)
                raise
        return await super().generate(request)


def test_a_dropped_group_is_cancelled_at_the_engine_and_its_prompt_is_granted_again() -> None:
    config = worker_config()
    config = replace(config, staleness=StalenessConfig(max=1, on_late="drop"))
    engine = SlowOnceEngine()
    batches, _, server, _ = rolled_out(config, engine, lambda *_: SCORED, steps=4)
    assert engine.cancelled == [0]
    assert server.counters()["buffer/dropped_late"] == 1
    again = [request for request in engine.requests if request.prompt.index == 0]
    assert len(again) == 1 and again[0].group_id > 0  # its first request was never answered
    assert all(0 not in [group.group_id for group in batch.groups] for batch in batches)


async def put_two(other: WorkerClient, version: int, size: int) -> None:
    for slot in await other.admit(2):
        await other.put(make_group(slot, rows=(make_row(version=version),) * size))


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.01)


def test_a_group_that_is_dropped_while_its_prompt_is_made_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups of rollout/0 miss their deadline, as rollout/1 makes the batches 0 and 1 meanwhile."""
    config = worker_config(
        staleness={"max": 1, "on_late": "drop"}, learner={"prompts_per_step": 2}, placement={"rollout": {"servers": 2}},
    )
    engine, task, may_go_on = EchoEngine(), open_task(config, TOKENIZER), threading.Event()
    make_prompt = task.prompt

    def slow_prompt(index: int) -> Prompt:
        assert may_go_on.wait(20), "the test did not let the prompt be made within 20 s"
        return make_prompt(index)

    monkeypatch.setattr(task, "prompt", slow_prompt)
    reward = plain_reward(config, lambda *_: SCORED)

    async def run(address: str, acknowledged: Callable[[], bool]) -> dict[str, float]:
        worker = Worker(config, ScoredPlayer(config, 0, engine, task, (reward,), TOKENIZER), address)
        other, learner = WorkerClient(address, "rollout/1", config.timeouts), LearnerClient(address, config.timeouts)
        reports = []

        async def collect() -> None:
            async for report in worker.run():
                reports.append(report)

        collecting = asyncio.create_task(collect())
        await asyncio.to_thread(learner.served, 0)
        for version in range(2):
            await put_two(other, version, config.rollout.group_size)
            await asyncio.to_thread(learner.take, version)
            await asyncio.to_thread(learner.trained, version + 1)
            await asyncio.to_thread(learner.served, version + 1)
        await until(acknowledged)
        may_go_on.set()
        await until(lambda: engine.requests and metric_values(reports).get("rollout/aborted"))
        await worker.stop()
        await asyncio.gather(collecting, return_exceptions=True)
        await other.close()
        learner.close()
        return metric_values(reports)

    with serving(config) as server:
        found = asyncio.run(run(server.address, lambda: not server._store.aborts("rollout/0")))
        assert server.counters()["buffer/dropped_late"] == 2
    assert found["rollout/aborted"] == 2
    assert min(request.group_id for request in engine.requests) >= 4, "those of the prompts that were granted again"
