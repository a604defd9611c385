"""The servers of a run with the real server pool. Processes, hosts and buffer are fakes in the process of the test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_rl.base.config import Limit
from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError
from async_rl.base.messages.reports import ServersFilled
from async_rl.base.run_dir.run_dir import locked
from async_rl.base.run_dir.server_requests import Action, ServerRequest, request_servers
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes import server_pool
from async_rl.run.processes.lives import Change, Lives
from async_rl.run.processes.server_pool import NO_SERVERS, ServerPool
from async_rl.run.processes.watchdog import Watchdog
from tests.kit.configs import make_config

GONE = ProcessDiedError("gone")


class Learner:
    """Learner rank 0. It fills each server that it gets, while it has weights."""

    def __init__(self, run: FakeServers) -> None:
        self._run = run
        self.has_weights = True
        self.calls: list[tuple[str, str, int]] = []
        self.pauses: list[str] = []
        self.error: ConfigError | None = None
        """What the check of a server's memory raises."""

    def __getattr__(self, name: str) -> Any:
        async def answer() -> Any:
            if name == "check_server_memory" and self.error:
                raise self.error

        def remote(*arguments: Any) -> Any:
            match name, arguments:
                case ("add_server", (server, _, start)):
                    self.calls.append(("add", server, start))
                    if self.has_weights and server.startswith("rollout"):
                        asyncio.get_running_loop().call_soon(self.fill, server, start)
                case ("leave_server", (server, start)):
                    self.calls.append(("leave", server, start))
                case ("pause" | "go_on", (waits_on,)):
                    self.pauses.append(name)
                    assert waits_on == NO_SERVERS
            return asyncio.ensure_future(answer())

        return SimpleNamespace(remote=remote)

    def fill(self, server: str, start: int, version: int = 7) -> None:
        self._run.pool.note_filled(ServersFilled(servers=((server, start),), version=version))


