"""Stubs for packages that SGLang imports but does not use when it serves text on this host.

A stub's names work as annotations, base classes, decorators and default values; calling one raises MissingKernelError.
A stub computes nothing, so it never computes a wrong number. It is installed only in the server's processes, and only
if the real package is missing or built for a GPU that this host does not have.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

ON_CPU = ("triton", "sgl_kernel", "torchvision")
ON_GPU = ("flashinfer", "torchvision")
"""Packages with stubs on a GPU. Not triton and sgl_kernel: SGLang needs them there, so their import errors are shown.
"""

_WITH_FALLBACK = re.compile(r"triton\.knobs|sgl_kernel\..+|flashinfer\.norm")
"""Modules that SGLang imports in try/except and can work without."""

_CURES = {
    "triton": "It runs on GPUs only: use --device cpu with a text model SGLang serves natively in torch",
    "sgl_kernel": "On a GPU install sglang-kernel; on CPU use --attention-backend torch_native",
    "flashinfer": "Install flashinfer-python, or use --attention-backend triton and --sampling-backend pytorch",
    "torchvision": "Only image models need it: install the torchvision that fits the installed torch",
}


class MissingKernelError(NotImplementedError):
    """The SGLang server called a function of a package that is missing on this host. The message says what to do."""


class Absent:
    """A placeholder for a name of a missing package.

    It can be passed on; calling or indexing it raises MissingKernelError.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(f"the stub of {self.__name__}, which can't be imported here, has no {attribute}")
        return Absent(f"{self.__name__}.{attribute}")

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        package = self.__name__.partition(".")[0]
        raise MissingKernelError(
            f"{self.__name__} was called, but {package} can't be imported here. {_CURES.get(package, '')}."
        )

    def __getitem__(self, _grid: object) -> Any:  # kernel[grid](...): the launch of a triton kernel
        return self()

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()  # class Foo(absent.Base): ...

    def __instancecheck__(self, _instance: object) -> bool:
        return False

    def __or__(self, _other: object) -> Absent:  # annotations: absent.Type | None
        return self

    __ror__ = __or__


def _kernel(function: Callable[..., Any] | Absent | None = None, **_options: object) -> Any:
    """Stand in for the decorator @triton.jit, with or without options: return an Absent in place of the function."""
    if function is None:
        return _kernel
    if isinstance(function, Absent):  # under a second decorator: keep the kernel's name
        return function
    return Absent(f"triton.jit({function.__module__}.{function.__qualname__})")


_REAL: dict[str, Any] = {  # names that SGLang's modules call while they are imported
    "triton.jit": _kernel,
    "triton.autotune": lambda *_args, **_kwargs: _kernel,
    "triton.heuristics": lambda *_args, **_kwargs: _kernel,
    "triton.Config": lambda kwargs, **_options: SimpleNamespace(kwargs=kwargs),
    "triton.language.constexpr": lambda value: SimpleNamespace(value=value),
    "triton.cdiv": lambda a, b: -(a // -b),
    "triton.next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 0,
}


class _AbsentModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"the stub of the module {self.__name__} has no {attribute}")
        name = f"{self.__name__}.{attribute}"
        value = _REAL[name] if name in _REAL else Absent(name)
        setattr(self, attribute, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages or _WITH_FALLBACK.fullmatch(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing on the import of a stub: `_AbsentModule` creates its names when they are used."""


def _is_usable(package: str) -> bool:
    if importlib.util.find_spec(package) is None:
        return False
    if package == "triton":
        return True  # pure Python until a kernel is compiled; importing it takes seconds
    try:
        importlib.import_module(package)
    except Exception:  # a library built for a GPU raises anything from ImportError to RuntimeError here
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        return False
    return True


def _needed_here() -> tuple[str, ...]:
    import torch

    return ON_GPU if torch.cuda.is_available() else ON_CPU


def install(packages: Sequence[str] | None = None) -> tuple[str, ...]:
    """Install stubs for those `packages` that can't be imported; return their names. Call this before importing sglang.

    By default `packages` is what SGLang can do without on this host: ON_GPU or ON_CPU.
    """
    packages = _needed_here() if packages is None else packages
    missing = tuple(package for package in packages if not _is_usable(package))
    if "sgl_kernel" in missing:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if "triton" in missing:  # torch looks for triton once, now: it must not take the stub for a compiler later
        from torch.utils._triton import has_triton_package

        has_triton_package()
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile's back end would look into triton
    if "flashinfer" in missing:
        os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing
