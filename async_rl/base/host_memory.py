"""The CPU memory that a process may use: its host's, or less in a container."""

from __future__ import annotations

from pathlib import Path

import psutil

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the memory limit of the container that this process runs in, in bytes; `max` without a limit."""


def host_bytes() -> int:
    """Return the memory of this host, or of the container that this process runs in."""
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def free_host_bytes() -> int:
    """Return the memory that processes of this host may still take, at most `host_bytes`."""
    return min(psutil.virtual_memory().available, host_bytes())
