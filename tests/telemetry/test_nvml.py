"""The NVML sampler against a stand-in for pynvml: the machine of the tests may have no GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_rl.telemetry import nvml as gpu
from async_rl.telemetry.nvml import GpuSampler

BUSY = {"0": 40, "1": 80, "GPU-abc": 10}


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
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=BUSY[handle], memory=0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpu, "INTERVAL_S", 3600.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 0.6), ("1", 0.8), ("GPU-abc", 0.1), ("0,1", 0.6)]
)
def test_a_sample_is_the_mean_over_the_gpus_the_process_sees(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: float
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sampler = GpuSampler("learner/0")
    sampler.read()
    (sample,) = sampler.drain()
    assert (sample.pool, sample.name) == ("learner/0", "gpu")
    assert sample.value == pytest.approx(expected)
    assert sampler.drain() == ()
    sampler.close()


def test_the_thread_samples_by_itself(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "INTERVAL_S", 0.001)
    sampler = GpuSampler("rollout/0")
    while not (samples := sampler.drain()):
        pass
    assert samples[0].value == pytest.approx(0.6)
    sampler.close()


def test_without_a_driver_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert GpuSampler("learner/0").drain() == ()


def test_without_the_package_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuSampler("learner/0").drain() == ()
