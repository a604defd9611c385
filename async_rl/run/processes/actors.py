"""The processes of a run, as Ray actors: the buffer, the servers, the judge's servers and the learner ranks.

Each begins with `enter`: working directory, modules, keys, log file, ports and interface. ActorGroup starts and ends
them. Ray carries control only: no trajectory and no push passes through it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.resolve import Decided, engine_of, resolve
from async_rl.base.cores import limit_spinning, threads_per_process
from async_rl.base.errors import ConfigError
from async_rl.base.messages.reports import EvaluationDone, LearnerReport, WorkerReport
from async_rl.base.models_and_data.fetching import find_files, located
from async_rl.base.models_and_data.hub_names import LEARNER_KEYS, LEARNER_MODELS, SERVER_KEYS
from async_rl.base.network import agree_on_nccl, use_interface
from async_rl.base.ports import open_listener, ports_of
from async_rl.base.seams.lookup import find_sent_modules_first
from async_rl.base.telemetry.status import Status
from async_rl.run.before_start.gpus import checked_gpu_bytes, plan_memory
from buffer.keys import drop_client_keys, take_client_keys

if TYPE_CHECKING:
    from rollout_server.engines.base import Engine
    from rollout_server.worker.scored_player import ScoredPlayer
    from rollout_server.worker.worker import EvalWorker


@dataclass(frozen=True, slots=True)
class Origin:
    """What each process of a run gets from the driver."""

    folder: str
    """The driver's working directory, to which paths of the config are relative."""
    config: Config
    """The user's configuration, as it was loaded."""
    decided: Decided = field(default_factory=dict)
    """The values that the driver has decided for the run."""
    client_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The contents of the files with the client's keys, by name, for hosts that do not share the run's folder."""


def enter(origin: Origin, name: str, port: int = 0) -> Config:
    """Set a new process's working directory, modules, keys, log file and network interface; returns its settings.

    Args:
        name: the process's name. Its output, also from C code, goes to the log file of this name, with - for /.
        port: the port of the process that this one replaces; 0: there was none.

    Raises:
        ConfigError: this host lacks the working directory, and it can't be made.
    """
    try:
        Path(origin.folder).mkdir(parents=True, exist_ok=True)  # a host without a shared disk
        os.chdir(origin.folder)
    except OSError as error:
        raise ConfigError(
            f"{name} needs the folder in which `async-rl train` was started, {origin.folder}, also on its host, where "
            f"it can't be used ({error.strerror}): make it there, or start in a folder that every host has"
        ) from None
    find_sent_modules_first()
    config = _settings_of(origin, name, port)
    log_file = config.run_dir / "logs" / f"{name.replace('/', '-')}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_file.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    take_client_keys(config.network.keys, origin.client_keys)
    use_interface(config.network.host)
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        see_own_gpus(ray.get_gpu_ids())
    agree_on_nccl()
    use_huge_pages()
    limit_spinning()
    return config


def _settings_of(origin: Origin, name: str, port: int) -> Config:
    """Return the settings of a process: what the driver has decided, and its place."""
    config = resolve(origin.config, origin.decided)
    host = config.network.host if config.placement.num_nodes == 1 else ray.util.get_node_ip_address()
    return resolve(config, {
        "network.host": host, "network.port": port or config.network.port, "network.ports": ports_of(config, name),
        **(engine_of(config, name) if name in config.server_names else {}),
    })


def see_own_gpus(gpus: Sequence[object]) -> None:
    """Show this process the `gpus` that Ray has given it, where Ray was told to leave CUDA_VISIBLE_DEVICES alone.

    Without this every server of such a cluster would start on GPU 0. Call it before torch looks for GPUs.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def use_huge_pages() -> None:
    """Have torch allocate large CPU tensors in huge pages, which is faster; call it before torch makes a tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class BufferActor:
    """The buffer's process: `serve` runs in one thread of the actor, the control calls in others.

    Args:
        port: the port of the buffer that this one replaces; 0: there was none, and network.port is used.
    """

    def __init__(self, origin: Origin, port: int = 0) -> None:
        self._config = enter(origin, "buffer", port)
        self._stop = threading.Event()

    def start(self) -> str:
        """Open the buffer and return its address. `__init__` does not do this, because Ray hides its errors' types."""
        from buffer.server import BufferServer

        # it checks the experts of each token by the model's config.json, so a name of the hub has to become a folder
        self._server = BufferServer(located(self._config, ["model.path"]))
        return self._server.address

    def serve(self) -> None:
        self._server.serve(self._stop)

    def stop(self) -> None:
        self._stop.set()

    def abandon(self, worker: str, incarnation: int) -> int:
        """Fail the running groups of a dead worker, which `incarnation` will replace; returns their number."""
        return self._server.abandon(worker, incarnation)

    def status(self) -> Status:
        return Status(doing="answers", waits_on=self._server.describe(), since_s=time.monotonic())

    def dump_stacks(self) -> None:
        dump_stacks()

    def close(self) -> dict[str, float]:
        """Wait until `serve` has ended, drop the groups that are left as `shutdown`; returns the last counters."""
        return self._server.close()


