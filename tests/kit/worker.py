"""A worker beside a buffer and a learner that only counts versions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from async_rl.base.config import Config
from async_rl.base.messages.reports import WorkerReport
from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.base.types import Batch
from buffer.client import LearnerClient
from buffer.server import BufferServer
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward
from rollout_server.rewards.scoring import NamedReward
from rollout_server.tasks.base import open_task
from rollout_server.worker.worker import ScoredPlayer, Worker
from tests.kit.buffer.serving import serving
from tests.kit.engines.fakes import TOKENIZER

SCORED = 0.25
"""The reward of a right answer."""


def rolled_out(
    config: Config, engine: Any, reward: Callable[..., Any] | Sequence[NamedReward], steps: int = 1,
    beside: Callable[[Worker], Awaitable[Any]] | None = None,
) -> tuple[list[Batch], list[WorkerReport], BufferServer, Any]:
    """Run a worker beside a learner that only counts versions, for `steps` batches.

    Its rewards are those of `open_rewards`, or one function, which is not called if the episodes give theirs.
    """
    alone = () if config.task.gives_rewards or not callable(reward) else (plain_reward(config, reward),)
    rewards = alone if callable(reward) else reward

    async def run(server: BufferServer) -> tuple[list[Batch], list[WorkerReport], Any]:
        await engine.start()
        player = ScoredPlayer(config, 0, engine, open_task(config, TOKENIZER), rewards, TOKENIZER)
        worker = Worker(config, player, server.address)
        reports: list[WorkerReport] = []

        async def collect() -> None:
            async for report in worker.run():
                reports.append(report)

        collecting = asyncio.create_task(collect())
        loop = asyncio.get_running_loop()

        def push(version: int) -> None:
            if isinstance(engine, HFEngine):
                asyncio.run_coroutine_threadsafe(engine.load_weights({}, version), loop).result(5)

        learning = asyncio.create_task(asyncio.to_thread(learn, server.address, config, steps, push))
        try:
            await asyncio.wait((collecting, learning), return_when=asyncio.FIRST_COMPLETED)
            if collecting.done():
                collecting.result()
            extra = await beside(worker) if beside else None
            batches = await learning
        finally:
            await worker.stop()
            await asyncio.gather(collecting, return_exceptions=True)
            await engine.aclose()
        return batches, reports, extra

    with serving(config) as server:
        batches, reports, extra = asyncio.run(asyncio.wait_for(run(server), 60))
    return batches, reports, server, extra


def evaluated(
    config: Config, engine: Any, rewards: Sequence[NamedReward], gold: Sequence[NamedReward] = ()
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The metrics and the notes of an evaluation beside no training."""

    async def play() -> tuple[dict[str, float], tuple[str, ...]]:
        player = ScoredPlayer(config, 0, engine, open_task(config, TOKENIZER), rewards, TOKENIZER, gold)
        try:
            report = await player.evaluate(0, beside_training=False)
            return reduce_metrics([*report.metrics, *player.drain_metrics()]), player.drain_notes()
        finally:
            await player.aclose()

    return asyncio.run(play())


def plain_reward(config: Config, function: Callable[..., Any], **changes: Any) -> NamedReward:
    """The only reward of a run: this function of a question and a response."""
    values: dict[str, Any] = {"reward": Reward(function=function), "timeout_s": config.timeouts.reward_s}
    return NamedReward(**values | changes)


def learn(address: str, config: Config, steps: int, push: Callable[[int], None]) -> list[Batch]:
    client = LearnerClient(address, config.timeouts)
    try:
        client.served(0)
        batches = []
        for version in range(steps):
            batches.append(client.take(version))
            client.trained(version + 1)
            push(version + 1)
            client.served(version + 1)
        return batches
    finally:
        client.close()


def kind_of(question: Question) -> int:
    """One of five kinds of questions, 0..4."""
    return sum(map(ord, question.ground_truth)) % 5


def metric_values(reports: list[WorkerReport]) -> dict[str, float]:
    return reduce_metrics(metric for report in reports for metric in report.metrics)
