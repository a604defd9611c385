"""The number of cores that a process may use, and of threads that it starts on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.config import Config


def usable_cores() -> int:
    """Return the number of cores that this process may run on, as limited by SLURM, taskset or placement.pin_cpus."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(config: Config) -> int:
    """Return how many computing threads a learner rank or rollout server starts: an even share of the host's cores."""
    sharers = 1 if config.placement.pin_cpus else config.placement.processes_per_node  # pinned, it sees its own cores
    return max(1, usable_cores() // sharers)
