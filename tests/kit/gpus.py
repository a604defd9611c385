"""GPUs that this host does not have, as torch and the CUDA driver report them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch


def pretend_gpus(
    patch: pytest.MonkeyPatch, count: int, gpu_bytes: int = 80 * 10**9
) -> None:
    """Let torch and the CUDA driver find `count` GPUs of `gpu_bytes`."""
    driver = CudaDriver(gpu_bytes, count)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(ctypes, "CDLL", lambda name: driver)


class CudaDriver:
    """The part of libcuda that is asked about GPUs without a context."""

    def __init__(self, gpu_bytes: int, num_gpus: int) -> None:
        self._gpu_bytes, self._num_gpus = gpu_bytes, num_gpus

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._num_gpus
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self._gpu_bytes + device.value
        return 0