class RolloutActor:
    """A rollout process: one rollout server and the worker that generates with it.

    Args:
        index: its index in `config.server_names`.
    """

    def __init__(self, origin: Origin, index: int) -> None:
        self._origin = origin
        self._config = enter(origin, origin.config.server_names[index])
        pin_cpus(origin.config, index)
        self._doing, self._since_s = "starts its engine", time.monotonic()
        self._index = index

    async def find_files(self) -> None:
        """Check that this host has its model and data; download what is on the hub."""
        self._doing, self._since_s = "fetches models and data sets", time.monotonic()
        await asyncio.to_thread(find_files, self._config, SERVER_KEYS)

    async def start(self) -> str:
        """Start the engine with version 0 and wait until it is up; returns the URL to which weights are pushed."""
        self._engine = await asyncio.to_thread(self._open_engine)  # a thread: a slow disk may take longer than silent_s
        await self._engine.start()
        return self._engine.url

    def _open_engine(self) -> Engine:
        from async_rl.base.models_and_data.model_folder import load_tokenizer
        from rollout_server.engines.base import open_engine
        from rollout_server.tasks.base import open_task

        if self._config.rollout.engine_entry.computes_in_worker:
            import torch

            torch.set_num_threads(threads_per_process(self._config))

        self._config = located(self._config, ["model.path"])  # a restarted server may be on another host
        self._tokenizer = load_tokenizer(self._config.model.path)
        self._task = open_task(self._config, self._tokenizer)
        return open_engine(self._config, self._index, self._config.run_dir / "logs")

    async def connect(self, buffer_address: str, judge_urls: Sequence[str], incarnation: int) -> None:
        """Open rewards and worker, which requests slots from the buffer at this address once `run` is called.

        Args:
            incarnation: how many times this server has been started in the run, with this start.
        """
        if judge_urls:
            self._config = resolve(self._config, {"judge.urls": tuple(judge_urls)})
        self._doing, self._since_s = "opens its rewards, environment and tools", time.monotonic()
        # a thread: it may import much, as `start` does
        self._worker = await asyncio.to_thread(self._open_worker, buffer_address, incarnation)

    def _open_worker(self, buffer_address: str, incarnation: int) -> EvalWorker:
        from rollout_server.worker.worker import Worker

        return Worker(self._config, self._open_player(), buffer_address, incarnation)

    def _open_player(self) -> ScoredPlayer:
        from rollout_server.rewards.base import open_gold_reward, open_rewards
        from rollout_server.worker.scored_player import ScoredPlayer

        rewards, gold = (each(self._config, self._task) for each in (open_rewards, open_gold_reward))
        return ScoredPlayer(self._config, self._index, self._engine, self._task, rewards, self._tokenizer, gold)

    async def gpu_bytes(self) -> int:
        return await asyncio.to_thread(checked_gpu_bytes)  # a thread: it may import torch

    async def kv_tokens(self) -> int:
        """Return for how many tokens the KV cache of the engine has room; 0: that is not known."""
        load = await self._engine.load()
        return load.kv_tokens if load else 0

    async def run(self) -> AsyncIterator[WorkerReport]:
        # All that is loaded by now lives as long as the process. Otherwise full collections visit it again and again,
        # 0.3 s each, and the worker sends the engine nothing meanwhile.
        gc.collect()
        gc.freeze()
        async for report in self._worker.run():
            yield report

    async def status(self) -> Status:
        if hasattr(self, "_worker"):
            return self._worker.status()
        limit_s = self._config.timeouts.startup_s
        return Status(doing=self._doing, since_s=self._since_s, limit_s=limit_s)

    async def dump_stacks(self) -> None:
        dump_stacks()

    async def evaluate(
        self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)
    ) -> EvaluationDone:
        """Measure the held-out accuracy of the weights that the engine serves now; see Evaluation.run."""
        return await self._worker.player.evaluate(version, beside_training=beside_training, part=part)

    async def stop(self) -> None:
        if hasattr(self, "_worker"):
            await self._worker.stop()
        if hasattr(self, "_engine"):
            await self._engine.aclose()
        drop_client_keys(self._config.network.keys, self._origin.client_keys)


