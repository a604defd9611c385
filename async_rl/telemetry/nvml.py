"""How busy NVIDIA says this process's GPUs are (NVML), sampled beside the accounting of the timeline.

NVML's utilisation is the share of time in which any kernel ran: it says nothing of how full the GPU was.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any

from async_rl.telemetry.timeline import Sample

INTERVAL_S = 0.5


class GpuSampler:
    """A thread that reads the GPUs named by CUDA_VISIBLE_DEVICES (all, if it is unset) twice a second.

    Without an NVIDIA driver or the package nvidia-ml-py it does nothing.
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
        """The samples since the last call: the mean over the devices at each instant."""
        with self._lock:
            samples, self._samples = tuple(self._samples), []
        return samples

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            with suppress(self._nvml.NVMLError):  # a reading that fails is a sample less
                self.read()

    def read(self) -> None:
        """Take one sample now."""
        percent = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu for device in self._devices]
        with self._lock:
            self._samples.append(Sample(self._pool, "gpu", time.time(), sum(percent) / len(percent) / 100))


def _open_devices() -> tuple[Any, list[Any]]:
    """(the pynvml module, handles of the visible GPUs); no handles where there is nothing to read."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible is not None else map(str, range(pynvml.nvmlDeviceGetCount()))
        return pynvml, [_handle(pynvml, name.strip()) for name in names if name.strip() not in ("", "-1")]
    except pynvml.NVMLError:
        return None, []


def _handle(pynvml: Any, name: str) -> Any:
    """CUDA_VISIBLE_DEVICES names a GPU by its index or its UUID."""
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
