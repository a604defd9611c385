"""The processes of a run, as Ray actors: the buffer, the rollout and evaluation servers, and the learner ranks.

Each process first calls `enter`, which sets its working directory, modules, keys, log file and network interface.
ActorGroup starts and ends the processes. Ray carries only control calls and reports, no trajectories and no weights.
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
from async_rl.base.errors import ConfigError
from async_rl.base.host import limit_spinning, threads_per_process
from async_rl.base.messages.reports import EvaluationDone, LearnerReport, WorkerReport
from async_rl.base.models_and_data.fetching import find_files, located
from async_rl.base.models_and_data.hub_names import LEARNER_KEYS, LEARNER_MODELS, SERVER_KEYS
from async_rl.base.network import agree_on_nccl, open_listener, ports_of, use_interface
from async_rl.base.seams.lookup import find_sent_modules_first
from async_rl.base.telemetry.status import A_PERSON, Status
from async_rl.run.before_start.gpus import checked_gpu_bytes, plan_memory
from buffer.keys import drop_client_keys, take_client_keys

if TYPE_CHECKING:
    from learner.memory.memory_plan import MemoryPlan
    from rollout_server.engines.base import Engine
    from rollout_server.worker.worker import EvalWorker, ScoredPlayer


@dataclass(frozen=True, slots=True)
class Origin:
    """What each process of a run gets from the driver."""

    folder: str
    """The driver's working directory. Paths in the configuration are relative to it."""
    config: Config
    """The user's configuration, as loaded."""
    decided: Decided = field(default_factory=dict)
    """The values that the driver has decided for the run."""
    client_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The contents of the clients' key files, by file name, for hosts that do not share the run directory."""


