"""Runs the code of a user's environments, tools, agents and rewards, and describes its errors.

Calls have time limits, even if they can't be cancelled, and no call can end the event loop. This module uses the
standard library only, because agent_host.py imports it in the Python environment of an agent.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

MAX_CHARACTERS = 2_000
"""The longest text of an error; the rest is cut off. Some errors contain the whole response of a server."""
MAX_TRACEBACK_CHARACTERS = 8_000
"""The longest traceback. The middle of a longer one is cut out."""

_OUTSIDE = (OSError, MemoryError, ImportError, NameError, SyntaxError, asyncio.CancelledError)
_OUTSIDE_NAMES = {"AsyncRLError", "APIConnectionError", "TransportError", "ClientConnectionError"}
"""Names of further error classes that no reply of the model causes: this project's errors, and lost connections of
openai, httpx and aiohttp. An agent's environment may have any version of these packages, or none."""
_OUTSIDE_STATUSES = (401, 403, 408, 429)
"""HTTP statuses, besides 500 and up, that say nothing about the request itself."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class CodeExitError(Exception):
    """A user's code raised an error that is no `Exception`: SystemExit, CancelledError, ... It is the `__cause__`.

    Left alone, SystemExit and KeyboardInterrupt would end asyncio's whole event loop, and CancelledError would look
    like a cancellation by the caller.
    """

    __cause__: BaseException

    def __init__(self, cause: BaseException) -> None:
        super().__init__(error_text(cause))
        self.__cause__ = cause


class Fault(NamedTuple):
    """An error of user code, as text that fits into JSON."""

    name: str
    """The name of the error's class."""
    text: str
    at: str
    """`file:line` of the innermost line of the user's code, or "" if the error has no traceback."""
    traceback: str
    is_outside: bool
    """True if a reply of the model can't have caused the error; see `_is_outside`."""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        if isinstance(error, AgentRaisedError):
            return error.fault
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        is_outside = any(map(_is_outside, _chain(error)))
        while inner := [error.__cause__] if isinstance(error, CodeExitError) else _members(error):
            error = inner[0]
        if len(lines) > MAX_TRACEBACK_CHARACTERS:
            half = MAX_TRACEBACK_CHARACTERS // 2
            lines = f"{lines[:half]}\n...\n{lines[-half:]}"
        text = _printable(error_text(error)[:MAX_CHARACTERS])
        return cls(type(error).__name__, text, _place(error), _printable(lines), is_outside)

    def __str__(self) -> str:
        said = f"{self.name}: {self.text}" if self.text else self.name
        return f"{said}, at {self.at}" if self.at else said


class AgentRaisedError(Exception):
    """An agent in a separate process raised an error. `fault` describes it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class GuardedCoroutine(Coroutine[Any, Any, Any]):
    """Wraps a coroutine so that SystemExit and KeyboardInterrupt become CodeExitError."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner
        self.__name__ = self.__qualname__ = getattr(inner, "__qualname__", type(inner).__name__)

    def __getattr__(self, name: str) -> Any:  # cr_frame and its kin, which print stacks
        return getattr(self._inner, name)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise CodeExitError(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise CodeExitError(raised) from raised

    def close(self) -> None:
        self._inner.close()


def _is_outside(error: BaseException) -> bool:
    """Return whether the error is of a kind that a reply of the model can't cause.

    These are errors of the host, its files, memory and network (OSError includes ConnectionError and TimeoutError), of
    a server that is overloaded or refuses the key, cancellations, and bugs in the code itself, such as a wrong import
    or name.
    """
    if isinstance(error, _OUTSIDE) or not _OUTSIDE_NAMES.isdisjoint(base.__name__ for base in type(error).__mro__):
        return True
    places = ((error, "status_code"), (error, "status"), (_attribute(error, "response"), "status_code"))
    status = next(filter(None, (_attribute(*place) for place in places)), None)
    return isinstance(status, int) and (status >= 500 or status in _OUTSIDE_STATUSES)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the members of any exception groups among them."""
    left, seen = [error], set[int]()
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        before = error.__cause__ if error.__suppress_context__ else error.__cause__ or error.__context__
        left += [*_members(error), *([before] if before is not None else [])]


def _members(error: BaseException) -> list[BaseException]:
    """Return the errors in an ExceptionGroup; [] for any other error."""
    found = _attribute(error, "exceptions")
    return [each for each in found if isinstance(each, BaseException)] if isinstance(found, tuple) else []


def _place(error: BaseException) -> str:
    """Return the innermost `file:line` of a traceback outside installed packages.

    If all are inside, the innermost of all.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith(("<", *_LIBRARIES)) and "-packages/" not in place[0]]
    return "{}:{}".format(*(own or places)[-1]) if places else ""


def error_text(error: BaseException) -> str:
    """Return the text of an error. If the `__str__` of a user's class raises, return a placeholder."""
    try:
        return str(error)
    except Exception:
        return "an error that can't be shown"


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a user's object, or None if it is missing or raises."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


CANCEL_S = 1.0
"""How long a cancelled task may take to end. After that it is given up: it runs on, and nobody waits for it."""
_CREATED: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("created_tasks", default=None)
"""The unfinished tasks that an episode's user code has created. None outside such code."""

Result = TypeVar("Result")


class OverdueError(TimeoutError):
    """A call took longer than its time limit. Its message names the call and the limit."""


class ForeignCode:
    """Runs the code of one episode's environment, tools or agent under time limits.

    It records the tasks that this code creates (asyncio.create_task), and can end those left over. No such task can end
    the event loop: SystemExit and KeyboardInterrupt become a CodeExitError in the task that raised them.
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
        """Await `function` in a task and return its result.

        At the limit, cancel the task and wait at most CANCEL_S more.

        If the caller is cancelled, the task is cancelled too; see `end_cancelled_calls`.

        Args:
            what: names the call in error messages.

        Raises:
            OverdueError: the call took longer than `limit_s`.
            CodeExitError: the function raised an error that is no Exception, for example SystemExit.
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
        """Cancel the calls whose callers were cancelled, and wait at most CANCEL_S until they end.

        Called after the episode.

        Calls that are still running then are left alone and counted in `num_given_up`.
        """
        if self._cancelled:
            await self._end(list(self._cancelled))
            self._cancelled.clear()

    async def end_created_tasks(self) -> int:
        """Cancel the tasks that the user's code created and left running. Returns the number of these tasks.

        It waits at most CANCEL_S until they end. Tasks still running then are counted in `num_given_up`.
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
    """Make the running event loop record each new task in the ForeignCode whose code created it."""
    loop = asyncio.get_running_loop()
    inner = loop.get_task_factory()
    if isinstance(inner, _RecordingFactory):
        return
    loop.set_task_factory(_RecordingFactory(inner))


class _RecordingFactory:
    """A task factory for the event loop. It guards the coroutines of user code, and records their tasks in `_CREATED`.
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


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call a user's function and return the result. A `def` runs in a thread of its own, an `async def` is awaited.

    Raises:
        CodeExitError: a `def` raised an error that is no Exception, for example SystemExit.
    """
    if any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        return await function(*arguments, **options)
    result = await in_thread(partial(function, *arguments, **options))
    return await result if inspect.isawaitable(result) else result  # a `def` may pass its call on to an `async def`


async def in_thread(function: Callable[[], Result]) -> Result:
    """Run a function that may block in a daemon thread of its own, and return its result.

    asyncio.to_thread has few threads, and a thread that hangs is lost to all callers. If the caller is cancelled, the
    function runs to its end and its result is dropped.

    Raises:
        CodeExitError: the function raised an error that is no Exception, for example SystemExit.
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
