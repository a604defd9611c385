"""This host's GPUs: whether torch finds them (otherwise a run would silently train on the CPU), and their memory.

The CUDA driver is asked without creating a context on a device, which would take memory there. From the GPUs' sizes the
memory of a run is planned before it starts (learner/memory/memory_plan.py).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.host import host_bytes
from async_rl.run.processes.placement import gpus_here, gpus_per_rank
from async_rl.run.processes.ray_start import hides_gpus

if TYPE_CHECKING:
    from learner.memory.memory_plan import MemoryPlan

DEVICES, VERSION = Path("/dev"), Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest supported NVIDIA driver, by major version of CUDA."""
UNKNOWN_SIZE = "the CUDA driver does not say how large this host's GPUs are"


def check_gpu_driver() -> None:
    """Check that torch finds this host's GPUs, unless there are none or the user has hidden them.

    Raises:
        ConfigError: there are GPUs but torch finds none. The message has the driver's version and the needed one.
    """
    gpus = [file.name for file in DEVICES.glob("nvidia[0-9]*")]  # a container without GPUs has none of these files
    if not gpus or hides_gpus():
        return
    import torch

    if torch.cuda.is_available():
        return
    cpu_only = "Or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    if torch.version.cuda is None:
        raise ConfigError(
            f"this host has {len(gpus)} NVIDIA GPU(s), and this torch ({torch.__version__}) is built for CPUs. "
            f"Install the CUDA set: make venv. {cpu_only}"
        )
    found = re.search(r"Module +([0-9.]+)", VERSION.read_text()) if VERSION.exists() else None
    oldest = _OLDEST_DRIVER.get(int(torch.version.cuda.partition(".")[0]))
    needs = f"{oldest} or newer" if oldest else "newer"
    raise ConfigError(
        f"this host has {len(gpus)} NVIDIA GPU(s), and torch finds none: its CUDA {torch.version.cuda} wants an NVIDIA "
        f"driver {needs}, here is {found[1] if found else 'an unknown one'}. Install a newer driver. {cpu_only}"
    )


def smallest_gpu_bytes() -> int:
    """Return the memory of the smallest GPU visible to this process; 0 if the CUDA driver reports none."""
    cuda, devices = _visible_devices()
    size = ctypes.c_size_t()
    return min(
        (size.value for device in devices if not cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)), default=0
    )


def checked_gpu_bytes() -> int:
    """Return `smallest_gpu_bytes` on this host of a Ray cluster, after `check_gpu_driver`.

    Raises:
        ConfigError: this host has GPUs but torch finds none. The message names the host.
    """
    import ray

    try:
        check_gpu_driver()
    except ConfigError as error:
        raise ConfigError(f"{ray.util.get_node_ip_address()}: {error}, there before `ray start`") from None
    return smallest_gpu_bytes()


def _visible_devices() -> tuple[Any, list[ctypes.c_int]]:
    """Return (the CUDA driver, its handles of the GPUs visible to this process); (None, []) without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):  # an error code: no device is visible
        return cuda, []
    devices = [ctypes.c_int() for _ in range(count.value)]
    return cuda, [each for ordinal, each in enumerate(devices) if not cuda.cuDeviceGet(ctypes.byref(each), ordinal)]


def plan_memory(config: Config, gpus: float, num_bytes: int) -> MemoryPlan:
    """Return the memory plan of a run.

    Args:
        gpus: the number of GPUs of all hosts together; 0: the run uses no GPU.
        num_bytes: the memory of each GPU, or without GPUs of the host.
    """
    from learner.memory.memory_plan import MemoryPlan
    from rollout_server.engines.base import kv_token_bytes

    return MemoryPlan(config, gpus_per_rank(config, gpus) if gpus else 0.0, num_bytes, kv_token_bytes)


def plan_here(config: Config) -> MemoryPlan | None:
    """Return the memory plan of a run on this host; None if the size of its GPUs is not known."""
    gpus = gpus_here()
    num_bytes = smallest_gpu_bytes() if gpus else host_bytes()
    return plan_memory(config, gpus, num_bytes) if num_bytes else None


def check_memory(config: Config) -> list[str]:
    """Check the memory of this host. Returns warnings, see MemoryPlan.check. Raises ConfigError if it is too small."""
    plan = plan_here(config)
    return plan.check() if plan else [f"memory: not checked, because {UNKNOWN_SIZE}"]
