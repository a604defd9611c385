"""The servers of a run. First start, restart, joining and leaving are one path, see server_state.py."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from async_rl.base.config import Config, Limit
from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, WaitTimeoutError, WeightSyncError
from async_rl.base.messages.reports import ServersFilled, ServersLost, StepDone
from async_rl.base.run_dir.server_requests import ServerRequest, drop_requests, take_requests
from async_rl.base.telemetry.status import PAUSED, ServerStatus
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import server_class
from async_rl.run.processes.lives import Change, Lives, LostError
from async_rl.run.processes.placement import runs_here
from async_rl.run.processes.server_state import Server, ServerState
from async_rl.run.processes.watchdog import Watchdog

SMALLER = 0.9
"""If a restarted server has less than this share of its first KV cache, the driver logs it."""
LOOK_INTERVAL_S = 1.0
"""The time between two looks at hosts that leave and at requests."""
DRAIN_INTERVAL_S = 0.2
"""The time between two questions how many groups a server that leaves still has."""
SPARE_S = 5.0
"""A server has ended this many seconds before its host leaves."""
RETRY_S = 5.0
"""The wait before a server that failed to start is tried again while others serve. It doubles each time."""
LONGEST_RETRY_S = 300.0
"""The longest such wait. It has no limit for a server that is lost while it is filled: each try delays the learner."""
NO_SERVERS = "rollout servers"
"""What a learner waits on that is paused because fewer servers than placement.rollout.servers.min serve."""


class ServerPool:
    """Starts the servers of a run, starts each again when it is lost, and lets servers join and leave.

    Args:
        read_reports: reads and logs the reports of a server until it stops.
        abandon: makes the buffer grant the groups of a lost server to others, and returns their number.
        retire: makes the buffer give a server no more slots, and returns the number of its running groups.
        changed: notified when the state of a server changes.
        wanted: [name of a server that the run is to have] the URL of a server that the run does not start, else "".
            Empty: the servers of the configuration. The pool changes it at a person's requests.
        one_by_one: whether servers share a GPU. Each measures the free memory when it starts.
    """

    def __init__(
        self, config: Config, processes: ActorGroup, log: RunLog, watchdog: Watchdog, lives: Lives, changed: Change,
        read_reports: Callable[[str], Awaitable[None]], abandon: Callable[[str], Awaitable[int]],
        retire: Callable[[str], Awaitable[int]], wanted: dict[str, str], *, one_by_one: bool = False,
    ) -> None:
        self._config, self._processes, self._log = config, processes, log
        self._watchdog, self._lives, self._changed = watchdog, lives, changed
        self._read_reports, self._abandon, self._retire = read_reports, abandon, retire
        self._turn = asyncio.Lock() if one_by_one else nullcontext()
        self._placed, urls = config.placement.rollout, config.rollout.server_urls
        rollouts = [name for name in config.server_names if name.startswith("rollout")]
        others = [name for name in (*config.server_names, *config.judge_names) if name not in rollouts]
        places = dict(zip(rollouts, urls, strict=False)) if urls else dict.fromkeys(rollouts, "")
        places |= dict.fromkeys(others, "")
        self._wanted = wanted
        if not wanted:  # else the run has rolled back
            drop_requests(config.run_dir)
            wanted |= places
        self.servers = {name: Server(name, wanted.get(name, "")) for name in places | wanted}
        self._kept: set[str] = set()
        """The servers that have a task, also those that are to leave."""
        self.serving: set[str] = set()
        """The names of the servers that serve."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._proven: set[str] = set()
        """The kinds of servers with one that has served. So the configuration works, and another start may help."""
        self._is_learner_up = asyncio.Event()
        self._deaths = Counter[str]()
        """The deaths of each server since the last step."""
        self._first_kv_tokens: dict[str, int] = {}
        """The number of tokens that fitted into each server's KV cache at its first start."""
        self._paused_s: float | None = None
        """Since when the learner is paused because too few servers serve; None: it is not."""
        self._telling = asyncio.Lock()
        watchdog.servers = self.statuses

    # what the supervisor calls

    @property
    def rollouts(self) -> list[str]:
        """The rollout servers that serve."""
        return sorted(name for name in self.serving if name.startswith("rollout"))

    def begin(self, tasks: asyncio.TaskGroup, buffer_address: str) -> None:
        """Start all wanted servers, each with a task in `tasks` that keeps it."""
        self._group, self._buffer_address = tasks, buffer_address
        for name in self.servers:
            if name in self._wanted:
                self._begin_keeping(name)
            else:
                self._processes.reservation.release(name)
        self._begin_task(self._look())

    async def until_up(self) -> str:
        """Wait until every server with which the run begins has started and connected. Each start has its own limit.

        Returns the name of a rollout server.

        Raises:
            WaitTimeoutError: hosts for all of them were not there within timeouts.pause_s.
        """
        others = self._config.placement.eval.servers + self._config.placement.judge.servers
        needed, limit = {"rollout": self._placed.fewest, "others": others}, self._config.timeouts.limit("pause_s")

        def are_up() -> bool:
            up = Counter(
                "rollout" if each.kind == "rollout" else "others" for each in self.servers.values() if each.is_up
            )
            return all(up[kind] >= count for kind, count in needed.items())

        what = "hosts and starts of all servers. Add hosts, or begin with fewer: placement.rollout.servers"
        await self._changed.wait_until(are_up, limit, what)
        return min(name for name, each in self.servers.items() if each.kind == "rollout" and each.is_up)

    async def until_known(self) -> None:
        """Let servers get weights, because the learner has started. Returns when it knows all that have connected."""
        self._is_learner_up.set()

        def are_known() -> bool:
            return all(server.is_known for server in self.servers.values() if server.state is ServerState.FILLING)

        await self._changed.wait_until(are_known, self._config.timeouts.limit("startup_s"), "the learner")
        up = {name for name, server in self.servers.items() if server.is_up}
        for name in set(self._config.server_names) - up:  # steps do not wait for the reports of those that join later
            self._log.lost(name)
            self._log.left(name)
        self._check_minimum()

    def note_filled(self, report: ServersFilled) -> None:
        """Let the servers serve that have the learner's weights by its report."""
        for name, start in report.servers:
            filled = self.servers[name].filled
            if filled and not filled.done() and self._processes.starts[name] == start:
                filled.set_result(report.version)

    def note_lost(self, report: ServersLost) -> None:
        """Treat servers as dead that a weight push has dropped, unless the driver knows of it, or restarted them."""
        for name, start in report.servers:
            if self._processes.starts[name] == start and name in self._processes.actors:
                self.declare_lost(name, ProcessDiedError(
                    f"{self._processes.on_host(name)} did not answer in a weight push that failed, refused it, or "
                    f"serves other weights{report.cause and f' ({report.cause})'}, and gets no more weights"
                    f"{self._processes.log_tail(name)}"
                ))

    def declare_lost(self, name: str, error: AsyncRLError) -> None:
        """Treat a server as dead, even if no call to it failed."""
        self.serving.discard(name)
        self._lives.declare_lost(name, error)

    def note_step(self, step: StepDone) -> None:
        """Note the versions that servers have, and forget the deaths so far, because the learner has made a step."""
        self._deaths.clear()
        for metric in step.metrics:
            if metric.key.startswith("version/") and (server := self.servers.get(metric.key.removeprefix("version/"))):
                server.version = int(metric.value)

    def statuses(self) -> list[ServerStatus]:
        """Return the status of each server, for status.json."""
        return [
            ServerStatus(
                name=server.name, state=server.state.value, since_s=server.since_s, version=server.version,
                place=server.attached_url or self._processes.reservation.host_of(server.name),
            )
            for server in self.servers.values()
        ]

    def remove_starting(self) -> None:
        """Kill the servers that do not serve. Call it after training."""
        for name in self.servers.keys() & self._processes.actors.keys() - self.serving:
            self._remove(name)

    # the path of a server

    def _begin_task(self, work: Any) -> None:
        task = self._group.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _begin_keeping(self, name: str) -> None:
        self._kept.add(name)
        self._begin_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        """Start a server, log its reports, and start it again whenever it is lost, until it is no longer wanted.

        Raises:
            AsyncRLError: the server must not be started again, see `_count_death`. The error ends the run.
        """
        server = self.servers[name]
        while name in self._wanted:
            server.enter(ServerState.STARTING)
            server.is_known, is_first = False, self._processes.starts[name] == 0
            try:
                await self._lives.follow(name, self._live(server, is_first))
            except LostError as lost:
                error = lost.error
            leaves, lost_in = self._leaves(server), server.state
            has_served = lost_in is ServerState.SERVING
            if not leaves:
                self._count_death(server, error, has_served)
            again = "is lost, and started again" if name in self._wanted else "is gone"
            self._log.logger.note(f"{name} {again}: {str(error).splitlines()[0]}")
            self._remove(name)
            server.enter(ServerState.GONE)
            if server.kind == "rollout" and self._processes.starts[name]:
                num_groups = await self._abandon(name)
                whither = "go to other servers" if self.rollouts else "wait until a server is back: no other one runs"
                self._log.logger.note(f"{name}: the prompts of its {num_groups} running groups {whither}")
            if leaves or not self._processes.reservation.has_host(name):
                self._log.left(name)
            await self._changed.notify()
            self._check_minimum()
            if not leaves and not has_served and self._can_wait(server):
                server.retry_s = 2 * server.retry_s or RETRY_S
                if lost_in is ServerState.STARTING:
                    server.retry_s = min(server.retry_s, LONGEST_RETRY_S)
        self._log.left(name)
        self._processes.reservation.release(name)
        self._kept.discard(name)

    def _leaves(self, server: Server) -> bool:
        return server.state is ServerState.DRAINING or server.name not in self._wanted

    async def _live(self, server: Server, is_first: bool) -> None:
        """Start a server, and log its reports until it is lost. A rollout server first waits for the learner's weights.

        If a process dies during the start:
            this server     LostError is raised, and `_keep` starts the server once more
            the buffer      `connect` only opens a socket, which reaches the next buffer too
            the learner     its end ends the run, which cancels the start

        Raises:
            LostError: the server was lost.
        """
        name, version = server.name, None
        await asyncio.sleep(server.retry_s)
        await self._processes.reservation.find_place(name)
        async with self._on_shared_gpu(name):
            await self._start(server)
            if server.kind != "judge":
                await self._connect(server)
            server.filled = asyncio.get_running_loop().create_future()
            if joins_late := self._is_learner_up.is_set():
                self._log.logger.note(f"{name}: its engine is up after {time.time() - server.since_s:.1f} s")
            server.enter(ServerState.FILLING)
            await self._changed.notify()
            await self._is_learner_up.wait()
            if server.kind != "judge":
                learner: Any = self._processes.actors["learner/0"]
                adding = learner.add_server.remote(name, server.url, self._processes.starts[name])
                await self._processes.call("learner/0", adding, self._config.timeouts.limit("silent_s"), "the addition")
            server.is_known = True
            await self._changed.notify()
            if server.kind == "rollout":
                version = server.version = await self._filled(server)
        if not is_first:
            self._log.restarted(name, version)
        elif joins_late:
            self._log.logger.note(f"{name} has joined, with the weights of version {version}")
        await self._serve(server)

    @asynccontextmanager
    async def _on_shared_gpu(self, name: str) -> AsyncIterator[None]:
        """Within this context a server that shares a GPU with the learner can start.

        It waits for the end of the learner's step, so that the learner has released its memory. The next step waits
        until the server has joined or the block ends. If servers and learner share no GPUs, or the learner has not
        started, it does nothing.

        Raises:
            LostError: the step did not end in time, and other servers serve.
            AsyncRLError: it did not end in time, and no other does, or learner rank 0 has died.
        """
        if not (self._config.shares_gpus and self._is_learner_up.is_set()):
            yield
            return
        learner: Any = self._processes.actors["learner/0"]
        beginning, what = learner.begin_start.remote(name), f"the end of the learner's step, before {name} starts"
        try:
            try:
                await self._processes.call("learner/0", beginning, self._push_limit, what)
            except WaitTimeoutError as error:
                raise self._in_vain(self.servers[name], error) from None
            yield
        finally:
            learner.end_start.remote(name)

    @property
    def _push_limit(self) -> Limit:
        """How long a server waits for learner rank 0 to end its step or push."""
        timeouts = self._config.timeouts
        return Limit(timeouts.batch_s + timeouts.silent_s, "timeouts.batch_s + timeouts.silent_s")

    async def _start(self, server: Server) -> None:
        """Start the process and the engine of a server on its host. Workers hear of a judge server's new URL.

        Raises:
            LostError: the server failed.
        """
        name, timeouts = server.name, self._config.timeouts
        async with self._turn:
            if server.kind == "judge":
                from async_rl.run.processes.judge_actor import JudgeActor

                actor: Any = self._processes.start(name, JudgeActor, self._config.judge_names.index(name))
            else:
                index = self._config.server_names.index(name)
                actor = self._processes.start(name, server_class(name), index, server.attached_url)
            self._watchdog.begin(name, is_up=False)
            if not runs_here(self._config):  # else the driver has found all files before the start
                await self._call(name, actor.find_files.remote(), timeouts.limit("batch_s"), "the models of its host")
                if server.kind != "judge" and not server.attached_url:
                    await self._check_memory(name, actor)
            has_url = bool(server.url)
            server.url = await self._call(name, actor.start.remote(), timeouts.limit("startup_s"), "the start")
            if server.kind == "judge" and has_url:
                for worker in self._config.server_names:
                    if worker in self._processes.actors:
                        self._processes.actors[worker].judges_at.remote(self._judge_urls)

    async def _check_memory(self, name: str, actor: Any) -> None:
        """Check that the GPU of a server on a cluster has room for its weights.

        Raises:
            LostError: it has not, or the server failed.
        """
        limit = self._config.timeouts.limit("startup_s")
        if num_bytes := await self._call(name, actor.gpu_bytes.remote(), limit, "the size of its GPU"):
            gpus = self._processes.reservation.gpus
            checking: Any = self._processes.actors["learner/0"].check_server_memory.remote(num_bytes, gpus)
            try:
                await self._processes.call("learner/0", checking, limit, f"the memory of {name}")
            except ConfigError as error:
                raise LostError(error) from None

    async def _connect(self, server: Server) -> None:
        """Connect the worker of a server to the buffer and the judge's servers.

        Raises:
            LostError: the server failed.
            WaitTimeoutError: the judge's servers did not start in time.
        """
        limit = self._config.timeouts.limit("startup_s")
        await self._changed.wait_until(lambda: all(self._judge_urls), limit, "the judge's servers")
        actor: Any = self._processes.actors[server.name]
        connecting = actor.connect.remote(
            self._buffer_address, self._judge_urls, self._processes.starts[server.name]
        )
        await self._call(server.name, connecting, limit, "connecting")

    @property
    def _judge_urls(self) -> list[str]:
        """The URLs of all judge servers, or their last ones; empty before the first start of a server."""
        return [self.servers[name].url for name in self._config.judge_names]

    async def _filled(self, server: Server) -> int:
        """Wait until a server has the learner's weights, and return their version.

        Raises:
            LostError: the learner made no push in time, and other servers serve.
            WaitTimeoutError: it made none, and no other server serves.
        """
        assert server.filled is not None
        limit, startup_s = self._push_limit, self._config.timeouts.startup_s
        if self._config.shares_gpus and len(self.servers) > 1:  # the learner pushes once none starts any more
            limit = Limit(limit.seconds + 2 * startup_s, f"{limit.key} + 2 timeouts.startup_s")
        try:
            async with asyncio.timeout(limit.seconds):
                return await server.filled
        except TimeoutError:
            error = WaitTimeoutError(f"{server.name} waited {limit} for the learner's weights")
            raise self._in_vain(server, error) from None

    def _in_vain(self, server: Server, error: WaitTimeoutError) -> Exception:
        """Return the error of a server that has waited for the learner: it ends the run unless other servers serve."""
        return LostError(error) if self._can_wait(server) else error

    async def _serve(self, server: Server) -> None:
        """Log the reports of a server that has started, until it is lost.

        Raises:
            LostError: the server is lost.
        """
        name = server.name
        server.enter(ServerState.SERVING)
        server.retry_s = 0.0
        self.serving.add(name)
        self._proven.add(server.kind)
        if server.kind != "judge":
            self._log.joined(name)
        self._check_minimum()
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

    def _remove(self, name: str) -> None:
        """Kill the process of a lost server. The learner makes no more pushes to it."""
        self._watchdog.forget(name)
        self.serving.discard(name)
        self._log.lost(name)
        if name in self._processes.actors:
            self._processes.kill(name)
        if self._is_learner_up.is_set() and name in self._config.server_names:
            self._processes.actors["learner/0"].leave_server.remote(name, self._processes.starts[name])

    def _count_death(self, server: Server, error: AsyncRLError, has_served: bool) -> None:
        """Count a death of a server, unless it failed to start while others serve.

        Args:
            error: the cause of the death.

        Raises:
            AsyncRLError: `error`, if the server must not be started again. No server of its kind has ever served, or
                it failed in its work, or it has died more than placement.rollout.max_restarts times since the last
                step. If another server of its kind has served, a start may fail because its host lacks a file.
        """
        is_mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError | ConfigError)
        if server.kind not in self._proven or (has_served and not is_mendable):
            raise error
        if not has_served and self._can_wait(server):
            return
        self._deaths[server.name] += 1
        limit = self._placed.max_restarts
        if self._deaths[server.name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None

    def _can_wait(self, server: Server) -> bool:
        """Return whether the run can go on for a while without a server, because others of its kind serve."""
        return any(self.servers[name].kind == server.kind for name in self.serving - {server.name})

    # joining, leaving, too few

    async def _look(self) -> None:
        """Look every second for hosts that leave, for requests about servers, and for a pause that is too long.

        Raises:
            WaitTimeoutError: too few servers have served for timeouts.pause_s.
        """
        limit = self._config.timeouts.limit("pause_s")
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            left_s_of = self._processes.reservation.seconds_left()
            for name, left_s in ((name, left_s_of[name]) for name in left_s_of.keys() & self._processes.actors.keys()):
                self._leave(name, min(self._placed.leave_s, left_s - SPARE_S), "its host leaves")
            for request in take_requests(self._config.run_dir):
                self._answer(request)
            if self._paused_s is not None and time.monotonic() - self._paused_s > limit.seconds:
                raise WaitTimeoutError(
                    f"the run waited {limit} for {self._placed.fewest} rollout servers. Resume it when hosts have "
                    "room, or with a lower placement.rollout.servers.min"
                )

    def _answer(self, request: ServerRequest) -> None:
        """Do what a person has asked for, or log why not."""
        rollouts = sorted((n for n in self._wanted if n.startswith("rollout")), key=_number)
        unwanted = [n for number in range(self._placed.most) if (n := f"rollout/{number}") not in self._wanted]
        urls = self._config.rollout.server_urls
        kept = [each for each in self.servers.values() if each.kind == "rollout" and each.name in self._kept]
        places = {each.attached_url or each.name: each.state.value for each in kept}
        match request.action:
            case "remove" if request.name in {each.name for each in kept}:
                self._wanted.pop(request.name, None)
                self._leave(request.name, 0.0 if request.now else self._placed.leave_s, "a person has removed it")
            case "max" if 1 <= request.number <= self._placed.most:
                for name in rollouts[request.number :]:
                    del self._wanted[name]
                    self._leave(name, self._placed.leave_s, f"the run may have {request.number} servers")
                more = 0 if urls else max(0, request.number - len(rollouts))  # with URLs the run starts no server
                for name in unwanted[:more]:
                    self._join(name)
            case "add" if urls and request.url not in places and (free := [n for n in unwanted if n not in self._kept]):
                self._join(free[0], request.url)
            case _:
                there = ", ".join(f"{place} ({state})" for place, state in places.items())
                self._log.logger.note(f"refused: {request}. Of at most {self._placed.most} servers the run has {there}")

    def _join(self, name: str, url: str = "") -> None:
        """Start a server, or start it again once it has left."""
        self._log.logger.note(f"{name} joins{url and f', at {url}'}")
        self._wanted[name] = url
        if name not in self._kept:
            self.servers[name] = Server(name, url)
            self._begin_keeping(name)

    def _leave(self, name: str, limit_s: float, why: str) -> None:
        """Let a server leave. A server that serves may first finish its groups, for at most `limit_s` seconds."""
        server, end_s = self.servers[name], time.monotonic() + limit_s
        if server.state is ServerState.DRAINING:
            server.drain_end_s = min(server.drain_end_s, end_s)
        elif server.state is ServerState.SERVING and limit_s > 0 and server.kind == "rollout":
            server.enter(ServerState.DRAINING)
            server.drain_end_s = end_s
            self.serving.discard(name)
            self._log.logger.note(f"{name} drains for at most {limit_s:.0f} s: {why}")
            self._begin_task(self._drain(server, why))
        elif server.state is not ServerState.GONE:
            server.enter(ServerState.DRAINING)
            self.declare_lost(name, ProcessDiedError(f"{name} leaves: {why}"))

    async def _drain(self, server: Server, why: str) -> None:
        """Wait until a server has no group any more, or its time is over, then declare it lost."""
        name, start, is_told = server.name, self._processes.starts[server.name], False
        while True:
            num_groups = await self._retire(name)
            if server.state is not ServerState.DRAINING or self._processes.starts[name] != start:
                return  # it is lost meanwhile
            if num_groups == 0 or time.monotonic() > server.drain_end_s:
                self.declare_lost(name, ProcessDiedError(f"{name} leaves: {why}"))
                return
            if not is_told:  # only now: a slot after the next push would want newer weights than it gets
                self._processes.actors["learner/0"].leave_server.remote(name, start)
                is_told = True
            await asyncio.sleep(DRAIN_INTERVAL_S)

    def _check_minimum(self) -> None:
        """Pause the learner if fewer servers serve, or will soon, than the minimum; let it go on once enough serve."""
        count, fewest = len(self.rollouts), self._placed.fewest
        filling = [
            each for each in self.servers.values() if each.kind == "rollout" and each.state is ServerState.FILLING
        ]
        if not (self._placed.is_elastic and self._is_learner_up.is_set()):
            return
        if self._paused_s is None and count + len(filling) < fewest:
            self._paused_s = time.monotonic()
            self._log.logger.note(f"{count} of at least {fewest} rollout servers serve: the learner waits")
            self._watchdog.too_few_servers = f"{PAUSED}: fewer than {fewest} rollout servers serve"
            self._begin_task(self._tell_pause())
        elif self._paused_s is not None and count >= fewest:
            self._paused_s, self._watchdog.too_few_servers = None, ""
            self._log.logger.note(f"{count} rollout servers serve: the learner goes on")
            self._begin_task(self._tell_pause())

    async def _tell_pause(self) -> None:
        """Tell the learner whether it is paused now. One call ends before the next, else they could change places."""
        async with self._telling:
            learner: Any = self._processes.actors["learner/0"]
            call = (learner.go_on if self._paused_s is None else learner.pause).remote(NO_SERVERS)
            limit = self._config.timeouts.limit("silent_s")
            await self._processes.call("learner/0", call, limit, "the pause below placement.rollout.servers.min")


def _number(name: str) -> int:
    return int(name.partition("/")[2])
