"""The driver's main loop: `Supervisor.train` reads the reports of all processes, and restarts those that die.

One asyncio task follows each process. One more task finds processes that hang (watchdog.py).

    event                                       the driver's action
    a server or its worker dies                 restarts both, see Supervisor._restart
    a judge server dies                         restarts it at its old address; workers wait for its verdicts
    a weight push drops a server                restarts the server and its worker
    the buffer's process dies                   starts a new one from the journal; without a journal the run ends
    a learner rank fails or dies                ends the run; the error shows the rank, its host and the end of its log
    a process does not answer                   treats it as dead after timeouts.silent_s; a buffer with a journal
                                                already after timeouts.buffer_s / 3
    a process waits longer than its limit       treats it as dead
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ray.actor import ActorHandle

from async_rl.base.config import Config, Limit
from async_rl.base.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError, WeightSyncError
from async_rl.base.messages.reports import EvaluationDue, EvaluationSkipped, LearnerReport, ServersLost, StepDone
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import server_class
from async_rl.run.processes.signals import StopSignals
from async_rl.run.processes.watchdog import Watchdog
from async_rl.run.watch.evaluations import RunningEvaluations

if TYPE_CHECKING:
    from async_rl.run.watch.run_watch import RunWatch

SMALLER = 0.9
"""If a restarted server has less than this share of its first KV cache, the driver logs it."""
GRACE_S = 3.0
"""Seconds to wait after a learner rank fails. If a peer's death is the cause, that error ends the run meanwhile."""


class ServerLostError(Exception):
    """A server is lost and may be restarted. `args[0]` is the AsyncRLError that says why."""


ReviveBuffer = Callable[[ProcessKilledError], Coroutine[Any, Any, None]]
"""A function that starts a new buffer after a death. It gets the error of the death, and raises it if it can't."""


