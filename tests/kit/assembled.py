"""The pipeline's parts in one process, without Ray: many short runs on one SGLang server that is started once.

Engine, worker, buffer, learner, wire and weight transport are the real ones; only the processes around them are
missing. Each run records its batches as the learner got them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from async_rl.base.config import Config
from async_rl.base.config.resolve import resolve
from async_rl.base.messages.reports import EvaluationDue, StepDone
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.base.types import Batch
from buffer.client import LearnerClient
from buffer.keys import own_keys
from buffer.server import BufferServer
from buffer.wire import decode_batch
from learner.loop.learner import Learner
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import open_task
from rollout_server.worker.worker import ScoredPlayer, Worker
from tests.kit.engines.in_thread import EngineInThread


@dataclass
class Run:
    batches: list[Batch] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    """The learner's metrics, one record a step."""
    counters: dict[str, float] = field(default_factory=dict)
    """The buffer's counters at its end."""
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """The metrics of each evaluation beside training, by policy version."""
    aborted: float = 0.0
    """The number of groups that the worker ended because the buffer had dropped them."""


class RecordingClient(LearnerClient):
    batches: list[Batch]

    def take_raw(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> list[bytes]:
        frames = super().take_raw(version, interrupted)
        if frames:
            self.batches.append(decode_batch(frames))
        return frames


def run_assembled(config: Config, after_step: Callable[[], None] = lambda: None) -> Run:
    """Train from version 0 and return what happened; with SGLang, `rollout.server_url` names the server.

    An error of the worker ends the run, and is raised.

    Args:
        after_step: is called in the learner's thread after each step, with its push.
    """
    with own_keys(config, config.run_dir / "keys") as keys:
        return _run(resolve(config, keys), after_step)


def _run(config: Config, after_step: Callable[[], None]) -> Run:
    result = Run()
    engine = EngineInThread(config, config.run_dir)
    engine.run(engine.engine.start(), config.timeouts.startup_s)
    try:
        with _buffer(config, result) as address, _worker(engine, config, address, result) as (worker, work):
            listener = socket.create_server(("127.0.0.1", 0))
            learner = Learner(config, 0, 1, *listener.getsockname(), address, listener=listener)
            learner.servers["rollout"].join("rollout/0", engine.engine.url, 1)
            assert learner._client is not None
            work.add_done_callback(lambda work: learner.stop() if work.exception() else None)
            learner._client.__class__ = RecordingClient
            learner._client.batches = result.batches  # type: ignore[attr-defined]
            evaluating = []
            for report in learner.run():
                match report:
                    case StepDone():
                        result.steps.append(reduce_metrics(report.metrics))
                        after_step()
                    case EvaluationDue():
                        evaluating.append(_evaluate(engine, worker, learner, report.version, result))
            for evaluation in evaluating:
                evaluation.result(60)
    finally:
        engine.close()
    return result


def _evaluate(engine: EngineInThread, worker: Worker, learner: Learner, version: int, result: Run) -> Future[None]:
    """Evaluate beside training as the driver does, and report the end to the learner."""

    async def evaluate() -> None:
        result.evals[version] = reduce_metrics((await worker.player.evaluate(version, beside_training=True)).metrics)
        learner.evaluations.schedule.ended()

    return engine.begin(evaluate())


@contextmanager
def _buffer(config: Config, result: Run) -> Iterator[str]:
    buffer, stop = BufferServer(config), threading.Event()
    serving = threading.Thread(target=buffer.serve, args=(stop,), daemon=True)
    serving.start()
    yield buffer.address
    stop.set()
    serving.join(30)
    result.counters = buffer.close()


@contextmanager
def _worker(
    engine: EngineInThread, config: Config, address: str, result: Run
) -> Iterator[tuple[Worker, Future[None]]]:
    """Within the body a worker runs in the engine's event loop: (the worker, its work, which has its error)."""
    tokenizer = load_tokenizer(config.model.path)
    task = open_task(config, tokenizer)
    rewards = open_rewards(config, task)

    async def make() -> Worker:
        return Worker(config, ScoredPlayer(config, 0, engine.engine, task, rewards, tokenizer), address)

    async def work() -> None:
        async for report in worker.run():
            result.aborted += reduce_metrics(report.metrics).get("rollout/aborted", 0.0)

    worker = engine.run(make())
    working = engine.begin(work())
    yield worker, working
    engine.run(worker.stop())
    working.result(30)
