"""Utilisation of the GPUs visible to this process, measured by NVIDIA's management library (NVML).

These samples are independent of the timeline. NVML reports the share of time while any kernel ran. It does not say how
much of the GPU the kernel used.
"""

from __future__ import annotations

import ctypes
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

from async_rl.base.telemetry.timeline import Sample

INTERVAL_S = 0.5


class GpuSampler:
    """Measures, in a thread, the utilisation of the GPUs visible to this process, every INTERVAL_S seconds.

    Without an NVIDIA driver or the package nvidia-ml-py there are no samples.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._samples: list[Sample] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._nvml, self._devices = _open_devices()
        if self._devices:
            threading.Thread(target=self._run, name=f"{pool} NVML", daemon=True).start()

    def drain(self) -> tuple[Sample, ...]:
        """Return the samples since the last call, each the mean over all devices at one instant, and delete them."""
        with self._lock:
            samples, self._samples = tuple(self._samples), []
        return samples

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            with suppress(self._nvml.NVMLError):  # a reading that fails is left out
                self.read()

    def read(self) -> None:
        """Measure the utilisation of all devices once, and store their mean for `drain`."""
        percent = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu for device in self._devices]
        with self._lock:
            self._samples.append(Sample(self._pool, "gpu", time.monotonic(), sum(percent) / len(percent) / 100))


def _open_devices() -> tuple[Any, list[Any]]:
    """Return (module pynvml, its handles of the visible GPUs); (None, []) without the package, a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByUUID(name) for name in _visible_uuids()]
    except pynvml.NVMLError:
        return None, []


def _visible_uuids() -> list[str]:
    """Return the UUIDs of the GPUs visible to this process, as NVML spells them.

    It asks CUDA itself, because CUDA's ordinals are not NVML's indices: CUDA_VISIBLE_DEVICES selects devices, and
    without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA counts the fastest one first. Asking creates no context on a device.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return []
    count, device, identifier = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):  # an error code: no device is visible
        return []
    names = []
    for ordinal in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid(identifier, device):
            return []
        names.append(f"GPU-{uuid.UUID(bytes=identifier.raw)}")
    return names
