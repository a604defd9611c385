"""The errors of the project: one root, and a type of its own only where a caller handles it differently."""

import traceback


class AsyncRLError(Exception):
    """Root of the errors that carry a complete message for the user; the CLI prints it without a stack trace."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, file or input can't work. Says what was wrong, the value got, what is allowed, what to do."""


class WaitTimeoutError(AsyncRLError, TimeoutError):
    """A wait reached its time limit. Says who waited on whom, for what, for how long."""


class ProcessDiedError(AsyncRLError):
    """A process of the run ended early. Names it and shows its last log lines."""


class ProcessKilledError(ProcessDiedError):
    """The process itself has ended, not only a call of it failed: it may be started again."""


class StalenessError(AsyncRLError):
    """The staleness bound or the accounting of groups was violated. This is a bug, and training stops."""


class NothingToLearnError(AsyncRLError):
    """The buffer will hand out no further batch; says why. The learner saves a checkpoint and ends."""


class WireError(AsyncRLError, ValueError):
    """A received message is invalid. Names the field and the value."""


class WeightSyncError(AsyncRLError):
    """A weight push failed, or a server's weights differ from the learner's."""


class RewardError(AsyncRLError):
    """Too many groups failed in their reward function."""


def raised_at(error: BaseException) -> str:
    """The `file:line` where an error was raised, not counting Python's import machinery; empty without a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
