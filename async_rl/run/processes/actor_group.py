"""Defines ActorGroup, with which the driver starts, calls and ends the processes of a run. Each is a Ray actor."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from async_rl.base.config import Limit
from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.base.run_dir.files import log_tail
from async_rl.base.telemetry.status import Status, write_status
from async_rl.run.processes.actors import Origin
from async_rl.run.processes.reservation import Reservation
from async_rl.run.processes.signals import StopSignals

DUMP_TIMEOUT_S = 2.0
STATUS_INTERVAL_S = 5.0


class ActorGroup:
    """The processes of a run, as Ray actors by name. The driver starts, calls and ends them here.

    If a call fails, the error names the process and shows the end of its log.

    Args:
        reservation: where each process runs.
        signals: end a wait on Ctrl-C or SIGTERM.
        origin: what each process gets from the driver.
    """

    def __init__(self, run_dir: Path, reservation: Reservation, signals: StopSignals, origin: Origin) -> None:
        self.run_dir = run_dir
        self.signals = signals
        self.actors: dict[str, ActorHandle] = {}
        self.reservation = reservation
        self.starts: Counter[str] = Counter()
        """How many times each process was started."""
        self._origin = origin
        self._earlier_bytes: dict[str, dict[Path, int]] = {}
        """For each process, the sizes of its log files when it was last started. An earlier start wrote that part."""

    def start(
        self, name: str, cls: type, *args: Any, max_concurrency: int = 1, threads: Mapping[str, int] | None = None
    ) -> ActorHandle:
        """Start a process as a Ray actor, and return its handle without waiting.

        Args:
            name: the name of the process, such as learner/0.
            cls: the actor's class. Its `__init__` gets the Origin, then `args`.
            max_concurrency: the most calls that the actor runs simultaneously. With 1 Ray's default applies: one call,
                or 1000 for a class with async methods.
            threads: the most simultaneous calls in each Ray concurrency group of `cls`.
        """
        options = {**self.reservation.options(name), "max_restarts": 0}
        if max_concurrency > 1:
            options["max_concurrency"] = max_concurrency
        remote: Any = ray.remote
        actor = remote(concurrency_groups=dict(threads))(cls) if threads else remote(cls)
        self._earlier_bytes[name] = {file: file.stat().st_size for file in self._log_files(name)}
        self.starts[name] += 1
        self.actors[name] = actor.options(**options).remote(self._origin, *args)
        return self.actors[name]

    def gather(self, calls: Mapping[str, ObjectRef], limit: Limit, what: str) -> dict[str, Any]:
        """Wait for one call to each of several processes, and return the results by process name.

        `async-rl status` shows the wait.

        Args:
            calls: the call to each process, by process name.
            what: what the driver waits for, for the status and the error, such as "the start".

        Raises:
            AsyncRLError: the error of the first call that fails, see `named_failure`.
            WaitTimeoutError: calls did not end within `limit`. The message names their processes.
            KeyboardInterrupt: after Ctrl-C or SIGTERM.
        """
        return asyncio.run(self._interruptible(self._gather(calls, limit, what)))

    async def _interruptible(self, waiting: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        task, loop = asyncio.create_task(waiting), asyncio.get_running_loop()
        with self.signals.deferred(lambda: loop.call_soon_threadsafe(task.cancel)):
            self.signals.check()
            try:
                return await task
            except asyncio.CancelledError:
                if not self.signals.requested:  # asyncio.run cancels it too, when something else ends the event loop
                    raise
                raise KeyboardInterrupt from None

    async def _gather(self, calls: Mapping[str, ObjectRef], limit: Limit, what: str) -> dict[str, Any]:
        pending = {asyncio.create_task(self._result(name, call)): name for name, call in calls.items()}
        results: dict[str, Any] = {}
        since_s = time.monotonic()
        deadline_s = since_s + limit.seconds
        host = ray.util.get_node_ip_address()
        try:
            while pending:
                write_status(self.run_dir, [Status(
                    process="driver", host=host, doing=f"waits for {what}", waits_on=", ".join(pending.values()),
                    since_s=since_s, limit_s=limit.seconds,
                )], "running")
                left_s = max(0.0, deadline_s - time.monotonic())
                done, _ = await asyncio.wait(
                    pending, timeout=min(left_s, STATUS_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in pending if task in done]:
                    results[pending[task]] = task.result()
                    del pending[task]
                if not done and left_s <= STATUS_INTERVAL_S:
                    raise self._overdue(limit, what, *pending.values())
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return results

    async def call(self, name: str, call: ObjectRef, limit: Limit, what: str) -> Any:
        """Wait for a call to process `name`, and return its result.

        Args:
            what: what the driver waits for, for the error.

        Raises:
            AsyncRLError: the call failed, see `named_failure`.
            WaitTimeoutError: the call did not end within `limit`.
        """
        try:
            async with asyncio.timeout(limit.seconds) as scope:
                return await self._result(name, call)
        except TimeoutError:
            if not scope.expired():  # the call itself raised it
                raise
            raise self._overdue(limit, what, name) from None

    def cancel(self, call: ObjectRef) -> None:
        """Cancel a call of an async method, without waiting. The method gets a CancelledError in its process."""
        ray.cancel(call, recursive=False)

    async def reports(self, name: str, stream: ObjectRefGenerator) -> AsyncIterator[Any]:
        """Yield the reports of process `name` until its call ends.

        Args:
            stream: the result of the call, such as `run`, which yields the reports.

        Raises:
            AsyncRLError: the call failed, see `named_failure`.
        """
        with self.named_failure(name):
            async for ref in stream:
                yield await ref

    async def _result(self, name: str, call: ObjectRef) -> Any:
        with self.named_failure(name):
            return await call

    def _overdue(self, limit: Limit, what: str, *names: str) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"the driver waited {limit} for {what} of {', '.join(names)}{''.join(map(self.log_tail, names))}"
        )

    @contextmanager
    def named_failure(self, name: str) -> Iterator[None]:
        """A context manager that replaces a RayError in the block by an error that names the process and the cause.

        Raises:
            ConfigError: the process raised it. It stays as it is.
            AsyncRLError: the process raised another error. A subclass of AsyncRLError keeps its type.
            ProcessDiedError: the process died in its `__init__`, or Ray can't call it.
            ProcessKilledError: the process died after its `__init__`, or Ray's memory monitor killed it.
        """
        try:
            yield
        except RayError as error:
            raise self._failure(name, error) from None

    def _failure(self, name: str, error: RayError) -> AsyncRLError:
        if isinstance(error, RayActorError) and not error.actor_init_failed:
            return ProcessKilledError(
                f"{self.on_host(name)} died ({_first_line(error)}). If nothing is logged, the system may have ended "
                "it for memory: see `dmesg`, lower rollout.max_groups_in_flight or learner.max_tokens_per_microbatch."
                + self.log_tail(name)
            )
        if isinstance(error, RayTaskError):
            return self._raised(name, error)
        if isinstance(error, RayActorError):  # in `__init__`: Ray keeps the text of what was raised, not the exception
            return ProcessDiedError(
                f"{self.on_host(name)} failed while it started:{self.log_tail(name)}\n{_last_frames(error)}"
            )
        if isinstance(error, OutOfMemoryError):  # Ray's memory monitor; a kill by the system is a RayActorError
            return ProcessKilledError(
                f"{self.on_host(name)} was killed by Ray's memory monitor, because the memory of its host was full"
                f"{_memory_use(str(error))}. The monitor kills processes of the run whoever uses the memory. End other "
                "programs there, or lower rollout.max_groups_in_flight or learner.max_tokens_per_microbatch; or set "
                "RAY_memory_usage_threshold (a share, 0.95 if unset) or RAY_memory_monitor_refresh_ms=0 (no monitor) "
                "in the environment of `async-rl train`, or of `ray start` for a cluster" + self.log_tail(name)
            )
        return ProcessDiedError(f"Ray can't call {name}: {type(error).__name__}: {_first_line(error)}")

    def _raised(self, name: str, error: RayTaskError) -> AsyncRLError:
        cause = error.cause
        if isinstance(cause, ConfigError):  # its message is complete
            return cause
        if isinstance(cause, AsyncRLError):
            return type(cause)(f"{cause}\nraised in {self.on_host(name)}{self.log_tail(name, message=str(cause))}")
        return AsyncRLError(
            f"{self.on_host(name)} failed: {type(cause).__name__}: {cause}{self.log_tail(name)}\n"
            f"{_last_frames(error)}"
        )

    def place(self, name: str, status: Status) -> Status:
        """Return `status` with the name of the process and its host filled in."""
        return dataclasses.replace(status, process=name, host=self.reservation.host_of(name))

    async def dump_stacks(self) -> None:
        """Have every process write the stacks of its threads into its log file. Waits at most DUMP_TIMEOUT_S."""
        calls = [asyncio.create_task(self._result(n, a.dump_stacks.remote())) for n, a in self.actors.items()]
        if calls:
            _, silent = await asyncio.wait(calls, timeout=DUMP_TIMEOUT_S)
            for call in silent:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def on_host(self, name: str) -> str:
        return f"{name} on {self.reservation.host_of(name)}"

    def log_tail(self, name: str, message: str = "") -> str:
        """Return the last lines that process `name` wrote into its log files, indented, for an error message.

        Args:
            message: the rest of the error message. Log files that it names are left out.
        """
        text, earlier_bytes = "", self._earlier_bytes.get(name, {})
        for file in self._log_files(name):
            if str(file) in message:
                continue
            text += f"\n{log_tail(file, earlier_bytes.get(file, 0))}"
        if not text and not message and (host := self.reservation.host_of(name)) != ray.util.get_node_ip_address():
            text = f"\nits log is on that host, {host}, in {self.run_dir / 'logs'}"
        return text

    def _log_files(self, name: str) -> list[Path]:
        return sorted((self.run_dir / "logs").glob(f"*{name.replace('/', '-')}.log"))

    def kill(self, name: str) -> None:
        """Kill process `name` immediately, and remove it from `actors`."""
        ray.kill(self.actors.pop(name))

    def stop(self, timeout_s: float) -> None:
        """Ask all processes except learner ranks to stop, wait at most `timeout_s` seconds, then kill all processes."""
        stoppable = [actor for name, actor in self.actors.items() if not name.startswith("learner")]
        polite: list[Any] = [actor.stop.remote() for actor in stoppable]
        try:
            if polite:
                ray.wait(polite, num_returns=len(polite), timeout=timeout_s)
        finally:  # also after a second Ctrl-C during the wait
            for actor in self.actors.values():
                ray.kill(actor)
            self.actors.clear()


def _memory_use(text: str) -> str:
    """Return how much of the host's memory was in use, and by which programs; "" if `text` does not say it.

    Args:
        text: the message of Ray's OutOfMemoryError.
    """
    used = re.search(r"was (\S+ used / \S+ limit)", text)
    largest = re.findall(r"^\d+\t(\S+)\t(\S+)", text, re.MULTILINE)[:3]
    parts = [used[1]] if used else []
    if largest:
        parts.append("the largest: " + ", ".join(f"{Path(command).name} {size} GB" for size, command in largest))
    return f" ({'; '.join(parts)})" if parts else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _last_frames(error: RayError) -> str:
    return "\n".join("    " + line for line in str(error).strip().splitlines()[-12:])
