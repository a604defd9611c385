from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.engines.sglang import import_stubs
from rollout_server.engines.sglang.import_stubs import MissingKernelError

pytestmark = pytest.mark.processes


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
    assert not hasattr(module.ops, "__torch_function__")


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
