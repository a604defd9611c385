"""One root, and own types only where a caller acts differently."""

import traceback


class AsyncRLError(Exception):
    """Root of the errors that carry a complete message for the user; the CLI prints it without a stack trace."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, file or input can't work. Says what was wrong, the value got, what is allowed, what to do."""


class WaitTimeoutError(AsyncRLError, TimeoutError):
    """A named wait ran out of time. Says who waited on whom, for what, for how long."""


class ProcessDiedError(AsyncRLError):
    """A process of the run ended early. Names it and shows its last log lines."""


class ProcessKilledError(ProcessDiedError):
    """The process itself is gone, not only a call of it failed: another one may take its place."""


class StalenessError(AsyncRLError):
    """The staleness bound or the accounting identity was violated: a bug, never trained through."""


class NothingToLearnError(AsyncRLError):
    """The buffer will hand out no batch any more; says why. The learner saves what it has and ends."""


class WireError(AsyncRLError, ValueError):
    """A message was refused at the door. Names the field and the value."""


class WeightSyncError(AsyncRLError):
    """A weight push failed, or the server's weights are not the learner's."""


class RewardError(AsyncRLError):
    """Too many groups failed in their reward function."""


def raised_at(error: BaseException) -> str:
    """`file:line` where it was raised, leaving out Python's own import machinery; empty: it has no traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
