"""The errors of the project: one root class, and a subclass wherever callers handle an error differently."""

import sysconfig
import traceback


class AsyncRLError(Exception):
    """The base class of errors with a complete message for the user. The CLI prints it without a stack trace."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, file or input can't work. The message says what is wrong, the value, what is allowed, and what to do.
    """


class WaitTimeoutError(AsyncRLError, TimeoutError):
    """A wait reached its time limit. The message says who waited for whom, for what, and for how long.

    Args:
        names: if several calls were made together, the one that timed out by itself, or those that were still running.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class ProcessDiedError(AsyncRLError):
    """A process of the run ended early or hangs, or Ray can't call it. The message names it.

    An error raised by a call in a living process is another error.
    """


class ProcessKilledError(ProcessDiedError):
    """A process died after it had started, or the buffer hangs. The driver can start another buffer from the journal.

    If a process fails while it starts, or Ray can't call it, that is a plain ProcessDiedError.
    """


class StalenessError(AsyncRLError):
    """The staleness bound or the accounting of groups was violated. This is a bug, and training stops."""


class NothingToLearnError(AsyncRLError):
    """The buffer will return no further batch. The message says why; the learner saves a checkpoint and ends."""


class WireError(AsyncRLError, ValueError):
    """A message from another process is invalid. The error's message names the field and the value."""


class WeightSyncError(AsyncRLError):
    """A weight push or another request to a rollout server failed, or its weights differ from the learner's.

    Args:
        names: if several calls were made together, the one that failed.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class ServersSilentError(WeightSyncError):
    """The servers `names` did not answer before a push began. If all answer again, the push can be repeated."""


class RewardError(AsyncRLError):
    """A reward could not be computed, or rewards failed for too many groups in a row (task.max_failures)."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in an exception group that is not itself a group, depth first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def shown(value: object) -> str:
    """Return a value as text for an error: 200 characters of its repr, or its class if its repr raises.

    The repr of an integer with more than 4300 digits raises, also inside a list.
    """
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"a value of the class {type(value).__name__} that can't be shown"


def raised_at(error: BaseException) -> str:
    """Return the last `file:line` in an error's traceback that is outside Python and its packages: the user's own line.

    Without one it is the last line outside importlib; "" if there is none.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [f for f in frames if not f.filename.startswith(libraries)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
