"""Runs the code of environments, tools and agents under a time limit, also code that can't be cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from rollout_server.episodes.user_code.faults import CodeExitError, GuardedCoroutine

CANCEL_S = 1.0
"""How long a task that was cancelled may take to end. After that it is given up and runs on by itself."""
_CREATED: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("created_tasks", default=None)
"""The unfinished tasks that an episode's foreign code has created; None outside such code."""

Result = TypeVar("Result")


class OverdueError(TimeoutError):
    """A call took longer than its time limit. Its message names the call and the limit."""


class ForeignCode:
    """Runs the code of one episode's environment, tools or agent under time limits.

    It knows the tasks that this code creates and does not end (asyncio.create_task), and can end them. None of its
    tasks can end the event loop: SystemExit and KeyboardInterrupt become a CodeExitError in the task that raised them.
    """

    def __init__(self) -> None:
        self._created: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()
        """Calls whose caller was cancelled, until they have ended."""
        self._context = contextvars.copy_context()
        self._context.run(_CREATED.set, self._created)
        self.num_given_up = 0
        """Calls that did not end when they were cancelled."""

    async def call(self, function: Callable[[], Awaitable[Result]], limit_s: float, what: str) -> Result:
        """Await the function in a task and return its result. At the limit cancel it, and wait at most CANCEL_S more.

        If the caller is cancelled, so is the task; see `end_cancelled_calls`.

        Raises:
            OverdueError: the call took longer than `limit_s`.
            CodeExitError: the function raised SystemExit, CancelledError, or another error that is no Exception.
        """
        _record_created_tasks()
        task = asyncio.get_running_loop().create_task(_awaited(function), name=what, context=self._context)
        self._created.discard(task)
        try:
            await asyncio.wait((task,), timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            self._cancelled.add(task)
            raise
        if task.done():
            try:
                return task.result()
            except Exception:
                raise
            except BaseException as error:  # nobody here has cancelled it
                raise CodeExitError(error) from error
        await self._end((task,))
        raise OverdueError(f"{what} took longer than {limit_s:g} s")

    async def end_cancelled_calls(self) -> None:
        """Cancel the calls whose callers were cancelled, and wait at most CANCEL_S until they have ended.

        Those that still run then go on by themselves and count in `num_given_up`.
        """
        if self._cancelled:
            await self._end(list(self._cancelled))
            self._cancelled.clear()

    async def end_created_tasks(self) -> int:
        """Cancel the tasks that the foreign code created and that still run, and return their number.

        It waits at most CANCEL_S until they have ended; those that have not count in `num_given_up`.
        """
        left = [task for task in self._created if not task.done()]
        if left:
            await self._end(left)
        return len(left)

    async def _end(self, tasks: list[asyncio.Task[Any]] | tuple[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        done, running = await asyncio.wait(tasks, timeout=CANCEL_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # marks it as seen
        self.num_given_up += len(running)


async def _awaited(function: Callable[[], Awaitable[Result]]) -> Result:
    return await function()


def _record_created_tasks() -> None:
    """Make the running loop record each new task in the ForeignCode whose code creates it, unless it already does."""
    loop = asyncio.get_running_loop()
    inner = loop.get_task_factory()
    if isinstance(inner, _RecordingFactory):
        return
    loop.set_task_factory(_RecordingFactory(inner))


class _RecordingFactory:
    """A task factory for the event loop that guards the coroutines of foreign code and records their tasks.

    Foreign code has a set `_CREATED` in its context, to which each task is added.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner or _new_task

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        created = _CREATED.get() if context is None else context.get(_CREATED)
        if created is None:
            return self._inner(loop, coroutine, **options)
        task = self._inner(loop, GuardedCoroutine(coroutine), **options)
        created.add(task)
        task.add_done_callback(created.discard)
        return task


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


async def in_thread(function: Callable[[], Result]) -> Result:
    """Run a function that may block in a daemon thread of its own, and return its result.

    An error that is no Exception (SystemExit, ...) is raised as a CodeExitError.

    asyncio.to_thread has few threads, and one that hangs is lost to all callers. If the caller is cancelled, the thread
    runs on, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            outcome(value)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (future.set_result, context.run(function))
        except BaseException as error:
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future can hold these
            outcome = (future.set_exception, error if is_plain else CodeExitError(error))
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await future
