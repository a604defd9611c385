"""What a process may use of its host, or of its container: cores, computing threads, CPU memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from async_rl.base.config import Config

BEGAN_WITH = Path("/proc/self/environ")
"""The environment with which this process started. os.environ may have variables that Python code added later."""
SPINS = 2_000
"""How often a computing thread looks for work before it sleeps: some ten microseconds, the time between two operators.
libgomp's default, 300,000, is right for a process that has its cores for itself. If other processes use the same cores,
it wastes nine tenths of the CPU time, because a thread spins until a peer gets a core again."""
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the memory limit of the container that this process runs in, in bytes; `max` without a limit."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on, as limited by SLURM, taskset or placement.pin_cpus."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_spinning() -> None:
    """Make computing threads of this process and its children look for work SPINS times before they sleep.

    Call it before torch is imported. GOMP_SPINCOUNT and OMP_WAIT_POLICY set by the user are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def threads_per_process(config: Config) -> int:
    """Return how many computing threads a learner rank or rollout server starts: an equal share of the host's cores."""
    sharers = 1 if config.placement.pin_cpus else config.placement.processes_per_node  # pinned, it sees its own cores
    return max(1, usable_cores() // sharers)


def server_threads(config: Config) -> str:
    """Return OMP_NUM_THREADS for a server's process: the user's value, else an equal share of the host's cores."""
    value = os.environ.get("OMP_NUM_THREADS")
    return str(threads_per_process(config)) if value is None or _ray_chose_threads() else value


def _ray_chose_threads() -> bool:
    """Whether Ray, not the user, set OMP_NUM_THREADS: Ray sets it to 1 in an actor that started without it."""
    if "RAY_RAYLET_PID" not in os.environ or not BEGAN_WITH.exists():  # no process that Ray has started
        return False
    return not any(each.startswith(b"OMP_NUM_THREADS=") for each in BEGAN_WITH.read_bytes().split(b"\0"))


def host_bytes() -> int:
    """Return the memory of this host, or of the container that this process runs in."""
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def free_host_bytes() -> int:
    """Return the memory that processes of this host may still take, at most `host_bytes`."""
    return min(psutil.virtual_memory().available, host_bytes())
