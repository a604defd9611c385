"""Plans the memory of a run before its start, for the GPUs of this host or of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.base.config import Config
from async_rl.run.processes.gpu_driver import smallest_gpu_bytes
from async_rl.run.processes.placement import gpus_here
from async_rl.run.processes.resources import gpus_per_rank

if TYPE_CHECKING:
    from learner.memory.plan import MemoryPlan

UNKNOWN_SIZE = "the CUDA driver does not say how large this host's GPUs are"


def plan_memory(config: Config, gpus: float, num_bytes: int) -> MemoryPlan:
    """Return the plan for `gpus` GPUs of `num_bytes` on all hosts together; with 0 for a host with `num_bytes`."""
    from learner.memory.plan import MemoryPlan
    from rollout_server.engines.base import kv_token_bytes

    return MemoryPlan(config, gpus_per_rank(config, gpus) if gpus else 0.0, num_bytes, kv_token_bytes)


def plan_here(config: Config) -> MemoryPlan | None:
    """Return the plan for a run on this host; None: the size of its GPUs is not known."""
    from learner.memory.plan import host_bytes

    gpus = gpus_here()
    num_bytes = smallest_gpu_bytes() if gpus else host_bytes()
    return plan_memory(config, gpus, num_bytes) if num_bytes else None


def check_memory(config: Config) -> list[str]:
    """Return warnings about memory on this host, see MemoryPlan.check."""
    plan = plan_here(config)
    return plan.check() if plan else [f"memory: not checked, because {UNKNOWN_SIZE}"]