def enter(origin: Origin, name: str, port: int = 0) -> Config:
    """Prepare a new process, and return its settings. Call it first in the process.

    It sets the working directory, modules, keys, log file and network interface. All output of the process, also from C
    code, goes to the log file.

    Args:
        name: the name of the process. For example, learner/0 has the log file learner-0.log.
        port: the port of the process that this one replaces; 0: it replaces none.

    Raises:
        ConfigError: the working directory does not exist on this host, and can't be made.
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
    """Return the settings of a process: the user's and the driver's, with the address, ports and engine of the process.
    """
    config = resolve(origin.config, origin.decided)
    host = config.network.host if config.placement.num_nodes == 1 else ray.util.get_node_ip_address()
    return resolve(config, {
        "network.host": host, "network.port": port or config.network.port, "network.ports": ports_of(config, name),
        **(engine_of(config, name) if name in config.server_names else {}),
    })


def see_own_gpus(gpus: Sequence[object]) -> None:
    """Set CUDA_VISIBLE_DEVICES to the GPUs that Ray has given this process. Call it before torch looks for GPUs.

    Needed if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, because Ray then leaves the variable alone. Every
    server of the cluster would start on GPU 0.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def use_huge_pages() -> None:
    """Have torch allocate large CPU tensors in huge pages, which is faster. Call it before torch makes a tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class BufferActor:
    """The buffer's process. `serve` runs in one thread of the actor, the control calls in others.

    Args:
        port: the port of the buffer that this one replaces; 0: it replaces none, and uses network.port.
    """

    def __init__(self, origin: Origin, port: int = 0) -> None:
        self._config = enter(origin, "buffer", port)
        self._stop = threading.Event()

    def start(self) -> str:
        """Open the buffer and return its address. Not done in `__init__`, where Ray would hide the type of an error."""
        from buffer.server import BufferServer

        # it checks the experts of each token by the model's config.json, so a name of the hub has to become a folder
        self._server = BufferServer(located(self._config, ["model.path"]))
        return self._server.address

    def serve(self) -> None:
        self._server.serve(self._stop)

    def stop(self) -> None:
        self._stop.set()

    def abandon(self, worker: str, incarnation: int) -> int:
        """Fail the running groups of a lost worker, and return their number; see Operations.abandon."""
        return self._server.abandon(worker, incarnation)

    def retire(self, worker: str, incarnation: int) -> int:
        """Give a worker no more slots, and return the number of its running groups; see Operations.retire."""
        return self._server.retire(worker, incarnation)

    def status(self) -> Status:
        return Status(doing="answers", waits_on=self._server.describe(), since_s=time.monotonic())

    def dump_stacks(self) -> None:
        dump_stacks()

    def close(self) -> dict[str, float]:
        """Close the buffer after `stop`, and return its final counters; see BufferServer.close."""
        return self._server.close()


class RolloutActor:
    """A rollout process: one rollout server and the worker that generates with it.

    Args:
        index: the index of the process in `config.server_names`.
        url: the URL of a running server to use; empty: the process starts a server.
    """

    def __init__(self, origin: Origin, index: int, url: str = "") -> None:
        self._origin = origin
        self._config = enter(origin, origin.config.server_names[index])
        if url:
            self._config = resolve(self._config, {"rollout.server_urls": (url,)})
        pin_cpus(origin.config, index)
        self._begin("starts its engine")
        self._index = index

    def _begin(self, doing: str, limit_s: float = 0.0) -> None:
        """Note for the status what the process does from now on, for timeouts.startup_s unless `limit_s` is given."""
        self._doing, self._since_s = doing, time.monotonic()
        self._limit_s = limit_s or self._config.timeouts.startup_s

    async def find_files(self) -> None:
        """Check that this host has the model and data. Files on the hub are downloaded.

        Raises:
            ConfigError: a path is not on this host, or a download failed.
        """
        self._begin("fetches models and data sets", self._config.timeouts.batch_s)
        await asyncio.to_thread(find_files, self._config, SERVER_KEYS)

    async def start(self) -> str:
        """Start the engine with version 0, wait until it is up, and return the URL for weight pushes."""
        self._begin("starts its engine")
        self._engine = await asyncio.to_thread(self._open_engine)  # a thread: a slow disk may take longer than silent_s
        await self._engine.start()
        self._doing, self._since_s = "has started its engine", time.monotonic()
        self._limit_s = 0.0  # the driver limits the waits that follow
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
        """Open the rewards and the worker. The worker requests slots only after `run` is called.

        Args:
            judge_urls: the URLs of the judge servers; empty without a judge.
            incarnation: the number of this start of the server in the run, from 1.
        """
        if judge_urls:
            self._config = resolve(self._config, {"judge.urls": tuple(judge_urls)})
        self._begin("opens its rewards, environment and tools")
        # a thread: it may import much, as `start` does
        self._worker = await asyncio.to_thread(self._open_worker, buffer_address, incarnation)

    def _open_worker(self, buffer_address: str, incarnation: int) -> EvalWorker:
        from rollout_server.worker.worker import Worker

        return Worker(self._config, self._open_player(), buffer_address, incarnation)

    def _open_player(self) -> ScoredPlayer:
        from rollout_server.rewards.scoring import open_gold_reward, open_rewards
        from rollout_server.worker.worker import ScoredPlayer

        rewards, gold = (each(self._config, self._task) for each in (open_rewards, open_gold_reward))
        return ScoredPlayer(self._config, self._index, self._engine, self._task, rewards, self._tokenizer, gold)

    async def judges_at(self, urls: Sequence[str]) -> None:
        """Ask the judge servers at these URLs from now on: one of them was started again elsewhere."""
        if self._config.judge.urls:  # else `connect` brings these URLs or newer ones
            from rollout_server.rewards.judge import move_judges

            move_judges(self._config.judge.urls, urls)

    async def gpu_bytes(self) -> int:
        return await asyncio.to_thread(checked_gpu_bytes)  # a thread: it may import torch

    async def kv_tokens(self) -> int:
        """Return how many tokens fit into the engine's KV cache; 0 if that is not known."""
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
        return Status(doing=self._doing, since_s=self._since_s, limit_s=self._limit_s)

    async def dump_stacks(self) -> None:
        dump_stacks()

    async def evaluate(
        self, version: int, *, beside_training: bool, part: tuple[int, int] = (0, 1)
    ) -> EvaluationDone:
        """Measure the held-out accuracy of the weights that the engine serves now.

        For the arguments see Evaluation.run.
        """
        return await self._worker.player.evaluate(version, beside_training=beside_training, part=part)

    async def stop(self) -> None:
        if hasattr(self, "_worker"):
            await self._worker.stop()
        if hasattr(self, "_engine"):
            await self._engine.aclose()
        drop_client_keys(self._config.network.keys, self._origin.client_keys)


