"""The servers of a run. Start, restart, and the return of a lost host are one path.

States of a server (`ServerState`):

                 engine up, connected            has the weights
    starting ──────────────────────> filling ─────────────────────> serving
        ^                               │ lost                         │ lost
        └───────────────────────────────┴──────────────────────────────┘
          its groups are granted to other servers

    starting   The process and its engine start, on a host with room.
    filling    The learner brings it its first weights. It has no slots yet, and disturbs no other server.
    serving    It gets slots, pushes and evaluations.

Evaluation servers and judge servers follow the same path. An evaluation server gets its first weights with the next
evaluation, and a judge server gets none, so both serve at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from async_rl.base.config import Config, Limit
from async_rl.base.errors import AsyncRLError, ProcessDiedError, WaitTimeoutError, WeightSyncError
from async_rl.base.messages.reports import ServersFilled, ServersLost
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import server_class
from async_rl.run.processes.lives import Change, Lives, LostError
from async_rl.run.processes.placement import runs_here
from async_rl.run.processes.watchdog import Watchdog

SMALLER = 0.9
"""If a restarted server has less than this share of its first KV cache, the driver logs it."""


class ServerState(Enum):
    """The state of a server; the module's docstring has the diagram."""

    STARTING = "starting"
    FILLING = "filling"
    SERVING = "serving"


@dataclass(slots=True)
class Server:
    """A server and its state."""

    name: str
    state: ServerState = ServerState.STARTING
    url: str = ""
    """Where its engine answers, or its last engine; empty before the first start."""
    is_known: bool = False
    """Whether the learner knows this start of it."""
    filled: asyncio.Future[int] | None = None
    """The wait for its first weights; the result is their policy version."""

    @property
    def kind(self) -> str:
        """The kind of server: rollout, eval or judge."""
        return self.name.partition("/")[0]


