"""The NVML sampler against stand-ins for pynvml and the CUDA driver: the machine of the tests may have no GPU."""

from __future__ import annotations

import os
import sys
import uuid
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_rl.base.telemetry import nvml
from async_rl.base.telemetry.nvml import GpuSampler

SLOW, FAST = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
BY_PCI_BUS = [SLOW, FAST]
"""The order of NVML's indices; CUDA's own order has the fastest GPU first."""
BUSY = {SLOW: 40, FAST: 80}


class FakeNvml(ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver = driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(BY_PCI_BUS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return BY_PCI_BUS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=8 if handle == SLOW else 1, total=10)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=BUSY[handle], memory=0)


class FakeCuda:
    """The driver API as far as it names devices; arguments are ctypes objects, results are error codes."""

    def __init__(self) -> None:
        order = BY_PCI_BUS if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else [FAST, SLOW]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        self.visible = [order[int(name)] if name.isdigit() else name for name in visible if name]

    def cuInit(self, flags: int) -> int:
        return 0 if self.visible else 100  # CUDA_ERROR_NO_DEVICE

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.visible)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 10 + ordinal
        return 0

    def cuDeviceGetUuid(self, identifier: Any, device: Any) -> int:
        identifier.raw = uuid.UUID(self.visible[device.value - 10].removeprefix("GPU-")).bytes
        return 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeCuda())
    monkeypatch.setattr(nvml, "INTERVAL_S", 3600.0)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        (None, None, 0.6), ("0,1", None, 0.6), (SLOW, None, 0.4), (f"{FAST},{SLOW}", None, 0.6),
        ("0", None, 0.8), ("1", None, 0.4), ("0", "PCI_BUS_ID", 0.4), ("1", "PCI_BUS_ID", 0.8),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_sample_is_the_mean_over_the_gpus_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, expected: float
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is not None:
            monkeypatch.setenv(name, value)
    sampler = GpuSampler("learner/0")
    sampler.read()
    (sample,) = sampler.drain()
    assert (sample.pool, sample.name) == ("learner/0", "gpu")
    assert sample.value == pytest.approx(expected)
    assert sampler.drain() == ()
    sampler.close()


@pytest.mark.parametrize(("nvml", "visible"), [(FakeNvml(), ""), (FakeNvml(driver=False), "0"), (None, "0")])
@pytest.mark.usefixtures("gpus")
def test_without_a_visible_gpu_a_driver_or_the_package_there_are_no_samples(
    nvml: ModuleType | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GpuSampler("learner/0").drain() == ()
