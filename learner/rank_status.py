"""The status of a learner rank for `async-rl status` and the watchdog, by the state of its timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from async_rl.config import TimeoutsConfig
from async_rl.telemetry.status import Status

PAUSE = "pause"
"""The name of the span of a learner that the watcher has paused."""
_WORDS = {"busy": "trains", "checkpoint": "saves", "wait_weights": "waits for a server to start on its GPU"}


def rank_status(
    rank: int, now: tuple[str, str, float], timeouts: TimeoutsConfig, pushed_to: Mapping[str, Sequence[str]]
) -> Status:
    """Return the status of a learner rank.

    Args:
        now: the state of its timeline, the name of the span, and its start by time.monotonic().
        pushed_to: the servers that get the weights, by the name of the push's span.
    """
    state, name, since_s = now
    others = "buffer" if rank == 0 else "learner/0"
    match state:
        case "eval":
            on = "the held-out evaluation"
            return Status(doing="holds its push", waits_on=on, since_s=since_s, limit_s=timeouts.work_s)
        case "wait_data":
            doing = "waits for running groups to end" if name == "drain" else "waits for a batch"
            return Status(doing=doing, waits_on=others, since_s=since_s, limit_s=timeouts.work_s)
        case "sync":
            servers = pushed_to.get(name, pushed_to["push"])  # each may die in a push: it is repeated without that one
            limit_s = 2 * timeouts.push_s * (1 + len(servers))  # to join the weight group, and to push
            return Status(doing="pushes weights", waits_on=", ".join(servers), since_s=since_s, limit_s=limit_s)
    if name == PAUSE:
        return Status(doing="is paused by the watcher", waits_on="a person: async-rl answer", since_s=since_s)
    return Status(doing=_WORDS.get(state, state), since_s=since_s)