class EvalActor(RolloutActor):
    """The process of an evaluation server. It never requests slots from the buffer."""

    def _open_worker(self, buffer_address: str, incarnation: int) -> EvalWorker:
        from rollout_server.worker.worker import EvalWorker

        return EvalWorker(self._config, self._open_player())


def server_class(name: str) -> type[RolloutActor]:
    """Return the actor class of a server.

    Args:
        name: the server's name in `config.server_names`, such as eval/0.
    """
    return EvalActor if name.startswith("eval") else RolloutActor


def learner_threads(config: Config) -> dict[str, int]:
    """Return the number of threads for each Ray concurrency group of LearnerActor, by the group's name.

    The group `turn` has a thread for each rollout server, because all of them may wait there simultaneously.
    """
    return {"control": 8, "turn": config.placement.rollout.most}


class LearnerActor:
    """The process of one learner rank. Control calls run during `run`, in other threads."""

    def __init__(self, origin: Origin, rank: int) -> None:
        self._origin = origin
        self._config = enter(origin, f"learner/{rank}")
        pin_cpus(origin.config, origin.config.placement.num_servers + rank)
        self._rank = rank
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Open a port for the torch.distributed store of all ranks, and return (host, port). Called on rank 0 only."""
        self._listener = open_listener(self._config.network.host, self._config.network.port_range)
        address: tuple[str, int] = self._listener.getsockname()[:2]
        return address

    def find_files(self, marker: str) -> None:
        """Check that this host has the models and data, and sees the run directory. Files on the hub are downloaded.

        Args:
            marker: a file that the driver has made in the run directory.

        Raises:
            ConfigError: this host does not see `marker` or lacks a path, or a download failed.
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

    def check_memory(self, num_bytes: int, gpus_there: float) -> list[str]:
        """Check the memory of the learner ranks, and return warnings; see MemoryPlan.check_ranks.

        Args:
            num_bytes: the memory of the smallest GPU with a learner rank.
            gpus_there: number of GPUs of all hosts together.

        Raises:
            ConfigError: the GPU has too little memory.
        """
        return self._memory_plan(num_bytes, gpus_there).check_ranks()

    @ray.method(concurrency_group="control")
    def check_server_memory(self, num_bytes: int, gpus_there: float) -> None:
        """Check the memory of a server. `num_bytes` is the memory of its GPU.

        Raises:
            ConfigError: the GPU has too little memory.
        """
        self._memory_plan(num_bytes, gpus_there).check_servers()

    def _memory_plan(self, num_bytes: int, gpus_there: float) -> MemoryPlan:
        # the share of all servers of a GPU, which decide_placement has divided
        share = {"rollout.gpu_memory_utilization": self._origin.config.rollout.gpu_memory_utilization}
        return plan_memory(located(resolve(self._config, share), LEARNER_MODELS), gpus_there, num_bytes)

    def start(self, master: tuple[str, int], buffer_address: str) -> None:
        import torch

        from learner.loop.learner import Learner

        torch.set_num_threads(threads_per_process(self._config))
        ranks = self._config.placement.learner.ranks
        self._learner = Learner(
            located(self._config, LEARNER_MODELS), self._rank, ranks, *master, buffer_address, listener=self._listener
        )

    def run(self) -> Iterator[LearnerReport]:
        yield from (report for report in self._learner.run())  # Ray calls `send`, which not every iterator has

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Have `run` end with a checkpoint after the current step. Does not wait."""
        self._learner.stop()

    @ray.method(concurrency_group="control")
    def end(self, reason: str) -> None:
        """Have `run` end after the current step, as if run.steps were reached. Does not wait. Called on rank 0 only.

        Args:
            reason: why the run ends, for the log and the summary.
        """
        self._learner.requests.end(reason)

    @ray.method(concurrency_group="control")
    def save(self) -> None:
        """Have a checkpoint written after the current step. Does not wait. Called on rank 0 only."""
        self._learner.requests.save()

    @ray.method(concurrency_group="control")
    def pause(self, waits_on: str = A_PERSON) -> None:
        """Have `run` take no further batch until `go_on`, `stop` or `end`. Does not wait. Called on rank 0 only."""
        self._learner.requests.pause(waits_on)

    @ray.method(concurrency_group="control")
    def go_on(self, waits_on: str = A_PERSON) -> None:
        """End the pause that waits on `waits_on`. Does not wait. Called on rank 0 only."""
        self._learner.requests.go_on(waits_on)

    @ray.method(concurrency_group="control")
    def add_server(self, name: str, url: str, start: int) -> None:
        """Add a server that has started. A rollout server gets the learner's weights as soon as the learner can push.

        The learner reports it by ServersFilled. An evaluation server gets the version that is evaluated next. If
        servers and learner share GPUs, the learner's steps continue. Each step makes the server release its memory.

        Args:
            start: the number of this start of the server in the run.
        """
        self._learner.servers[name.partition("/")[0]].join(name, url, start)
        self._learner.shared_gpus.end_start(name)

    @ray.method(concurrency_group="control")
    def evaluated(self) -> None:
        """Tell the learner that the evaluation has ended. A push that waits for it continues."""
        self._learner.evaluations.schedule.ended()

    @ray.method(concurrency_group="turn")
    def begin_start(self, name: str) -> None:
        """Wait until lost server `name` may start again on a GPU that it shares with the learner.

        The learner takes no further step until `end_start` or `add_server`.

        Raises:
            WaitTimeoutError: the learner's step did not end within timeouts.batch_s.
        """
        self._learner.shared_gpus.begin_start(name, self._config.timeouts.limit("batch_s"))

    @ray.method(concurrency_group="control")
    def end_start(self, name: str) -> None:
        self._learner.shared_gpus.end_start(name)

    @ray.method(concurrency_group="control")
    def leave_server(self, name: str, start: int) -> None:
        """Remove a server that is lost. `start` is the number of its start in the run."""
        self._learner.servers[name.partition("/")[0]].leave(name, start)

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
    """If placement.pin_cpus is set, restrict this process and its children to its share of the host's cores.

    Args:
        number: as in `share_of_cores`.
    """
    if config.placement.pin_cpus:
        cores = share_of_cores(config, number, sorted(os.sched_getaffinity(0)))
        for thread in os.listdir("/proc/self/task"):  # Ray has started threads already
            os.sched_setaffinity(int(thread), cores)


def share_of_cores(config: Config, number: int, cores: list[int]) -> list[int]:
    """Return the share of `cores` of one process. All processes get equally many.

    Args:
        number: the index of the process. Servers are counted first, then learner ranks.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    processes = config.placement.num_servers + config.placement.learner.ranks
    size = len(cores) // processes
    check(
        size >= 1, "placement.pin_cpus", True, f"false on a host with {len(cores)} cores for {processes} processes",
        "Lower placement.rollout.servers, placement.eval.servers or placement.learner.ranks.",
    )
    return cores[number * size : (number + 1) * size]
