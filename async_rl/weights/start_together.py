"""Calls of several servers at once, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError


def start_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> Callable[[], dict[str, Any]]:
    """Start all calls, each in its own thread; return a function that waits for their results by name.

    The threads are daemons: a collective that can no longer complete must not keep the process from ending.

    Raises (the returned function does):
        WeightSyncError: a call failed; the message names it. The other calls may still be running.
        WaitTimeoutError: a call waited too long itself, or calls are still running after `limit`; the message names
            them.
    """
    futures: dict[str, Future[Any]] = {name: Future() for name in calls}
    deadline = time.monotonic() + limit.seconds

    def work(name: str) -> None:
        try:
            futures[name].set_result(calls[name]())
        except BaseException as error:
            futures[name].set_exception(error)

    def wait_for_results() -> dict[str, Any]:
        done, running = wait(futures.values(), max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        for name, future in futures.items():
            if future in done and (error := future.exception()):
                kind = WaitTimeoutError if isinstance(error, WaitTimeoutError) else WeightSyncError
                raise kind(f"{what}: {name} failed: {error}") from error
        if running:
            names = tuple(sorted(name for name, future in futures.items() if future in running))
            raise WaitTimeoutError(f"{what}: the learner waited {limit} for {', '.join(names)}", names)
        return {name: future.result() for name, future in futures.items()}

    for name in calls:
        threading.Thread(target=work, args=(name,), name=f"{what}: {name}", daemon=True).start()
    return wait_for_results
