"""Frees a worker that hangs in a collective of a failed push, as async_rl/base/weights/broadcast.py does elsewhere."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, ProcessGroup, TCPStore


def abort_when_told(group: ProcessGroup, name: str, host: str, port: int) -> None:
    """Start a thread that aborts `group` once the learner, which serves the store at `host`, says so or has ended."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)

    def wait_and_abort() -> None:
        with suppress(DistError, RuntimeError):
            PrefixStore(name, store).wait(["aborted"], timedelta(days=1000))
        group.abort()

    threading.Thread(target=wait_and_abort, name=f"abort of {name}", daemon=True).start()