class ServerPool:
    """Starts the servers of a run, and starts each again when it is lost.

    Args:
        read_reports: reads and logs the reports of a server until it stops.
        abandon: makes the buffer grant the groups of a lost server to others, and returns their number.
        changed: notified when the state of a server changes.
        gpus: the number of GPUs of all hosts together.
        one_by_one: whether servers share a GPU. Each measures the free memory when it starts.
    """

    def __init__(
        self, config: Config, processes: ActorGroup, log: RunLog, watchdog: Watchdog, lives: Lives, changed: Change,
        read_reports: Callable[[str], Awaitable[None]], abandon: Callable[[str], Awaitable[int]], *,
        gpus: float = 0.0, one_by_one: bool = False,
    ) -> None:
        self._config, self._processes, self._log = config, processes, log
        self._watchdog, self._lives, self._changed = watchdog, lives, changed
        self._read_reports, self._abandon = read_reports, abandon
        self._gpus = gpus
        self._turn = asyncio.Lock() if one_by_one else nullcontext()
        self.servers = {name: Server(name) for name in (*config.server_names, *config.judge_names)}
        self.serving: set[str] = set()
        """The names of the servers that serve."""
        self._proven: set[str] = set()
        """The kinds of servers of which one has served. So the configuration works, and another start may help."""
        self._is_learner_up = asyncio.Event()
        self._deaths = Counter[str]()
        """The deaths of each server since the last step."""
        self._first_kv_tokens: dict[str, int] = {}
        """The number of tokens that fitted into each server's KV cache at its first start."""

    @property
    def rollouts(self) -> list[str]:
        """The rollout servers that serve."""
        return sorted(name for name in self.serving if name.startswith("rollout"))

    async def keep(self, name: str, buffer_address: str) -> None:
        """Start a server, log its reports, and start it again whenever it is lost.

        Raises:
            AsyncRLError: the server must not be started again, see `_count_death`. The error ends the run.
        """
        server = self.servers[name]
        while True:
            server.state, server.is_known = ServerState.STARTING, False
            try:
                await self._lives.follow(name, self._live(server, buffer_address))
            except LostError as lost:
                error = lost.error
            self._count_death(server, error)
            self._log.logger.note(f"{name} is lost, and started again: {str(error).splitlines()[0]}")
            self.remove(name)
            await self._changed.notify()

    async def until_up(self) -> None:
        """Wait until every server has started and connected. Each start has a limit of its own."""
        def are_up() -> bool:
            return all(server.state is not ServerState.STARTING for server in self.servers.values())

        await self._changed.wait_until(are_up, None, "the start of every server")

    async def until_known(self) -> None:
        """Let servers get weights, because the learner has started. Returns when it knows all that have connected."""
        self._is_learner_up.set()
        def are_known() -> bool:
            return all(server.is_known for server in self.servers.values() if server.state is ServerState.FILLING)

        await self._changed.wait_until(are_known, self._config.timeouts.limit("startup_s"), "the learner")

    def note_filled(self, report: ServersFilled) -> None:
        """Let the servers serve that have the learner's weights by its report."""
        for name, start in report.servers:
            filled = self.servers[name].filled
            if filled and not filled.done() and self._processes.starts[name] == start:
                filled.set_result(report.version)

    def note_lost(self, report: ServersLost) -> None:
        """Treat servers as dead that a weight push has dropped, unless they have been started again since."""
        for name, start in report.servers:
            if self._processes.starts[name] == start:
                self.declare_lost(name, ProcessDiedError(
                    f"{self._processes.on_host(name)} did not answer in a weight push that failed, refused it, or "
                    f"serves other weights{report.cause and f' ({report.cause})'}, and gets no more weights"
                    f"{self._processes.log_tail(name)}"
                ))

    def declare_lost(self, name: str, error: AsyncRLError) -> None:
        """Treat a server as dead, even if no call to it failed."""
        self.serving.discard(name)
        self._lives.declare_lost(name, error)

    def note_step(self) -> None:
        """Forget the deaths so far, because the learner has made a step."""
        self._deaths.clear()

    def remove(self, name: str) -> None:
        """Kill the process of a lost server. The learner makes no more pushes to it."""
        self._watchdog.forget(name)
        self.serving.discard(name)
        self._log.lost(name)
        self._processes.kill(name)
        if self.servers[name].is_known and name in self._config.server_names:
            self._processes.actors["learner/0"].leave_server.remote(name, self._processes.starts[name])

    def remove_starting(self) -> None:
        """Kill the servers that do not serve yet."""
        for name in self.servers.keys() & self._processes.actors.keys() - self.serving:
            self.remove(name)

    async def _live(self, server: Server, buffer_address: str) -> None:
        """Start a server, and log its reports until it is lost. A rollout server first waits for the learner's weights.

        If a process dies during the start:
            this server     LostError is raised, and `keep` starts the server once more
            the buffer      `abandon` asks the next buffer; `connect` only opens a socket, which reaches that one too
            the learner     its end ends the run, which cancels the start

        Raises:
            LostError: the server was lost.
        """
        name, is_first, version = server.name, self._processes.starts[server.name] == 0, None
        if server.kind == "rollout" and not is_first:
            num_groups = await self._abandon(name)
            whither = "go to other servers" if self.rollouts else "wait until a server is back: no other one runs"
            self._log.logger.note(f"{name}: the prompts of its {num_groups} running groups {whither}")
        async with self._on_shared_gpu(name):
            await self._start(server)
            if server.kind != "judge":
                await self._connect(server, buffer_address)
            server.state, server.filled = ServerState.FILLING, asyncio.get_running_loop().create_future()
            await self._changed.notify()
            await self._is_learner_up.wait()
            if server.kind != "judge":
                learner, start = self._processes.actors["learner/0"], self._processes.starts[name]
                adding: Any = learner.add_server.remote(name, server.url, start)
                await self._processes.call("learner/0", adding, self._config.timeouts.limit("silent_s"), "the addition")
            server.is_known = True
            await self._changed.notify()
            if server.kind == "rollout":
                version = await self._filled(server)
        if not is_first:
            self._log.restarted(name, version)
        await self._serve(server)

    @asynccontextmanager
    async def _on_shared_gpu(self, name: str) -> AsyncIterator[None]:
        """A context manager in which a server that shares a GPU with the learner can start.

        It waits for the end of the learner's step, so that the learner has released its memory. The next step waits
        until the server has joined or the block ends. If servers and learner share no GPUs, or the learner has not
        started, it does nothing.

        Raises:
            AsyncRLError: the step did not end in time, or learner rank 0 has died.
        """
        if not (self._config.shares_gpus and self._is_learner_up.is_set()):
            yield
            return
        learner: Any = self._processes.actors["learner/0"]
        beginning, what = learner.begin_start.remote(name), f"the end of the learner's step, before {name} starts"
        await self._processes.call("learner/0", beginning, self._push_limit, what)
        try:
            yield
        finally:
            learner.end_start.remote(name)

    @property
    def _push_limit(self) -> Limit:
        """How long a server waits for learner rank 0 to end its step or push."""
        timeouts = self._config.timeouts
        return Limit(timeouts.batch_s + timeouts.silent_s, "timeouts.batch_s + timeouts.silent_s")

    async def _start(self, server: Server) -> None:
        """Start the process and the engine of a server on its host. A judge server keeps its address.

        Raises:
            LostError: the server failed.
        """
        name, timeouts = server.name, self._config.timeouts
        async with self._turn:
            if server.kind == "judge":
                from async_rl.run.processes.judge_actor import JudgeActor

                index, port = self._config.judge_names.index(name), urlsplit(server.url).port or 0
                actor: Any = self._processes.start(name, JudgeActor, index, port)
            else:
                actor = self._processes.start(name, server_class(name), self._config.server_names.index(name))
            self._watchdog.begin(name, is_up=False)
            if not runs_here(self._config):  # else the driver has found all files before the start
                await self._call(name, actor.find_files.remote(), timeouts.limit("batch_s"), "the models of its host")
                if server.kind != "judge":
                    await self._check_memory(name, actor)
            server.url = await self._call(name, actor.start.remote(), timeouts.limit("startup_s"), "the start")

    async def _check_memory(self, name: str, actor: Any) -> None:
        """Check that the GPU of a server on a cluster has room for its weights.

        Raises:
            ConfigError: it has not.
            LostError: the server failed.
        """
        limit = self._config.timeouts.limit("startup_s")
        if num_bytes := await self._call(name, actor.gpu_bytes.remote(), limit, "the size of its GPU"):
            checking: Any = self._processes.actors["learner/0"].check_server_memory.remote(num_bytes, self._gpus)
            await self._processes.call("learner/0", checking, limit, f"the memory of {name}")

    async def _connect(self, server: Server, buffer_address: str) -> None:
        """Connect the worker of a server to the buffer and the judge's servers.

        Raises:
            LostError: the server failed.
            WaitTimeoutError: the judge's servers did not start in time.
        """
        judges = [self.servers[name] for name in self._config.judge_names]
        limit = self._config.timeouts.limit("startup_s")
        await self._changed.wait_until(lambda: all(judge.url for judge in judges), limit, "the judge's servers")
        actor: Any = self._processes.actors[server.name]
        connecting = actor.connect.remote(
            buffer_address, [judge.url for judge in judges], self._processes.starts[server.name]
        )
        await self._call(server.name, connecting, limit, "connecting")

    async def _filled(self, server: Server) -> int:
        """Wait until a server has the learner's weights, and return their version.

        Raises:
            WaitTimeoutError: the learner made no push in time.
        """
        assert server.filled is not None
        try:
            async with asyncio.timeout(self._push_limit.seconds):
                return await server.filled
        except TimeoutError:
            raise WaitTimeoutError(f"{server.name} waited {self._push_limit} for the learner's weights") from None

    async def _serve(self, server: Server) -> None:
        """Log the reports of a server that has started, until it is lost.

        Raises:
            LostError: the server is lost.
        """
        name = server.name
        server.state = ServerState.SERVING
        self.serving.add(name)
        self._proven.add(server.kind)
        await self._changed.notify()
        try:
            await self._compare_kv_room(name)
            await self._read_reports(name)
        except AsyncRLError as error:
            raise LostError(error) from None
        log = self._processes.log_tail(name)
        raise LostError(ProcessDiedError(f"{name} stopped by itself while the run was going on{log}"))

    async def _compare_kv_room(self, name: str) -> None:
        """Log if a restarted server has a much smaller KV cache than at its first start.

        Raises:
            AsyncRLError: the server did not answer.
        """
        call: Any = self._processes.actors[name].kv_tokens.remote()
        limit = self._config.timeouts.limit("silent_s")
        tokens: int = await self._processes.call(name, call, limit, "the size of its KV cache")
        first = self._first_kv_tokens.setdefault(name, tokens)
        if 0 < tokens < SMALLER * first:
            self._log.logger.note(
                f"{name} came back with room for {tokens} tokens in its KV cache, at first it had {first}: other "
                "processes hold more of its GPU now, so it samples fewer answers at once. A lower "
                "rollout.gpu_memory_utilization leaves them room from the start"
            )

    async def _call(self, name: str, call: Any, limit: Limit, what: str) -> Any:
        try:
            return await self._processes.call(name, call, limit, what)
        except AsyncRLError as error:
            raise LostError(error) from None

    def _count_death(self, server: Server, error: AsyncRLError) -> None:
        """Count a death of a server.

        Args:
            error: the cause of the death.

        Raises:
            AsyncRLError: `error`, if the server must not be started again. No server of its kind has ever served, or
                a start can't help, or it has died more than placement.rollout.max_restarts times since the last step.
        """
        is_mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError)
        if not is_mendable or server.kind not in self._proven:
            raise error
        self._deaths[server.name] += 1
        limit = self._config.placement.rollout.max_restarts
        if self._deaths[server.name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None
