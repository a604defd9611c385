"""Supervision of a running pipeline: one asyncio task follows each process, one more watches them all.

    what happens                                what the driver does
    a rollout server or its worker dies         starts it again, see Supervisor._restart
    a push drops a rollout server               the same
    the buffer's process dies                   starts another one from its journal; without a journal the run ends
    a learner rank fails or dies                ends the run with one error that names it, its host and its last log
    a process gives no sign of life             takes it for dead after timeouts.silent_s; the buffer, if it can be
                                                replaced, already after timeouts.wire_s / 3
    a process waits longer than its limit       takes it for dead
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle

from async_rl.config import Config, Limit
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.actors import RolloutActor
from async_rl.driver.lost_processes import LostProcesses, ServerLostError
from async_rl.driver.run_log import RunLog
from async_rl.driver.signals import StopSignals
from async_rl.driver.watchdog import Watchdog
from async_rl.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError, WeightSyncError
from async_rl.messages.reports import EvaluationDue, LearnerReport, ServersLost, StepDone

GRACE_S = 3.0
"""A learner rank that dies makes its peers fail. An error of a peer ends the run only if no death shows up for so
long."""

ReviveBuffer = Callable[[ProcessKilledError], Coroutine[Any, Any, None]]
"""Starts another buffer in the place of one that was killed, or raises its argument."""


class Supervisor:
    """Collects what the processes report until training ends, and replaces rollout servers and buffers that die.

    Args:
        processes: may still be empty; before `train` all of them are started and introduced to each other.
    """

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._lost = LostProcesses()
        self._running: set[str] = set()
        """Rollout servers that generate; the others are being started again."""
        self._urls: dict[str, str] = {}
        """URLs of the rollout servers that were started again."""
        self._deaths: Counter[str] = Counter()
        """By rollout server, since the last step."""
        self._streams: dict[str, Any] = {}
        """The reports of each process; the last stream is kept until the run ends."""
        self._evaluations: set[asyncio.Task[None]] = set()
        self.watchdog = Watchdog(config, processes)

    def train(self, buffer_address: str, revive_buffer: ReviveBuffer, signals: StopSignals) -> None:
        """Returns when every learner rank has finished and every step is logged.

        Raises:
            AsyncRLError: the run can't go on; the error of the process that is the cause.
            KeyboardInterrupt: after a signal, the learner wrote no checkpoint within timeouts.interrupt_s.
        """
        self._buffer_address, self._revive_buffer = buffer_address, revive_buffer
        try:
            asyncio.run(self._train(signals))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _train(self, signals: StopSignals) -> None:
        names = list(self._processes.actors)
        servers = [name for name in names if name.startswith("rollout")]
        self._learning = {name for name in names if name.startswith("learner")}
        self._buffer: ActorHandle | None = self._processes.actors["buffer"]
        self._changed = asyncio.Condition()
        """Notified when something was logged and when there is another buffer."""
        for name in names:
            self.watchdog.begin(name)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with signals.deferred(lambda: loop.call_soon_threadsafe(stop.set)):
            async with asyncio.TaskGroup() as self._tasks:  # the first failure cancels all tasks, and is raised
                learners = [self._tasks.create_task(self._follow_learner(name)) for name in self._learning]
                endless = [self._keep_buffer(), *map(self._keep_server, servers), self._watch(), self._end_on(stop)]
                background = [self._tasks.create_task(each) for each in endless]
                await asyncio.wait(learners)  # without a limit: `_watch` ends the run if one of them hangs
                limit = self._config.timeouts.limit("server_start_s")
                await self._wait_until(lambda: not self._log.has_open_steps, limit, "the rollout servers' last reports")
                while self._evaluations:
                    await asyncio.wait(self._evaluations)  # `_evaluate` has its limit
                for task in background:
                    task.cancel()

    async def _follow_learner(self, name: str) -> None:
        """Take in the reports of a learner rank until it has finished. Its failure ends the run."""
        try:
            await self._lost.until_lost(name, self._read_reports(name))
        except AsyncRLError as error:
            if not isinstance(error, ProcessDiedError) and len(self._learning) > 1:
                await asyncio.sleep(GRACE_S)  # if a peer has died, its task ends the run meanwhile
            raise
        self._learning.discard(name)

    async def _keep_server(self, name: str) -> None:
        """Take in the reports of a rollout server; each time it is lost, start it again."""
        life = self._generate(name)
        while True:
            try:
                await self._lost.until_lost(name, life)
            except ServerLostError as lost:
                error: AsyncRLError = lost.args[0]
            self._check_restart(name, error)
            self._log.logger.note(f"{name} is lost, and started again: {str(error).splitlines()[0]}")
            self._remove_server(name)
            await self._notify()
            self._processes.actors["learner/0"].leave_server.remote(name)
            life = self._restart(name)

    async def _restart(self, name: str) -> None:
        """Start a lost rollout server again, have the learner bring it up to date, and take in its reports.

        Whatever dies while this waits:
            this server     `_keep_server` catches ServerLostError and starts it once more
            the buffer      `_abandon` asks the next one; `connect` only opens a socket, which outlives a buffer
            the learner     `_follow_learner` ends the run, which cancels this
        """
        timeouts = self._config.timeouts
        num_groups = await self._abandon(name)
        self._log.logger.note(f"{name}: {num_groups} running groups go to others")
        actor = self._processes.start(name, RolloutActor, self._config, int(name.partition("/")[2]))
        self.watchdog.begin(name)
        url = self._urls[name] = await self._call_server(
            name, actor.start.remote(), timeouts.limit("server_start_s"), "the start"
        )
        await self._abandon(name)  # again: a last request of the dead server may have reached the buffer meanwhile
        connecting = actor.connect.remote(self._buffer_address)
        await self._call_server(name, connecting, timeouts.limit("join_s"), "connecting")
        version = await self._join(name, url)
        self._log.logger.note(f"{name} is back, with the weights of version {version}")
        await self._generate(name)

    async def _abandon(self, name: str) -> int:
        """Have the buffer give the running groups of a dead server to others; returns how many there were.

        If the buffer dies before it answers, the next one is asked.
        """
        timeouts, dead = self._config.timeouts, None
        while True:
            buffer = await self._live_buffer(dead)
            call: Any = buffer.abandon.remote(name)
            try:
                num_groups: int = await self._processes.call(
                    "buffer", call, timeouts.limit("wire_s"), f"an answer about the groups of {name}"
                )
                return num_groups
            except ProcessKilledError:  # `_keep_buffer` replaces it, or ends the run
                dead = buffer

    async def _live_buffer(self, dead: ActorHandle | None) -> ActorHandle:
        """Wait until the buffer runs again and return its actor, which is not `dead`. Raises WaitTimeoutError."""
        limit = Limit(2 * self._config.timeouts.join_s, "twice timeouts.join_s")
        await self._wait_until(lambda: self._buffer is not None and self._buffer is not dead, limit, "another buffer")
        assert self._buffer is not None
        return self._buffer

    async def _join(self, name: str, url: str) -> int:
        """Have the learner push its weights to a server that is back; returns their version.

        If the push loses the server, this raises ServerLostError. Any other failure is the learner's: it ends the run.
        """
        timeouts = self._config.timeouts
        limit = Limit(timeouts.batch_s + timeouts.silent_s, "timeouts.batch_s + timeouts.silent_s")
        call: Any = self._processes.actors["learner/0"].join_server.remote(name, url)
        try:
            version: int = await self._processes.call("learner/0", call, limit, f"a push to {name}")
            return version
        except WeightSyncError as error:
            raise ServerLostError(error) from None

    async def _generate(self, name: str) -> None:
        """Take in the reports of a server that generates, until it is lost."""
        self._running.add(name)
        try:
            await self._read_reports(name)
        except AsyncRLError as error:
            raise ServerLostError(error) from None
        log = self._processes.log_tail(name)
        raise ServerLostError(ProcessDiedError(f"{name} stopped by itself{log}"))

    async def _call_server(self, name: str, call: Any, limit: Limit, what: str) -> Any:
        try:
            return await self._processes.call(name, call, limit, what)
        except AsyncRLError as error:
            raise ServerLostError(error) from None

    async def _keep_buffer(self) -> None:
        """Have the buffer serve; each time its process is killed, start another one from its journal."""
        while True:
            try:
                await self._lost.until_lost("buffer", self._serve_buffer())
            except ProcessKilledError as error:
                self._buffer = None
                await self._revive_buffer(error)
            self.watchdog.begin("buffer")
            self._buffer = self._processes.actors["buffer"]
            await self._notify()

    async def _serve_buffer(self) -> None:
        with self._processes.named_failure("buffer"):
            await self._processes.actors["buffer"].serve.remote()
        raise ProcessDiedError(f"buffer stopped while the run was going on{self._processes.log_tail('buffer')}")

    async def _watch(self) -> None:
        """Declare processes lost that are silent or wait too long."""
        while True:
            for name, error in await self.watchdog.look():
                if name == "buffer":
                    if self._buffer is None:  # the next one is just starting
                        continue
                    self._log.logger.note(str(error).splitlines()[0])
                    self._processes.kill(name)  # it may only hang
                self._declare_lost(name, error)

    async def _end_on(self, stop: asyncio.Event) -> None:
        """After a signal, have the learner end with a checkpoint."""
        await stop.wait()
        limit_s = self._config.timeouts.interrupt_s
        self._log.logger.note(
            f"interrupted: ending with a checkpoint after this step, within {limit_s:.0f} s (timeouts.interrupt_s). "
            "Again to end at once"
        )
        for name in self._learning:
            self._processes.actors[name].stop.remote()
        for evaluation in self._evaluations:
            evaluation.cancel()
        await asyncio.sleep(limit_s)
        raise KeyboardInterrupt(f"no checkpoint within {limit_s:.0f} s")

    def _declare_lost(self, name: str, error: AsyncRLError) -> None:
        self._running.discard(name)
        self._lost.declare(name, error)

    async def _wait_until(self, condition: Callable[[], bool], limit: Limit, what: str) -> None:
        """Wait for something that `_notify` is called after; raises WaitTimeoutError."""
        try:
            async with asyncio.timeout(limit.seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise WaitTimeoutError(f"the driver waited {limit} for {what}") from None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _read_reports(self, name: str) -> None:
        """Take in the reports of a process until it ends; `_watch` sees to it that it does not fall silent."""
        run: Any = self._processes.actors[name].run
        stream = self._streams[name] = run.options(num_returns="streaming").remote()
        async for report in self._processes.reports(name, stream):
            self._log.add(name, report)
            if name == "learner/0":
                self._on_learner_report(report)
            await self._notify()

    def _on_learner_report(self, report: LearnerReport) -> None:
        match report:
            case StepDone():
                self._deaths.clear()
            case ServersLost():
                for name, url in report.servers:
                    # Otherwise its end was seen already: it is on its way back, or has come back at another URL.
                    if name in self._running and self._urls.get(name, url) == url:
                        self._declare_lost(name, ProcessDiedError(
                            f"{self._processes.on_host(name)} did not answer after a weight push that failed, and gets "
                            f"no more weights{self._processes.log_tail(name)}"
                        ))
            case EvaluationDue():
                evaluation = self._tasks.create_task(self._evaluate(report.version))
                self._evaluations.add(evaluation)
                evaluation.add_done_callback(self._evaluations.discard)

    async def _evaluate(self, version: int) -> None:
        """Evaluate `version` beside training, on one server: the others would answer the same.

        If the server dies, another one is asked. If it takes too long, this version goes without an evaluation.
        """
        limit = self._config.timeouts.limit("eval_s")
        while self._running:
            name = min(self._running)
            actor: Any = self._processes.actors[name]
            call = actor.evaluate.remote(version, beside_training=True)
            try:
                report = await self._processes.call(name, call, limit, f"the evaluation of version {version}")
                self._log.add_eval(report)
                break
            except WaitTimeoutError as error:
                self._log.logger.note(f"version {version} is not evaluated: {str(error).splitlines()[0]}")
                break
            except ProcessDiedError as error:
                if self._processes.actors.get(name) is actor:
                    self._declare_lost(name, error)
        else:
            self._log.logger.note(f"version {version} is not evaluated: no rollout server is up")
        self._processes.actors["learner/0"].evaluated.remote()

    def _check_restart(self, name: str, error: AsyncRLError) -> None:
        """Raises `error` if the server must not be started again, or died too often."""
        self._deaths[name] += 1
        limit = self._config.placement.rollout.max_restarts
        is_mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError)
        if not is_mendable or self._config.staleness.mode == "exact":
            raise error
        if self._deaths[name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None

    def _remove_server(self, name: str) -> None:
        self.watchdog.forget(name)
        self._running.discard(name)
        self._log.lost(name)
        self._processes.kill(name)

    def end_restarts(self) -> list[str]:
        """After training: end the servers that are still on their way back; returns the names of those that are up."""
        servers = sorted(name for name in self._processes.actors if name.startswith("rollout"))
        for name in [name for name in servers if name not in self._running]:
            self._remove_server(name)
        return [name for name in servers if name in self._running]

    def give_up(self, error: BaseException) -> None:
        """The run ends with `error`: keep what may explain it."""
        if isinstance(error, WaitTimeoutError):
            asyncio.run(self._processes.dump_stacks())
        with suppress(OSError):  # of a full disk, say, which may be `error` itself
            self.watchdog.write_status(f"ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
