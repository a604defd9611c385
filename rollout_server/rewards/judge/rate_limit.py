"""A rate limit that all workers of a host share: a token bucket in a file of the run directory.

The file has two times of the monotonic clock, which all processes of a host share: when the bucket would be full again,
and until when the endpoint wants to be left alone. A lock on the file ends with the process that holds it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_TIMES = struct.Struct("<dd")
LONGEST_S = 86_400.0
"""A time in the file that is further ahead was written before the host started again; it is ignored."""


class RateLimit:
    """Lets requests through, first come, first served, `per_minute` of them in a minute and a second's worth at once.

    Args:
        run_dir: the folder of the file; if there is no such folder, only the callers of this object are limited.
        per_minute: the requests in a minute; 0: only `block` holds them back.
    """

    def __init__(self, run_dir: Path, per_minute: float) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._burst_s = max(0.0, 1.0 - self._interval_s)
        if run_dir.is_dir():
            file = run_dir / f"judge-{socket.gethostname()}.limit"
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            self._descriptor, name = tempfile.mkstemp()
            os.unlink(name)

    async def acquire(self) -> float:
        """Wait until the rate has room for a request; returns for how many seconds. The caller limits the time."""
        began_s = time.monotonic()
        await asyncio.sleep(self._reserve() - began_s)
        return time.monotonic() - began_s

    def is_blocked(self) -> bool:
        """Return whether the endpoint wants to be left alone now."""
        return self._blocked_s() > 0

    async def wait_out_block(self) -> float:
        """Wait until the endpoint no longer wants to be left alone; returns for how many seconds. The caller limits it.
        """
        began_s = time.monotonic()
        while (left_s := self._blocked_s()) > 0:  # the endpoint may ask for more time meanwhile
            await asyncio.sleep(left_s)
        return time.monotonic() - began_s

    def block(self, seconds: float) -> None:
        """Let no worker of this host send a request for so long, because the endpoint asks for it."""
        self._change(lambda full_s, blocked_s, now_s: (full_s, max(blocked_s, now_s + seconds)))

    def close(self) -> None:
        os.close(self._descriptor)

    def _blocked_s(self) -> float:
        """Return for how many seconds more no request may be sent; not above 0 if one may."""
        return self._times()[1] - time.monotonic()

    def _reserve(self) -> float:
        """Take a token, perhaps one of the future, and return when it is there."""
        full_s = self._change(lambda full_s, blocked_s, now_s: (max(full_s, now_s) + self._interval_s, blocked_s))[0]
        return full_s - self._interval_s - self._burst_s

    def _change(self, change: Callable[[float, float, float], tuple[float, float]]) -> tuple[float, float]:
        """Replace the two times by what `change` makes of them and of the present, and return them."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            times = change(*self._times(), time.monotonic())
            os.pwrite(self._descriptor, _TIMES.pack(*times), 0)
            return times
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _times(self) -> tuple[float, float]:
        """Return when the bucket would be full again, and until when no request may be sent."""
        data = os.pread(self._descriptor, _TIMES.size, 0)
        full_s, blocked_s = _TIMES.unpack(data) if len(data) == _TIMES.size else (0.0, 0.0)
        latest_s = time.monotonic() + LONGEST_S
        return full_s if full_s < latest_s else 0.0, blocked_s if blocked_s < latest_s else 0.0
