"""GPUs that this host does not have, as torch and the CUDA driver report them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch


def pretend_gpus(
    patch: pytest.MonkeyPatch, count: int, gpu_bytes: int = 80 * 10**9, modes: tuple[int, ...] = ()
) -> None:
    """Let torch and the CUDA driver find `count` GPUs of `gpu_bytes`, with these compute modes."""
    driver = CudaDriver(gpu_bytes, modes or (0,) * count)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(ctypes, "CDLL", lambda name: driver)


class CudaDriver:
    """The part of libcuda that is asked about GPUs without a context."""

    def __init__(self, gpu_bytes: int, modes: tuple[int, ...]) -> None:
        self._gpu_bytes, self._modes = gpu_bytes, modes

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._modes)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        assert attribute == 20
        value._obj.value = self._modes[device.value]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self._gpu_bytes + device.value
        return 0
