"""The driver's main loop: `Supervisor.train` starts servers and learner, and reads the reports of all processes.

One asyncio task follows each process. One more task finds processes that hang (watchdog.py).

    event                                       the driver's action
    a server or its worker dies                 starts it again, see server_pool.py
    a weight push drops a server                starts it again
    the buffer's process dies                   starts a new one from the journal; without a journal the run ends
    a learner rank fails or dies                ends the run; the error shows the rank, its host and the end of its log
    a process does not answer                   treats it as dead after timeouts.silent_s; a buffer with a journal
                                                already after timeouts.buffer_s / 3
    a process waits longer than its limit       treats it as dead
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from async_rl.base.config import Config, Limit
from async_rl.base.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.base.messages.reports import (
    EvaluationDue,
    EvaluationSkipped,
    LearnerReport,
    ServersFilled,
    ServersLost,
    StepDone,
)
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.lives import Change, Lives, LostError
from async_rl.run.processes.server_pool import ServerPool
from async_rl.run.processes.signals import StopSignals
from async_rl.run.processes.watchdog import Watchdog
from async_rl.run.watch.evaluations import RunningEvaluations

if TYPE_CHECKING:
    from async_rl.run.watch.run_watch import RunWatch

GRACE_S = 3.0
"""Seconds to wait after a learner rank fails. If a peer's death is the cause, that error ends the run meanwhile."""


class EndedError(Exception):
    """A person ends the run at once. It becomes a KeyboardInterrupt, for which asyncio would log a stack trace."""


ReviveBuffer = Callable[[ProcessKilledError], Coroutine[Any, Any, None]]
"""Starts a new buffer after a death. It gets the error of the death, and raises it if it can't."""
UntilUp = Callable[[], Awaitable[str]]
"""Waits until the servers with which the run begins have started, and returns the name of a rollout server."""
StartLearner = Callable[[UntilUp], Awaitable[None]]
"""Starts the learner on all ranks, once the servers have started."""