class EvalActor(RolloutActor):
    """The process of an evaluation server, which never asks the buffer for slots."""

    def _open_worker(self, buffer_address: str, incarnation: int) -> EvalWorker:
        from rollout_server.worker.worker import EvalWorker

        return EvalWorker(self._config, self._open_player())


def server_class(name: str) -> type[RolloutActor]:
    """Return the class of the process of a server, by its name in `config.server_names`."""
    return EvalActor if name.startswith("eval") else RolloutActor


def learner_threads(config: Config) -> dict[str, int]:
    """Return the number of threads for each Ray concurrency group of LearnerActor, by the group's name.

    Each rollout server has a thread in `join`, because all of them may wait there at once.
    """
    return {"control": 8, "join": config.placement.rollout.servers}


class LearnerActor:
    """The process of one learner rank. The control calls run in other threads than `run`, and at the same time."""

    def __init__(self, origin: Origin, rank: int) -> None:
        self._origin = origin
        self._config = enter(origin, f"learner/{rank}")
        pin_cpus(origin.config, origin.config.placement.num_servers + rank)
        self._rank = rank
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Open a port for the torch.distributed store of all ranks; returns (host, port). Called on rank 0 only."""
        self._listener = open_listener(self._config.network.host, self._config.network.port_range)
        address: tuple[str, int] = self._listener.getsockname()[:2]
        return address

    def find_files(self, marker: str) -> None:
        """Check that this host has models and data, and run.dir with the driver's file `marker`; download what is on
        the hub.
        """
        if not Path(marker).exists():
            raise ConfigError(
                f"{self._config.network.host} does not see the driver's {self._config.run_dir.absolute()}, where the "
                "learner writes its checkpoints. Set run.dir to a folder on a disk that both share, or start the run "
                "on the learner's host: there `ray start --resources='{\"learner\": 1}'`, and "
                "placement.learner.resource: learner"
            )
        find_files(self._config, LEARNER_KEYS)

    def gpu_bytes(self) -> int:
        return checked_gpu_bytes()

    def check_memory(self, rank_bytes: int, server_bytes: int, gpus_there: float) -> list[str]:
        """Return cautions about the memory of the run, see MemoryPlan.check, for the smallest GPU of ranks and servers.

        Args:
            server_bytes: 0: no GPU of a server is known, and their memory is not checked.
        """
        # the share of all servers of a GPU, which decide_placement has divided
        share = {"rollout.gpu_memory_utilization": self._origin.config.rollout.gpu_memory_utilization}
        config = located(resolve(self._config, share), LEARNER_MODELS)
        plan = plan_memory(config, gpus_there, rank_bytes)
        if server_bytes:
            same = server_bytes == rank_bytes
            of_servers = plan if same else plan_memory(config, gpus_there, server_bytes)
            of_servers.check_servers()
        return plan.check_ranks()

    def start(self, master: tuple[str, int], buffer_address: str, engine_urls: list[str]) -> None:
        import torch

        from learner.loop.learner import Learner

        torch.set_num_threads(threads_per_process(self._config))
        ranks = self._config.placement.learner.ranks
        self._learner = Learner(
            located(self._config, LEARNER_MODELS), self._rank, ranks, *master, buffer_address, engine_urls,
            listener=self._listener,
        )

    def run(self) -> Iterator[LearnerReport]:
        yield from (report for report in self._learner.run())  # Ray calls `send`, which not every iterator has

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Have `run` end after the current step, with a checkpoint; returns at once."""
        self._learner.stop()

    @ray.method(concurrency_group="control")
    def end(self, reason: str) -> None:
        """Have `run` end after the current step as if run.steps were reached; returns at once. Rank 0 only."""
        self._learner.requests.end(reason)

    @ray.method(concurrency_group="control")
    def save(self) -> None:
        """Have a checkpoint written after the current step; returns at once. Called on rank 0 only."""
        self._learner.requests.save()

    @ray.method(concurrency_group="control")
    def pause(self) -> None:
        """Have `run` take no further batch until `go_on`, `stop` or `end`; returns at once. Rank 0 only."""
        self._learner.requests.pause()

    @ray.method(concurrency_group="control")
    def go_on(self) -> None:
        """End the pause; returns at once. Called on rank 0 only."""
        self._learner.requests.go_on()

    @ray.method(concurrency_group="join")
    def join_server(self, name: str, url: str) -> int:
        """Wait, for timeouts.batch_s, until a restarted server at `url` has got the weights; returns their version. The
        server's turn on a shared GPU ends at once: a step that begins from now on makes it release its memory.
        """
        limit, added = self._config.timeouts.limit("batch_s"), self._learner.shared_gpus.end_start
        self._learner.servers["rollout"].join(name, url, limit, added)
        return self._learner.version

    @ray.method(concurrency_group="control")
    def add_eval_server(self, name: str, url: str) -> None:
        """Let a restarted evaluation server at `url` get the version that is evaluated next."""
        self._learner.servers["eval"].add(name, url)

    @ray.method(concurrency_group="control")
    def evaluated(self) -> None:
        """Tell the learner that the evaluation has ended. A push that waits for it continues."""
        self._learner.evaluations.schedule.ended()

    @ray.method(concurrency_group="join")
    def begin_start(self, name: str) -> None:
        """Wait, for timeouts.batch_s, until a lost server may start again on a GPU that it shares with the learner."""
        self._learner.shared_gpus.begin_start(name, self._config.timeouts.limit("batch_s"))

    @ray.method(concurrency_group="control")
    def end_start(self, name: str) -> None:
        self._learner.shared_gpus.end_start(name)

    @ray.method(concurrency_group="control")
    def leave_server(self, name: str) -> None:
        self._learner.servers[name.partition("/")[0]].leave(name)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        return self._learner.status()

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> None:
        dump_stacks()


def dump_stacks() -> None:
    """Write the stack of every thread into this process's log file."""
    faulthandler.dump_traceback(file=2, all_threads=True)


def pin_cpus(config: Config, number: int) -> None:
    """If placement.pin_cpus is set, restrict this process and its children to its own share of the host's cores."""
    if config.placement.pin_cpus:
        cores = share_of_cores(config, number, sorted(os.sched_getaffinity(0)))
        for thread in os.listdir("/proc/self/task"):  # Ray has started threads already
            os.sched_setaffinity(int(thread), cores)


def share_of_cores(config: Config, number: int, cores: list[int]) -> list[int]:
    """Return the part of `cores` that process `number` gets; all get equally many. ConfigError: less than one each.

    Args:
        number: index of the process, counted over all servers and then all learner ranks.
    """
    processes = config.placement.num_servers + config.placement.learner.ranks
    size = len(cores) // processes
    check(
        size >= 1, "placement.pin_cpus", True, f"false on a host with {len(cores)} cores for {processes} processes",
        "Lower placement.rollout.servers, placement.eval.servers or placement.learner.ranks.",
    )
    return cores[number * size : (number + 1) * size]