class Actor:
    """A server's process."""

    def __init__(self, run: FakeServers, name: str, url: str) -> None:
        self._run, self._name, self._url = run, name, url
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The end of its reports."""

    def __getattr__(self, name: str) -> Any:
        async def answer() -> Any:
            if name == "start":
                return await self._start()
            return 1000 if name in ("kv_tokens", "gpu_bytes") else None

        def remote(*arguments: Any) -> Any:
            if name == "judges_at":
                self._run.judge_urls[self._name] = arguments[0]
            return asyncio.ensure_future(answer())

        return SimpleNamespace(remote=remote)

    async def _start(self) -> str:
        self._run.starting.append(self._name)
        self._run.most_starting = max(self._run.most_starting, len(self._run.starting))
        await asyncio.sleep(0.01)
        self._run.starting.remove(self._name)
        while self._name in self._run.slow:
            await asyncio.sleep(0.01)
        if (errors := self._run.failures.get(self._name)) and (error := errors.pop(0)):
            raise error
        return self._url or f"http://{self._name}/{self._run.starts[self._name]}"


class FakeServers:
    """The servers of a run, and stand-ins for its processes, its hosts and its buffer."""

    gpus = 0.0

    def __init__(
        self, folder: Path, servers: int | dict[str, int], urls: Sequence[str] = (), leave_s: float = 30.0,
        max_restarts: int = 1, evals: int = 0, judges: int = 0, one_by_one: bool = False,
        colocated: bool = False, wanted: dict[str, str] | None = None, **timeouts: float,
    ) -> None:
        self.config = make_config(
            run={"name": "r", "dir": folder}, logging={"wandb": "disabled"}, rollout={"server_urls": list(urls)},
            placement={
                "rollout": {"servers": servers, "leave_s": leave_s, "max_restarts": max_restarts},
                "eval": {"servers": evals}, "judge": {"servers": judges}, "colocated": colocated,
            },
            staleness={"max": 0 if colocated else 1},
            judge={"path": "judge" if judges else ""},
            eval={"every_steps": 1}, timeouts={"pause_s": 60, **timeouts},
        )
        self.config.run_dir.mkdir(exist_ok=True)
        self.log = RunLog(self.config)
        self.notes: list[str] = []
        self.log.logger.note = lambda text: self.notes.append(text)  # type: ignore[method-assign]
        self.starts, self.learner, self.reservation = Counter[str](), Learner(self), self
        self.actors: dict[str, Any] = {"learner/0": self.learner}
        self.failures: dict[str, list[AsyncRLError | None]] = {}
        """The errors of a server's next starts; None: that start works."""
        self.slow: set[str] = set()
        """The servers whose engines do not come up yet."""
        self.without_host: set[str] = set()
        """The servers for which no host has room."""
        self.left_s: dict[str, float] = {}
        """The seconds until the hosts of servers leave."""
        self.groups = Counter[str]()
        """The running groups of each server."""
        self.starting: list[str] = []
        self.most_starting = 0
        """The most servers that have started at the same time."""
        self.asked: list[tuple[str, str, int]] = []
        """What the buffer was asked."""
        self.judge_urls: dict[str, list[str]] = {}
        """[worker] where it was told that the judge servers are, after its connection."""
        self.released: list[str] = []
        lives, changed = Lives(), Change()
        self.watchdog = Watchdog(self.config, self)  # type: ignore[arg-type]
        self.pool = ServerPool(
            self.config, self, self.log, self.watchdog, lives, changed, self._read_reports,  # type: ignore[arg-type]
            self._abandon, self._retire, {} if wanted is None else wanted, one_by_one=one_by_one,
        )

    # the processes

    def start(self, name: str, cls: type, index: int, url: str = "") -> Actor:
        self.starts[name] += 1
        self.actors[name] = Actor(self, name, url)
        return self.actors[name]

    async def call(self, name: str, call: Awaitable[Any], limit: Limit, what: str) -> Any:
        return await call

    def kill(self, name: str) -> None:
        del self.actors[name]

    def log_tail(self, name: str) -> str:
        return ""

    def on_host(self, name: str) -> str:
        return name

    # the hosts

    async def find_place(self, server: str) -> None:
        while server in self.without_host:
            await asyncio.sleep(0.01)

    def has_host(self, server: str) -> bool:
        return server not in self.without_host

    def host_of(self, server: str) -> str:
        return "10.0.0.9"

    def release(self, server: str) -> None:
        self.released.append(server)

    def seconds_left(self) -> dict[str, float]:
        return dict(self.left_s)

    # the supervisor

    async def _read_reports(self, name: str) -> None:
        await self.actors[name].end

    async def _abandon(self, name: str) -> int:
        await asyncio.sleep(0.01)
        self.asked.append(("abandon", name, self.starts[name]))
        self.groups[name] = 0
        return 3

    async def _retire(self, name: str) -> int:
        self.asked.append(("retire", name, self.starts[name]))
        return self.groups[name]

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """A block in which the run goes on: enough servers have started, and the learner too.

        Raises:
            AsyncRLError: the error that ended the run.
        """
        try:
            with locked(self.config.run_dir):
                async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                    self.pool.begin(tasks, "tcp://buffer")
                    await self.pool.until_up()
                    await self.pool.until_known()
                    await self.until(lambda: len(self.serving()) >= self.config.placement.rollout.fewest)
                    yield
                    for task in self.pool.tasks:
                        task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.log.close()

    async def ended(self) -> None:
        """Wait until an error ends the run."""
        async with self.going_on():
            await asyncio.Event().wait()

    async def until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            await asyncio.sleep(0.01)

    async def looks(self) -> None:
        """Wait until the pool has looked for requests and hosts."""
        await asyncio.sleep(5 * server_pool.LOOK_INTERVAL_S)

    def state(self, name: str) -> str:
        return {server.name: server.state for server in self.pool.statuses()}[name]

    def serving(self) -> list[str]:
        return self.pool.rollouts

    def ask(self, action: Action, name: str = "", number: int = 0, url: str = "", now: bool = False) -> None:
        request = ServerRequest(action=action, name=name, number=number, url=url, now=now)
        request_servers(self.config.run_dir, request)

    def die(self, name: str, error: AsyncRLError = GONE) -> None:
        self.actors[name].end.set_exception(error)

    def has_noted(self, text: str) -> bool:
        return any(text in note for note in self.notes)