class Supervisor:
    """Follows all processes until training ends: logs their reports, and starts servers and buffers again that die.

    Args:
        wanted: the servers that the run is to have, as in ServerPool.
        one_by_one: whether servers share a GPU. Each measures the free memory when it starts.
    """

    def __init__(
        self, config: Config, processes: ActorGroup, log: RunLog, wanted: dict[str, str], *, one_by_one: bool = False
    ) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._lives = Lives()
        self._streams: dict[str, Any] = {}
        """The stream of reports of each process, kept because Ray ends a stream without a reference."""
        self._changed = Change()
        """Notified when a report is logged, the state of a server changes, or a new buffer runs."""
        self.watchdog = Watchdog(config, processes)
        self._pool = ServerPool(
            config, processes, log, self.watchdog, self._lives, self._changed, self._read_reports, self._abandon,
            self._retire, wanted, one_by_one=one_by_one,
        )
        self._evaluations = RunningEvaluations(config, processes, log, self._pool.serving, self._pool.declare_lost)
        self._is_training = False
        """Whether the learner has started."""
        self.watch: RunWatch | None = None
        """Takes watch.action at alarms; None: the watcher only warns, and the run is not resumed."""
        if config.watch.acts or config.run.resume:
            from async_rl.run.watch.run_watch import RunWatch

            self.watch = RunWatch(config, processes, log, self.watchdog)

    def train(
        self, buffer_address: str, revive_buffer: ReviveBuffer, start_learner: StartLearner, signals: StopSignals
    ) -> None:
        """Start the servers and the learner, and supervise all until the ranks have ended and all steps are logged.

        Call it once, when the buffer has started, and the learner's processes, but not the learner in them.

        Args:
            revive_buffer: starts a new buffer after a death.
            start_learner: starts the learner on all ranks, when enough servers have started.

        Raises:
            AsyncRLError: the first error that ends the run.
            KeyboardInterrupt: the learner did not end within timeouts.interrupt_s of Ctrl-C, or had not started, or
                there was a second signal.
        """
        try:
            asyncio.run(self._train(buffer_address, revive_buffer, start_learner, signals))
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            raise (KeyboardInterrupt(str(error)) if isinstance(error, EndedError) else error) from None
        finally:
            signals.is_heeded = True

    async def _train(
        self, buffer_address: str, revive_buffer: ReviveBuffer, start_learner: StartLearner, signals: StopSignals
    ) -> None:
        names = list(self._processes.actors)
        self._learning = {name for name in names if name.startswith("learner")}
        self._buffer: ActorHandle | None = self._processes.actors["buffer"]
        for name in names:
            self.watchdog.begin(name, is_up=False)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with signals.deferred(lambda: loop.call_soon_threadsafe(stop.set)):
            signals.check()
            async with asyncio.TaskGroup() as self._tasks:  # the first failure is raised and cancels all tasks
                background = [self._tasks.create_task(each) for each in (
                    self._keep_buffer(revive_buffer),
                    self._watch(signals),
                    self._end_on(stop),
                )]
                self._pool.begin(self._tasks, buffer_address)
                await start_learner(self._pool.until_up)
                await self._pool.until_known()
                self._is_training = True
                if self.watch:
                    self.watch.begin()
                learners = [self._tasks.create_task(self._follow_learner(name)) for name in self._learning]
                await asyncio.wait(learners)  # no time limit: `_watch` ends the run if a rank hangs
                limit, what = self._config.timeouts.limit("startup_s"), "the rollout servers' last reports"
                await self._changed.wait_until(lambda: not self._log.has_open_steps, limit, what)
                await self._evaluations.wait()
                # A buffer that is being revived is not ready to be closed.
                await self._changed.wait_until(lambda: self._buffer is not None, self._revival_limit, "another buffer")
                for task in (*background, *self._pool.tasks):
                    task.cancel()

    async def _follow_learner(self, name: str) -> None:
        """Log the reports of a learner rank until it has finished.

        Raises:
            AsyncRLError: the rank failed. The error ends the run.
        """
        try:
            await self._lives.follow(name, self._read_reports(name))
        except LostError as lost:
            raise lost.error from None
        except AsyncRLError as error:
            if not isinstance(error, ProcessDiedError) and len(self._learning) > 1:
                await asyncio.sleep(GRACE_S)  # if a peer has died, the task that follows it ends the run meanwhile
            raise
        self._learning.discard(name)

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
                self._pool.note_step(report)
            case ServersFilled():
                self._pool.note_filled(report)
            case ServersLost():
                self._pool.note_lost(report)
            case EvaluationDue():
                self._evaluations.begin(report, self._tasks)
            case EvaluationSkipped():
                self._log.skipped_eval(report.version, report.reason)

    def end_restarts(self) -> list[str]:
        """Kill the servers that are still starting, and return the rollout servers that serve.

        Call it after training.
        """
        self._pool.remove_starting()
        return self._pool.rollouts

    async def _abandon(self, name: str) -> int:
        """Have the buffer fail the running groups of a lost server, and return their number.

        Their prompts are granted again, and the buffer refuses further requests of the lost server.

        Raises:
            AsyncRLError: no buffer answered in time.
        """
        incarnation = self._processes.starts[name] + 1
        return await self._ask_buffer(name, lambda buffer: buffer.abandon.remote(name, incarnation))

    async def _retire(self, name: str) -> int:
        """Have the buffer give a server no more slots, and return the number of its running groups.

        Raises:
            AsyncRLError: no buffer answered in time.
        """
        incarnation = self._processes.starts[name]
        return await self._ask_buffer(name, lambda buffer: buffer.retire.remote(name, incarnation))

    async def _ask_buffer(self, name: str, ask: Callable[[Any], Any]) -> int:
        """Call the buffer about the groups of a server. If it dies meanwhile, the next buffer is asked.

        Raises:
            AsyncRLError: no buffer answered in time.
        """
        while True:
            await self._changed.wait_until(lambda: self._buffer is not None, self._revival_limit, "another buffer")
            buffer: Any = self._buffer
            limit, what = self._config.timeouts.limit("buffer_s"), f"an answer about the groups of {name}"
            try:
                return int(await self._processes.call("buffer", ask(buffer), limit, what))
            except ProcessKilledError:  # `_keep_buffer` starts a new buffer, or ends the run
                if self._buffer is buffer:
                    self._buffer = None

    @property
    def _revival_limit(self) -> Limit:
        return Limit(2 * self._config.timeouts.startup_s, "twice timeouts.startup_s")

    async def _keep_buffer(self, revive_buffer: ReviveBuffer) -> None:
        """Run the buffer, and start a new one from the journal whenever its process is killed.

        Raises:
            AsyncRLError: the buffer failed, or can't be started again. The error ends the run.
        """
        while True:
            try:
                await self._lives.follow("buffer", self._serve_buffer())
            except (LostError, ProcessKilledError) as error:
                death = error.error if isinstance(error, LostError) else error
                if not isinstance(death, ProcessKilledError):
                    raise death from None
                self._buffer = None
                await revive_buffer(death)
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
                raise EndedError("ended at once")
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
                self._pool.declare_lost(name, error)

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
            EndedError: the learner did not end within timeouts.interrupt_s, or has not started yet.
        """
        await stop.wait()
        if not self._is_training:
            raise EndedError("ended before the learner has started")
        limit = self._config.timeouts.limit("interrupt_s")
        self._log.logger.note(
            f"interrupted: ending with a checkpoint after this step, within {limit}. Again to end at once"
        )
        for name in self._learning:
            self._processes.actors[name].stop.remote()
        self._evaluations.cancel()
        await asyncio.sleep(limit.seconds)
        if self._learning:
            raise EndedError(f"the learner did not end within {limit} of the interrupt")

    def give_up(self, error: BaseException) -> None:
        """Write into status.json that the run ends with `error`. After a timeout, all processes log their stacks."""
        if isinstance(error, WaitTimeoutError):
            asyncio.run(self._processes.dump_stacks())
        with suppress(OSError):  # e.g. a full disk, which may also be the cause of `error`
            self.watchdog.write_status(f"ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
