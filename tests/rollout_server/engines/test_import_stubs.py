from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.sglang import import_stubs
from rollout_server.engines.sglang.import_stubs import Absent, MissingKernelError

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def absent_package() -> Iterator[str]:
    """The name of a package that exists nowhere, with a stub during the test."""
    finders = list(sys.meta_path)
    name = "no_such_kernels"
    assert import_stubs.install((name,)) == (name,)
    yield name
    sys.meta_path[:] = finders
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


def test_code_that_only_names_an_absent_package_can_be_imported(absent_package: str) -> None:
    module = importlib.import_module(f"{absent_package}.ops.deep")

    class Derived(module.Base):  # type: ignore[name-defined, misc]
        def method(self, x: module.Type | None = module.MODE.fast) -> None:  # type: ignore[name-defined]
            pass

    assert not isinstance(3, module.Type)
    assert Derived()


def test_calling_into_an_absent_package_names_the_function_and_the_package(absent_package: str) -> None:
    module = importlib.import_module(absent_package)
    with pytest.raises(MissingKernelError, match=r"no_such_kernels\.ops\.rms_norm"):
        module.ops.rms_norm(1, 2)


def test_a_package_that_can_be_imported_is_left_alone() -> None:
    importlib.import_module("rollout_server.engines.sglang.engine")  # installs none itself
    before = list(sys.meta_path)
    assert not any(type(finder).__module__ == import_stubs.__name__ for finder in before)
    assert import_stubs.install(("numpy", "json")) == ()
    assert sys.meta_path == before


def test_a_package_that_is_installed_but_cannot_be_loaded_gets_a_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise OSError('libcuda.so.1: cannot open shared object')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert import_stubs.install(("broken_kernels",)) == ("broken_kernels",)


ON_A_GPU = """
import importlib, os, re, sys, types
import torch

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
    major=9, minor=0, name="NVIDIA H200", total_memory=141 * 2**30, multi_processor_count=132, warp_size=32
)
from rollout_server.engines.sglang import import_stubs

print(*import_stubs.install())
import_stubs._WITH_FALLBACK = re.compile("triton.knobs|flashinfer.norm")  # all of sgl_kernel's modules are there
import_stubs.install(("triton", "sgl_kernel"))  # in place of the real ones, which a GPU host has
os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_sglang_can_be_imported_on_a_gpu_without_flashinfer() -> None:
    """It needs no GPU: torch is changed so that it reports one."""
    modules = (
        "srt.entrypoints.http_server", "srt.managers.scheduler", "srt.model_executor.model_runner",
        "srt.models.qwen2", "srt.models.llama", "srt.layers.attention.triton_backend", "benchmark.serving",
    )  # fmt: skip
    command = [sys.executable, "-c", ON_A_GPU, *(f"sglang.{module}" for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) >= {"flashinfer"}


def test_absent_names_have_no_special_methods() -> None:
    value: Any = Absent("package.thing")
    assert not hasattr(value, "__torch_function__")
    with pytest.raises(MissingKernelError):
        value[1]
