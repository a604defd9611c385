"""Describes the errors of a user's code, and keeps those that would end the event loop inside of their own call.

It uses the standard library only, because the process of an agent imports it in a Python environment of its own.
"""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple

MAX_CHARACTERS = 2_000
"""The longest text of an error that is kept. Some errors hold a whole response of a server."""
MAX_TRACEBACK_CHARACTERS = 8_000
"""The longest traceback that is kept; a longer one loses its middle."""

_OUTSIDE = (OSError, MemoryError, ImportError, NameError, SyntaxError, asyncio.CancelledError)
_OUTSIDE_NAMES = {"AsyncRLError", "APIConnectionError", "TransportError", "ClientConnectionError"}
"""Classes that are not OSErrors: this project's, and the lost connections of openai, httpx and aiohttp. They are
known by their names, because an agent's environment may have any version of them, or none."""
_OUTSIDE_STATUSES = (401, 403, 408, 429)
"""Answers of a server, besides 500 and up, that say nothing about the request itself."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class CodeExitError(Exception):
    """A user's code raised an error that is no `Exception`, its `__cause__`: SystemExit, CancelledError, ...

    asyncio would end the event loop of all others for SystemExit and KeyboardInterrupt, and take a CancelledError for
    a cancellation by the caller.
    """

    __cause__: BaseException

    def __init__(self, cause: BaseException) -> None:
        super().__init__(error_text(cause))
        self.__cause__ = cause


class Fault(NamedTuple):
    """An error that a user's code raised, in words, as JSON can carry it."""

    name: str
    """The name of its class."""
    text: str
    at: str
    """`file:line` of the last line of the user's own code that it came through, or "" if it has no traceback."""
    traceback: str
    is_outside: bool
    """Whether no reply of the model can cause errors of this kind; see `_is_outside`."""

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
    """An agent raised in a process of its own. `fault` is what its process says of the error."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class GuardedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that runs another one, and raises CodeExitError where that raises SystemExit or KeyboardInterrupt."""

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
    """Return whether an error is of a kind that no reply of the model causes.

    It is about the host, its files and its network (OSError, which includes ConnectionError and TimeoutError), memory,
    a server that is overloaded or refuses the key, a cancellation, or a mistake in the code itself (an import, a name).
    """
    if isinstance(error, _OUTSIDE) or not _OUTSIDE_NAMES.isdisjoint(base.__name__ for base in type(error).__mro__):
        return True
    places = ((error, "status_code"), (error, "status"), (_attribute(error, "response"), "status_code"))
    status = next(filter(None, (_attribute(*place) for place in places)), None)
    return isinstance(status, int) and (status >= 500 or status in _OUTSIDE_STATUSES)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the members of groups, and all errors from which, or while handling which, they were raised."""
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
    """Return the errors in an ExceptionGroup; of any other error none."""
    found = _attribute(error, "exceptions")
    return [each for each in found if isinstance(each, BaseException)] if isinstance(found, tuple) else []


def _place(error: BaseException) -> str:
    """Return the last `file:line` of an error's traceback outside of installed packages, or the last one of all."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith(("<", *_LIBRARIES)) and "-packages/" not in place[0]]
    return "{}:{}".format(*(own or places)[-1]) if places else ""


def error_text(error: BaseException) -> str:
    """Return the text of an error of a user's class, also if the class can't make one."""
    try:
        return str(error)
    except Exception:
        return "an error that can't be shown"


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a user's object, or None if it has none or can't make it."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
