"""Checks of this host's GPUs: that torch finds them, as else a run would train on the CPU, and that they can be shared.

The CUDA driver is asked without a context on a device, which would take memory there.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.nvml import shares_in_use

DEVICES, VERSION = Path("/dev"), Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest NVIDIA driver by major version of CUDA."""

_COMPUTE_MODE, _EXCLUSIVE_PROCESS = 20, 3
"""CU_DEVICE_ATTRIBUTE_COMPUTE_MODE of the CUDA driver, and its value for GPUs that only one process may use."""
TAKEN_SHARE = 0.1
"""More than the share of a GPU's memory that its driver and a desktop use."""
UNSHARED = (
    "Have the administrator of the host run `nvidia-smi -c DEFAULT`, or start NVIDIA's MPS, which shares such a GPU: "
    "nvidia-cuda-mps-control -d"
)
"""The advice for GPUs in compute mode EXCLUSIVE_PROCESS."""


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs from this process, in one of the three ways in use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")


def check_gpu_driver() -> None:
    """Check that torch finds a GPU if this host has one that the user has not hidden.

    Raises:
        ConfigError: there are GPUs and torch finds none; it says which driver is needed and which one is there.
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
    """Return the memory of the smallest GPU that CUDA shows to this process; 0 if the CUDA driver names none."""
    cuda, devices = _visible_devices()
    size = ctypes.c_size_t()
    return min(
        (size.value for device in devices if not cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)), default=0
    )


def checked_gpu_bytes() -> int:
    """Return `smallest_gpu_bytes` of this process of a Ray cluster.

    Raises:
        ConfigError: this host has GPUs, and torch finds none; it names the host, where nothing else would notice.
    """
    import ray

    try:
        check_gpu_driver()
    except ConfigError as error:
        raise ConfigError(f"{ray.util.get_node_ip_address()}: {error}, there before `ray start`") from None
    return smallest_gpu_bytes()


def check_shared_gpus(num_processes: int) -> None:
    """Check that `num_processes` of a run can share a GPU of this host, if that is more than one.

    Raises:
        ConfigError: the compute mode of a GPU lets one process use it, and no MPS is there to be that process.
    """
    if num_processes > 1 and (gpus := exclusive_gpus()):
        raise ConfigError(
            f"{num_processes} processes of the run share a GPU, and GPU {gpus[0]} is in compute mode "
            f"EXCLUSIVE_PROCESS: it would refuse the second one. {UNSHARED}. Or give each process a GPU"
        )


def taken_gpus() -> list[str]:
    """Return a caution if more than TAKEN_SHARE of the memory of a visible GPU of this host is in use; else []."""
    taken = [f"{ordinal} ({share:.0%})" for ordinal, share in enumerate(shares_in_use()) if share > TAKEN_SHARE]
    if not taken:
        return []
    return [
        f"placement: other programs use memory of GPU {', '.join(taken)}, as CUDA counts them here, and a run may take "
        "any GPU that it sees. Let it see only free ones: CUDA_VISIBLE_DEVICES=2,3, say."
    ]


def exclusive_gpus() -> list[int]:
    """Return the ordinals of the GPUs that CUDA shows to this process in exclusive mode: one process may use each.

    With NVIDIA's MPS (CUDA_MPS_PIPE_DIRECTORY) there are none, because its server is that process.
    """
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control").exists():
        return []
    cuda, devices = _visible_devices()
    mode = ctypes.c_int()
    return [
        ordinal for ordinal, device in enumerate(devices)
        if not cuda.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device) and mode.value == _EXCLUSIVE_PROCESS
    ]


def _visible_devices() -> tuple[Any, list[ctypes.c_int]]:
    """Return (the CUDA driver, its handles of the GPUs that it shows to this process); (None, []) without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):  # an error code: no device is visible
        return cuda, []
    devices = [ctypes.c_int() for _ in range(count.value)]
    return cuda, [each for ordinal, each in enumerate(devices) if not cuda.cuDeviceGet(ctypes.byref(each), ordinal)]
