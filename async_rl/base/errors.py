"""The errors of the project: one root class, and further classes where a caller handles an error differently."""

import sysconfig
import traceback


class AsyncRLError(Exception):
    """The base class of errors whose message is complete for the user; the CLI prints it without a stack trace."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, file or input can't work. The message says what was wrong, the value, what is allowed, what to do."""


class WaitTimeoutError(AsyncRLError, TimeoutError):
    """A wait reached its time limit. The message says who waited on whom, for what, and for how long.

    Of calls that were made together, `names` are those that were still running.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class ProcessDiedError(AsyncRLError):
    """A process of the run ended early or hangs, or Ray can't call it; the message names it.

    An error that a call raises in a living process is not one of these.
    """


class ProcessKilledError(ProcessDiedError):
    """A process died after it had started, or the buffer hangs. The driver can start another buffer from the journal.

    A process that fails while it starts, or that Ray can't call, is a plain ProcessDiedError.
    """


class StalenessError(AsyncRLError):
    """The staleness bound or the accounting of groups was violated. This is a bug, and training stops."""


class NothingToLearnError(AsyncRLError):
    """The buffer will hand out no further batch. The message says why; the learner saves a checkpoint and ends."""


class WireError(AsyncRLError, ValueError):
    """A message from another process is invalid. The error's text names the field and the value."""


class WeightSyncError(AsyncRLError):
    """A weight push or another request to a rollout server failed, or its weights differ from the learner's."""


class ServersSilentError(WeightSyncError):
    """The servers `names` did not answer before a push, which had not begun. If all answer again, repeat it."""

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class RewardError(AsyncRLError):
    """A reward could not be computed, or the rewards of too many groups in a row (task.max_failures) could not."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group that is no group itself, depth first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def shown(value: object) -> str:
    """Return a value for the text of an error: 200 characters of its repr, or its class if its repr raises.

    An integer with more than 4300 digits raises, also within a list.
    """
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"a value of the class {type(value).__name__} that can't be shown"


def raised_at(error: BaseException) -> str:
    """Return the last `file:line` of an error's traceback outside of Python and its packages, so the user's own line.

    Without one it is the last line that is not in importlib; "" if there is none.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [f for f in frames if not f.filename.startswith(libraries)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