class Supervisor:
    """Follows all processes until training ends: logs their reports, and restarts servers and buffers that die."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._servers = {*config.server_names, *config.judge_names}
        self._lives: dict[str, asyncio.Task[None]] = {}
        """The task that follows each process. It ends when the process ends or is declared lost."""
        self._reasons: dict[str, AsyncRLError] = {}
        """Why a process was declared lost, until its `_until_lost` raises the error."""
        self._running: set[str] = set()
        """The servers that work. The others are being restarted."""
        self._urls: dict[str, str] = {}
        """The URLs of restarted servers."""
        self._restarts = RestartLimit(config)
        self._first_kv_tokens: dict[str, int] = {}
        """The number of tokens that fitted into each server's KV cache at its first start."""
        self._streams: dict[str, Any] = {}
        """The stream of reports of each process, kept because Ray ends a stream without a reference."""
        self._evaluations = RunningEvaluations(config, processes, log, self._running, self._declare_lost)
        self.watchdog = Watchdog(config, processes)
        self.watch: RunWatch | None = None
        """Takes watch.action at alarms; None: the watcher only warns, and the run is not resumed."""
        if config.watch.acts or config.run.resume:
            from async_rl.run.watch.run_watch import RunWatch

            self.watch = RunWatch(config, processes, log, self.watchdog)

    def train(
        self, buffer_address: str, revive_buffer: ReviveBuffer, signals: StopSignals, judge_urls: Mapping[str, str]
    ) -> None:
        """Supervise the processes until all learner ranks have ended and all steps are logged.

        Call it once, when the processes have been started and connected.

        Args:
            revive_buffer: starts a new buffer after a death.
            judge_urls: the URL of each judge server by process name. A restarted judge server keeps its URL.

        Raises:
            AsyncRLError: the first error that ends the run.
            KeyboardInterrupt: the learner did not end within timeouts.interrupt_s of Ctrl-C, or after a second signal.
        """
        self._buffer_address, self._revive_buffer, self._judge_urls = buffer_address, revive_buffer, judge_urls
        try:
            asyncio.run(self._train(signals))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            signals.is_heeded = True

    async def _train(self, signals: StopSignals) -> None:
        names = list(self._processes.actors)
        self._learning = {name for name in names if name.startswith("learner")}
        self._buffer: ActorHandle | None = self._processes.actors["buffer"]
        self._changed = Change()
        """Notified when a report is logged, a server is lost, or a new buffer runs."""
        for name in names:
            self.watchdog.begin(name)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with signals.deferred(lambda: loop.call_soon_threadsafe(stop.set)):
            signals.check()
            if self.watch:
                self.watch.begin()
            async with asyncio.TaskGroup() as self._tasks:  # the first failure is raised and cancels all tasks
                learners = [self._tasks.create_task(self._follow_learner(name)) for name in self._learning]
                background = [self._tasks.create_task(each) for each in (
                    self._keep_buffer(),
                    *(self._keep_server(name) for name in names if name in self._servers),
                    self._watch(signals),
                    self._end_on(stop),
                )]
                await asyncio.wait(learners)  # no time limit: `_watch` ends the run if a rank hangs
                limit, what = self._config.timeouts.limit("startup_s"), "the rollout servers' last reports"
                await self._changed.wait_until(lambda: not self._log.has_open_steps, limit, what)
                await self._evaluations.wait()
                for task in background:
                    task.cancel()

    @property
    def _rollouts(self) -> list[str]:
        """The rollout servers that work."""
        return sorted(name for name in self._running if name.startswith("rollout"))

    async def _follow_learner(self, name: str) -> None:
        """Log the reports of a learner rank until it has finished.

        Raises:
            AsyncRLError: the rank failed. The error ends the run.
        """
        try:
            await self._until_lost(name, self._read_reports(name))
        except AsyncRLError as error:
            if not isinstance(error, ProcessDiedError) and len(self._learning) > 1:
                await asyncio.sleep(GRACE_S)  # if a peer has died, the task that follows it ends the run meanwhile
            raise
        self._learning.discard(name)

    async def _keep_server(self, name: str) -> None:
        """Log a server's reports, and restart the server whenever it is lost.

        Raises:
            AsyncRLError: the server must not be restarted, see RestartLimit.count. The error ends the run.
        """
        gets_weights = name in self._config.server_names  # the judge's servers do not
        life = self._serve(name)
        while True:
            try:
                await self._until_lost(name, life)
            except ServerLostError as lost:
                error: AsyncRLError = lost.args[0]
            self._restarts.count(name, error)
            self._log.logger.note(f"{name} is lost, and started again: {str(error).splitlines()[0]}")
            self._remove_server(name)
            await self._changed.notify()
            if gets_weights:
                self._processes.actors["learner/0"].leave_server.remote(name)
            life = self._restart(name) if gets_weights else self._restart_judge(name)

    async def _restart_judge(self, name: str) -> None:
        """Restart a lost judge server at its old address, which the workers know, and log its reports until it is lost.

        Raises:
            ServerLostError: the server was lost again.
        """
        from async_rl.run.processes.judge_actor import JudgeActor

        index, port = self._config.judge_names.index(name), urlsplit(self._judge_urls[name]).port
        actor: Any = self._processes.start(name, JudgeActor, index, port)
        self.watchdog.begin(name, is_up=False)
        await self._call_server(name, actor.start.remote(), self._config.timeouts.limit("startup_s"), "the start")
        self._log.logger.note(f"{name} is back")
        await self._serve(name)

    async def _restart(self, name: str) -> None:
        """Restart a lost server, and log its reports until it is lost. A rollout server first waits for new weights.

        If a process dies during the restart:
            this server     ServerLostError is raised, and `_keep_server` restarts the server once more
            the buffer      `_abandon` asks the next buffer; `connect` only opens a socket, which reaches that one too
            the learner     `_follow_learner` ends the run, which cancels the restart

        Raises:
            ServerLostError: the server was lost again.
        """
        timeouts, has_groups = self._config.timeouts, name.startswith("rollout")
        if has_groups:
            num_groups = await self._abandon(name)
            whither = "go to other servers" if self._rollouts else "wait until a server is back: no other one runs"
            self._log.logger.note(f"{name}: the prompts of its {num_groups} running groups {whither}")
        index = self._config.server_names.index(name)
        async with self._on_shared_gpu(name):
            actor = self._processes.start(name, server_class(name), index)
            self.watchdog.begin(name, is_up=False)
            url = self._urls[name] = await self._call_server(
                name, actor.start.remote(), timeouts.limit("startup_s"), "the start"
            )
            judge_urls = list(self._judge_urls.values())
            connecting = actor.connect.remote(self._buffer_address, judge_urls, self._processes.starts[name])
            await self._call_server(name, connecting, timeouts.limit("startup_s"), "connecting")
            self._log.restarted(name, await self._join(name, url) if has_groups else None)
        if not has_groups:  # it gets the version that is evaluated next, and no push is made for it
            self._processes.actors["learner/0"].add_eval_server.remote(name, url)
        await self._serve(name)

    @asynccontextmanager
    async def _on_shared_gpu(self, name: str) -> AsyncIterator[None]:
        """A context manager in which a server that shares a GPU with the learner can start.

        It waits for the end of the learner's step, so that the learner has released its memory. The next step waits
        until the server has joined or the block ends. If servers and learner share no GPUs, it does nothing.

        Raises:
            AsyncRLError: the step did not end in time, or learner rank 0 has died.
        """
        if not self._config.shares_gpus:
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

    async def _abandon(self, name: str) -> int:
        """Have the buffer fail the running groups of a lost server, and return their number.

        Their prompts are granted again, and the buffer refuses further requests of the lost server. If the buffer dies
        meanwhile, the next buffer is asked.

        Raises:
            AsyncRLError: no buffer answered in time.
        """
        timeouts, incarnation = self._config.timeouts, self._processes.starts[name] + 1
        restart_limit = Limit(2 * timeouts.startup_s, "twice timeouts.startup_s")
        while True:
            await self._changed.wait_until(lambda: self._buffer is not None, restart_limit, "another buffer")
            buffer: Any = self._buffer
            limit, what = timeouts.limit("buffer_s"), f"an answer about the groups of {name}"
            try:
                return int(await self._processes.call("buffer", buffer.abandon.remote(name, incarnation), limit, what))
            except ProcessKilledError:  # `_keep_buffer` starts a new buffer, or ends the run
                if self._buffer is buffer:
                    self._buffer = None

    async def _join(self, name: str, url: str) -> int:
        """Wait until the learner has pushed its weights to a restarted server, and return their policy version.

        Raises:
            ServerLostError: the push to the server failed.
            AsyncRLError: the learner failed, or did not push in time.
        """
        call: Any = self._processes.actors["learner/0"].join_server.remote(name, url)
        try:
            version: int = await self._processes.call("learner/0", call, self._push_limit, f"a push to {name}")
            return version
        except WeightSyncError as error:  # the push failed at the server; another error is the learner's
            raise ServerLostError(error) from None

    async def _serve(self, name: str) -> None:
        """Run a server, and log its reports until it is lost.

        Raises:
            ServerLostError: the server is lost.
        """
        self._running.add(name)
        try:
            await self._compare_kv_room(name)
            await self._read_reports(name)
        except AsyncRLError as error:
            raise ServerLostError(error) from None
        log = self._processes.log_tail(name)
        raise ServerLostError(ProcessDiedError(f"{name} stopped by itself while the run was going on{log}"))

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

    async def _call_server(self, name: str, call: Any, limit: Limit, what: str) -> Any:
        try:
            return await self._processes.call(name, call, limit, what)
        except AsyncRLError as error:
            raise ServerLostError(error) from None

    async def _keep_buffer(self) -> None:
        """Run the buffer, and start a new one from the journal whenever its process is killed.

        Raises:
            AsyncRLError: the buffer failed, or can't be started again. The error ends the run.
        """
        while True:
            try:
                await self._until_lost("buffer", self._serve_buffer())
            except ProcessKilledError as error:
                self._buffer = None
                await self._revive_buffer(error)
            self.watchdog.begin("buffer")
            self._buffer = self._processes.actors["buffer"]
            await self._changed.notify()

    async def _serve_buffer(self) -> None:
        with self._processes.named_failure("buffer"):
            await self._processes.actors["buffer"].serve.remote()
        raise ProcessDiedError(f"the buffer stopped while the run was going on{self._processes.log_tail('buffer')}")

    async def _watch(self, signals: StopSignals) -> None:
        while True:
            dead = await self.watchdog.look()
            if signals.at_once:  # the second signal was raised in another thread than this one
                raise KeyboardInterrupt("ended at once")
            self._log.close_overdue()
            if self.watch:
                self.watch.look()
            await self._changed.notify()
            for name, error in dead:
                if name == "buffer":
                    if self._buffer is None:  # a new buffer is starting
                        continue
                    self._log.logger.note(str(error).splitlines()[0])
                    self._processes.kill(name)  # a process that hangs would live on
                self._declare_lost(name, error)

    def act(self, *, at_end: bool = False) -> None:
        """Copy the watcher's alarms to the status, and take watch.action if there is new trouble.

        Args:
            at_end: whether the learner has ended.
        """
        self.watchdog.alarms = self._log.watcher.sentence()
        if self.watch:
            self.watch.act(at_end=at_end)

    async def _end_on(self, stop: asyncio.Event) -> None:
        """Wait until Ctrl-C has set `stop`, then have the learner end with a checkpoint.

        Raises:
            KeyboardInterrupt: the learner did not end within timeouts.interrupt_s.
        """
        await stop.wait()
        limit = self._config.timeouts.limit("interrupt_s")
        self._log.logger.note(
            f"interrupted: ending with a checkpoint after this step, within {limit}. Again to end at once"
        )
        for name in self._learning:
            self._processes.actors[name].stop.remote()
        self._evaluations.cancel()
        await asyncio.sleep(limit.seconds)
        if self._learning:
            raise KeyboardInterrupt(f"the learner did not end within {limit} of the interrupt")

    async def _until_lost(self, name: str, life: Coroutine[Any, Any, None]) -> None:
        """Wait until `life` ends, or until `_declare_lost` cancels it.

        Args:
            life: follows process `name`, for example reads its reports.

        Raises:
            ServerLostError: `name` is a server and was declared lost.
            AsyncRLError: `life` failed, or `name` is no server and was declared lost.
        """
        task = self._lives[name] = asyncio.create_task(life)
        try:
            await task
        except asyncio.CancelledError:
            if (reason := self._reasons.pop(name, None)) is None:
                raise
            raise ServerLostError(reason) if name in self._servers else reason from None

    def _declare_lost(self, name: str, error: AsyncRLError) -> None:
        """Treat a process as dead, even if no call to it failed. Its `_until_lost` then raises `error`."""
        self._running.discard(name)
        if self._lives[name].cancel():
            self._reasons.setdefault(name, error)

    async def _read_reports(self, name: str) -> None:
        """Log the reports of a process until its `run` ends. Reports of learner/0 are also acted on.

        There is no time limit: `_watch` finds a process that hangs.

        Raises:
            AsyncRLError: the process failed.
        """
        run: Any = self._processes.actors[name].run
        stream = self._streams[name] = run.options(num_returns="streaming").remote()
        async for report in self._processes.reports(name, stream):
            self._log.add(name, report)
            self.act()
            if name == "learner/0":
                self._on_learner_report(report)
            await self._changed.notify()

    def _on_learner_report(self, report: LearnerReport) -> None:
        match report:
            case StepDone():
                self._restarts.clear()
            case ServersLost():
                for name, url in report.servers:
                    # Otherwise the loss is known already: the server is being restarted, or runs at another URL.
                    if name in self._running and self._urls.get(name, url) == url:
                        self._declare_lost(name, ProcessDiedError(
                            f"{self._processes.on_host(name)} did not answer after a weight push that failed, or "
                            f"serves other weights{report.cause and f' ({report.cause})'}, and gets no more weights"
                            f"{self._processes.log_tail(name)}"
                        ))
            case EvaluationDue():
                self._evaluations.begin(report, self._tasks)
            case EvaluationSkipped():
                self._log.skipped_eval(report.version, report.reason)

    def _remove_server(self, name: str) -> None:
        self.watchdog.forget(name)
        self._running.discard(name)
        self._log.lost(name)
        self._processes.kill(name)

    def end_restarts(self) -> list[str]:
        """Kill the servers that are still being restarted, and return the rollout servers that work.

        Call it after training.
        """
        for name in [n for n in self._processes.actors if n in self._servers and n not in self._running]:
            self._remove_server(name)
        return self._rollouts

    def give_up(self, error: BaseException) -> None:
        """Write into status.json that the run ends with `error`. After a timeout, all processes log their stacks."""
        if isinstance(error, WaitTimeoutError):
            asyncio.run(self._processes.dump_stacks())
        with suppress(OSError):  # e.g. a full disk, which may also be the cause of `error`
            self.watchdog.write_status(f"ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}")


