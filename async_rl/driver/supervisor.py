"""The driver's watch over a running pipeline: who died, who is silent, who waits on whom.

    what ends                       what follows
    rollout server or its worker    it is started again; its groups go to others, it is brought to the learner's
                                    current version, and only then asks for groups of its own
    nothing, but a push dropped a   as if it had died
    rollout server
    buffer                          another goes on from its journal, if there is one
    learner rank                    the run, with one error that names it, its host and its last log lines
    nothing, but no sign of life    as if it had died, after timeouts.silent_s; the buffer, if another one can take its
                                    place, already after timeouts.wire_s / 3
    nothing, but its wait exceeds   as if it had died
    its limit
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.actors import RolloutActor
from async_rl.driver.run_log import RunLog
from async_rl.driver.signals import StopSignals
from async_rl.driver.watchdog import WATCH_INTERVAL_S, Watchdog
from async_rl.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError, WeightSyncError
from async_rl.telemetry.metrics import Report

GRACE_S = 3.0
"""A learner rank that dies makes its peers fail: so long the cause is waited for when an effect is seen first."""


class Supervisor:
    """Collects what the processes report until training ends.

    Args:
        processes: may still be empty; before `train` all of them are started and introduced to each other.
    """

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._buffer_address = ""
        self._abandoned: dict[str, Callable[[int], None]] = {}
        """Dead processes of which the buffer is being told, and what follows."""
        self._handlers: dict[Any, tuple[str, Callable[[], None]]] = {}
        """What to do when a call of a process returns, or its stream has an item."""
        self._learning: set[str] = set()
        self._streaming: set[str] = set()
        self._evaluating: defaultdict[str, list[int]] = defaultdict(list)
        """Versions, by the server that answers their held-out prompts."""
        self._deaths: Counter[str] = Counter()
        self._urls: dict[str, str] = {}
        """Of the servers that were started again."""
        self.watch = Watchdog(config, processes)

    def train(
        self, buffer_address: str, revive_buffer: Callable[[ProcessKilledError], None], interrupts: StopSignals
    ) -> None:
        """Returns when every learner rank has finished and every step is logged.

        Args:
            revive_buffer: starts another buffer in the place of one that was killed, or raises its argument.

        Raises:
            AsyncRLError: the run can't go on; from the process that is the cause.
        """
        self._buffer_address, self._revive_buffer = buffer_address, revive_buffer
        names = list(self._processes.actors)
        self._learning = {name for name in names if name.startswith("learner")}
        for name in names:
            self.watch.begin(name)
        self._serve_buffer()
        for name in names:
            if name != "buffer":
                self._stream(name)
        stop_s = float("inf")
        with interrupts.deferred():
            while self._learning or self._log.has_open_steps or any(self._evaluating.values()):
                if interrupts.requested and stop_s == float("inf"):
                    stop_s = time.monotonic() + self._config.timeouts.interrupt_s
                    self._stop_learning()
                    self._evaluating.clear()
                if time.monotonic() > stop_s:
                    raise KeyboardInterrupt(f"no checkpoint within {self._config.timeouts.interrupt_s:.0f} s")
                ready, _ = ray.wait(list(self._handlers), num_returns=1, timeout=WATCH_INTERVAL_S)
                for ref in ready:
                    self._handlers[ref][1]()
                self._look()

    def _stop_learning(self) -> None:
        limit_s = self._config.timeouts.interrupt_s
        self._log.logger.note(
            f"interrupted: ending with a checkpoint after this step, within {limit_s:.0f} s (timeouts.interrupt_s). "
            "Again to end at once"
        )
        for name in self._learning:
            self._processes.actors[name].stop.remote()

    def end_restarts(self) -> list[str]:
        """Training is over: ends the servers that are still on their way back; returns the names of those that are up.
        """
        servers = sorted(name for name in self._processes.actors if name.startswith("rollout"))
        for name in [name for name in servers if name not in self._streaming]:
            self._forget(name)
        return [name for name in servers if name in self._streaming]

    def give_up(self, error: BaseException) -> None:
        """The run ends with `error`: keep what may explain it."""
        if isinstance(error, WaitTimeoutError):
            self._processes.dump_stacks()
        with suppress(OSError):  # of a full disk, say, which may be `error` itself
            self.watch.write_status(f"ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}")

    def _stream(self, name: str, _: object = None) -> None:
        stream: Any = self._processes.actors[name].run.options(num_returns="streaming").remote()
        self._handlers[stream] = (name, partial(self._read, name, stream))
        self._streaming.add(name)

    def _read(self, name: str, stream: Any) -> None:
        try:
            report = self._processes.result(name, partial(_next, stream))
        except StopIteration:
            del self._handlers[stream]
            if name not in self._learning:
                self._died(name, ProcessDiedError(f"{name} stopped by itself{self._processes.log_tail(name)}"))
            self._learning.discard(name)
        except AsyncRLError as error:
            self._died(name, error)
        else:
            self._log.add(name, report)
            if name == "learner/0":
                self._heed(report)

    def _heed(self, report: Report) -> None:
        """Of learner/0."""
        if report.metrics:  # a step's
            self._deaths.clear()
        for name, url in report.lost:
            # Else its end was seen already: it is on its way back, or has come back at another URL.
            if name in self._streaming and self._urls.get(name, url) == url:
                self._died(name, ProcessDiedError(
                    f"{self._processes.on_host(name)} did not answer after a weight push that failed, and gets no "
                    f"more weights{self._processes.log_tail(name)}"
                ))
        if report.eval_due:
            self._evaluate(report.step)

    def _evaluate(self, version: int) -> None:
        """Beside training, on one server: the others would answer the same."""
        servers = sorted(name for name in self._streaming if name.startswith("rollout"))
        if not servers:
            self._log.logger.note(f"version {version} is not evaluated: no rollout server is up")
            self._processes.actors["learner/0"].evaluated.remote()
            return
        self._evaluating[servers[0]].append(version)
        call: Any = self._processes.actors[servers[0]].evaluate.remote(version, beside_training=True)
        self._expect(servers[0], call, partial(self._evaluated, servers[0], version))

    def _evaluated(self, name: str, version: int, report: Report) -> None:
        if version in self._evaluating[name]:  # else the run is interrupted
            self._evaluating[name].remove(version)
        self._log.add_eval(report)
        self._processes.actors["learner/0"].evaluated.remote()

    def _expect(self, name: str, ref: Any, then: Callable[[Any], None]) -> None:
        """`then(result)` once the call returns."""

        def handle() -> None:
            del self._handlers[ref]
            try:
                value = self._processes.result(name, partial(ray.get, ref))
            except AsyncRLError as error:
                self._died(name, error)
            else:
                then(value)

        self._handlers[ref] = (name, handle)

    def _serve_buffer(self) -> None:
        buffer = self._processes.actors["buffer"]
        self._expect("buffer", buffer.serve.remote(), self._buffer_ended)
        for name, then in list(self._abandoned.items()):
            self._abandon(name, then)

    def _abandon(self, name: str, then: Callable[[int], None]) -> None:
        """The buffer forgets what the dead process `name` asked for and ran; `then(number of its running groups)`.

        Should the buffer die meanwhile, the next one is told.
        """
        self._abandoned[name] = then
        call: Any = self._processes.actors["buffer"].abandon.remote(name)
        self._expect("buffer", call, partial(self._was_abandoned, name))

    def _was_abandoned(self, name: str, num_groups: int) -> None:
        if then := self._abandoned.pop(name, None):
            then(num_groups)

    def _buffer_died(self, error: ProcessKilledError) -> None:
        self._handlers = {ref: entry for ref, entry in self._handlers.items() if entry[0] != "buffer"}
        self._revive_buffer(error)
        self.watch.begin("buffer")
        self._serve_buffer()

    def _buffer_ended(self, _: object) -> None:
        raise ProcessDiedError(f"buffer stopped while the run was going on{self._processes.log_tail('buffer')}")

    def _died(self, name: str, error: AsyncRLError) -> None:
        """Bring a rollout server back; raise for all else, and where it would die again and again."""
        if name == "buffer" and isinstance(error, ProcessKilledError):
            self._buffer_died(error)
            return
        self._deaths[name] += 1
        limit = self._config.placement.rollout.max_restarts
        mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError)
        if name.startswith("learner"):
            raise self._cause(name, error)
        if not (name.startswith("rollout") and mendable) or self._config.staleness.mode == "exact":
            raise error
        if self._deaths[name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None
        self._log.logger.note(f"{name} is lost, and started again: {str(error).splitlines()[0]}")
        self._forget(name)
        self._processes.actors["learner/0"].leave_server.remote(name)
        self._abandon(name, partial(self._restart, name))

    def _cause(self, name: str, error: AsyncRLError) -> AsyncRLError:
        """The death of another rank, if that is what made this one fail."""
        others = {ref: n for ref, (n, _) in self._handlers.items() if n.startswith("learner") and n != name}
        if isinstance(error, ProcessDiedError) or not others:
            return error
        deadline = time.monotonic() + GRACE_S
        while (left_s := deadline - time.monotonic()) > 0 and others:
            ready, _ = ray.wait(list(others), num_returns=1, timeout=left_s)
            for ref in ready:
                try:
                    self._processes.result(others[ref], partial(_next, ref))
                except ProcessDiedError as death:
                    return death
                except (AsyncRLError, StopIteration):
                    del others[ref]
        return error

    def _forget(self, name: str) -> None:
        self.watch.forget(name)
        self._handlers = {ref: entry for ref, entry in self._handlers.items() if entry[0] != name}
        self._streaming.discard(name)
        self._log.lost(name)
        self._processes.kill(name)
        for version in self._evaluating.pop(name, ()):
            self._evaluate(version)

    def _restart(self, name: str, num_groups: int) -> None:
        self._log.logger.note(f"{name}: {num_groups} running groups go to others")
        actor = self._processes.start(name, RolloutActor, self._config, int(name.partition("/")[2]))
        self.watch.begin(name)
        self._expect(name, actor.start.remote(), partial(self._connect, name))

    def _connect(self, name: str, url: str) -> None:
        self._urls[name] = url
        # The one that was killed may have gone on for a moment, or its last request was on its way: again.
        self._abandon(name, lambda _: self._introduce(name, url))

    def _introduce(self, name: str, url: str) -> None:
        connecting: Any = self._processes.actors[name].connect.remote(self._buffer_address)
        self._expect(name, connecting, lambda _: self._resync(name, url))

    def _resync(self, name: str, url: str) -> None:
        self._expect(name, self._processes.actors["learner/0"].join_server.remote(name, url), partial(self._back, name))

    def _back(self, name: str, version: int) -> None:
        self._log.logger.note(f"{name} is back, with the weights of version {version}")
        self._stream(name)

    def _look(self) -> None:
        for name, error in self.watch.look():
            if name == "buffer":  # it may only hang
                self._log.logger.note(str(error).splitlines()[0])
                self._processes.kill(name)
            self._died(name, error)


def _next(stream: Any) -> Any:
    return ray.get(next(stream))
