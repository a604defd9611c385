"""The Ray actors of a run: buffer, rollout servers, learner ranks. async_rl/driver/actor_group.py starts and ends them.

Ray carries control only: no trajectory and no weight passes through it. Each process writes its own log file under
`run_dir/logs`, whose last lines go into the error when it dies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.cores import threads_per_process
from async_rl.messages.reports import EvaluationDone, LearnerReport, WorkerReport
from async_rl.network import use_interface
from async_rl.telemetry.status import Status

if TYPE_CHECKING:
    from rollout_server.engines.base import Engine
    from rollout_server.rewards.base import Reward


class BufferActor:
    """Holds the buffer; `serve` runs in one thread of the actor, the control calls in others.

    Args:
        port: for a buffer that replaces one that died: the port of that one. 0: network.port.
    """

    def __init__(self, folder: str, config: Config, port: int = 0) -> None:
        config = enter(folder, config, "buffer")
        if port:
            config = dataclasses.replace(config, network=dataclasses.replace(config.network, port=port))
        self._config = config
        self._stop = threading.Event()

    def start(self) -> str:
        """Open the buffer; returns its address. (Ray would wrap an error out of `__init__` in one of its own.)

        Raises:
            AsyncRLError: see BufferServer.
        """
        from buffer.server import BufferServer

        self._server = BufferServer(self._config)
        return self._server.address

    def serve(self) -> None:
        self._server.serve(self._stop)

    def stop(self) -> None:
        self._stop.set()

    def abandon(self, worker: str) -> int:
        """The worker died: its running groups go to others; returns how many."""
        return self._server.abandon(worker)

    def status(self) -> Status:
        return Status(doing="answers", waits_on=self._server.describe(), since_s=time.time())

    def dump_stacks(self) -> None:
        dump_stacks()

    def close(self) -> dict[str, float]:
        """Drop the remaining groups with the reason `shutdown`, check that all groups add up, return the counters."""
        return self._server.close()


class RolloutActor:
    """One rollout server with its worker."""

    def __init__(self, folder: str, config: Config, index: int) -> None:
        self._config = enter(folder, config, f"rollout-{index}")
        pin_cpus(config, index)
        self._started_s = time.time()
        self._index = index

    async def start(self) -> str:
        """Start the engine with version 0; returns the URL to which weights are pushed."""
        self._engine = await asyncio.to_thread(self._open_engine)  # from a slow disk it may take longer than silent_s
        await self._engine.start()
        return self._engine.url

    def _open_engine(self) -> Engine:
        from async_rl.storage.model_folder import load_tokenizer
        from rollout_server.engines.base import open_engine
        from rollout_server.tasks.base import open_task

        if self._config.rollout.engine_entry.computes_in_worker:
            import torch

            torch.set_num_threads(threads_per_process(self._config))

        self._tokenizer = load_tokenizer(self._config.model.path)
        self._task = open_task(self._config, self._tokenizer)
        return open_engine(self._config, self._index, self._config.run_dir / "logs")

    async def connect(self, buffer_address: str) -> None:
        """Open the worker, which talks to the buffer at this address once it runs."""
        reward = await asyncio.to_thread(self._open_reward)

        from rollout_server.worker import Worker  # `_open_reward` has imported it

        self._worker = Worker(
            self._config, self._index, self._engine, self._task, reward, self._tokenizer, buffer_address
        )

    def _open_reward(self) -> Reward:
        import rollout_server.worker  # noqa: F401
        from rollout_server.rewards.base import open_reward

        return open_reward(self._config, self._task)

    async def run(self) -> AsyncIterator[WorkerReport]:
        async for report in self._worker.run():
            yield report

    async def status(self) -> Status:
        if hasattr(self, "_worker"):
            return self._worker.status()
        limit_s = self._config.timeouts.server_start_s
        return Status(doing="starts its engine", since_s=self._started_s, limit_s=limit_s)

    async def dump_stacks(self) -> None:
        dump_stacks()

    async def evaluate(self, version: int, *, beside_training: bool) -> EvaluationDone:
        return await self._worker.evaluate(version, beside_training=beside_training)

    async def stop(self) -> None:
        if hasattr(self, "_worker"):
            await self._worker.stop()
        if hasattr(self, "_engine"):
            await self._engine.aclose()


def learner_threads(config: Config) -> dict[str, int]:
    """The number of threads of each concurrency group of LearnerActor. In `join` every server may wait for weights at
    once; `control` calls never wait for them.
    """
    return {"control": 8, "join": config.placement.rollout.servers}


class LearnerActor:
    """One learner rank. The control calls run beside `run`, in threads of their own."""

    def __init__(self, folder: str, config: Config, rank: int) -> None:
        self._config = enter(folder, config, f"learner-{rank}")
        pin_cpus(config, config.placement.rollout.servers + rank)
        self._rank = rank
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Open the port at which rank 0 will serve the rendezvous of all ranks; returns (address, port).

        The socket stays open, so that no other process can take the port.
        """
        self._listener = socket.create_server((self._config.network.host, 0))
        address: tuple[str, int] = self._listener.getsockname()[:2]
        return address

    def start(self, master: tuple[str, int], buffer_address: str, engine_urls: list[str]) -> None:
        import torch

        from learner.trainer import Learner

        torch.set_num_threads(threads_per_process(self._config))
        ranks = self._config.placement.learner.ranks
        self._learner = Learner(
            self._config, self._rank, ranks, *master, buffer_address, engine_urls, listener=self._listener
        )

    def run(self) -> Iterator[LearnerReport]:
        yield from (report for report in self._learner.run())  # Ray sends values: only a generator takes and drops them

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Let `run` end after its step, with a checkpoint."""
        self._learner.stop()

    @ray.method(concurrency_group="join")
    def join_server(self, name: str, url: str) -> int:
        """Have the next push include rollout server `name`, new at `url`; returns the version it got by that push."""
        self._learner.servers.join(name, url, self._config.timeouts.limit("batch_s"))
        return self._learner.version

    @ray.method(concurrency_group="control")
    def evaluated(self) -> None:
        """The evaluation that was due has ended."""
        self._learner.evaluations.ended()

    @ray.method(concurrency_group="control")
    def leave_server(self, name: str) -> None:
        self._learner.servers.leave(name)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        return self._learner.status()

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> None:
        dump_stacks()


def enter(folder: str, config: Config, name: str) -> Config:
    """Set up the process: working directory, log file, network interface. Returns the config as it holds on this host.

    Args:
        folder: the driver's working directory: paths of the config are relative to it.
        name: of the process's log file.
    """
    os.chdir(folder)
    redirect_output(config.run_dir / "logs" / f"{name}.log")
    if config.placement.num_nodes > 1:
        network = dataclasses.replace(config.network, host=ray.util.get_node_ip_address())
        config = dataclasses.replace(config, network=network)
    use_interface(config.network.host)
    use_huge_pages()
    return config


def use_huge_pages() -> None:
    """Have torch allocate large CPU tensors in huge pages: page by page, that takes longer than filling the tensor.

    Must be called before torch makes a tensor. Child processes inherit the setting.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def dump_stacks() -> None:
    """Write the stack of every thread into this process's log file."""
    faulthandler.dump_traceback(file=2, all_threads=True)


def redirect_output(log_file: Path) -> None:
    """Send this process's stdout and stderr, C level included, to a file of its own."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def pin_cpus(config: Config, number: int) -> None:
    """With placement.pin_cpus, keep this process and all it starts to its share of the cores.

    Args:
        number: of the process among all rollout servers, then all learner ranks.
    """
    if config.placement.pin_cpus:
        cores = share_of_cores(config, number, sorted(os.sched_getaffinity(0)))
        for thread in os.listdir("/proc/self/task"):  # Ray has started threads already
            os.sched_setaffinity(int(thread), cores)


def share_of_cores(config: Config, number: int, cores: list[int]) -> list[int]:
    """The cores of process `number`: every process of the run gets equally many.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    processes = config.placement.rollout.servers + config.placement.learner.ranks
    size = len(cores) // processes
    check(
        size >= 1, "placement.pin_cpus", True, f"false on a host with {len(cores)} cores for {processes} processes",
        "Lower placement.rollout.servers or placement.learner.ranks.",
    )
    return cores[number * size : (number + 1) * size]