class Change:
    """A condition variable for the driver's asyncio tasks."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def wait_until(self, is_met: Callable[[], bool], limit: Limit, what: str) -> None:
        """Wait until `is_met()` returns True. It is called again after each `notify`.

        Args:
            what: what the driver waits for, for the error.

        Raises:
            WaitTimeoutError: `is_met` was not true within `limit`.
        """
        try:
            async with asyncio.timeout(limit.seconds), self._condition:
                await self._condition.wait_for(is_met)
        except TimeoutError:
            raise WaitTimeoutError(f"the driver waited {limit} for {what}") from None

    async def notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()


class RestartLimit:
    """Counts the deaths of each server since the last step."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._deaths: Counter[str] = Counter()

    def count(self, name: str, error: AsyncRLError) -> None:
        """Count a death of server `name`.

        Args:
            error: the cause of the death.

        Raises:
            AsyncRLError: `error`, if the server must not be restarted. Either a restart can't help, or the server has
                died more than placement.rollout.max_restarts times since the last step.
        """
        self._deaths[name] += 1
        limit = self._config.placement.rollout.max_restarts
        is_mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError)
        if not is_mendable:
            raise error
        if self._deaths[name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None

    def clear(self) -> None:
        """Reset the counts. Called after each step."""
        self._deaths.clear()
