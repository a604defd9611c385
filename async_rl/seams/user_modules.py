"""Imports in modules of the working directory: there `buffer` means the user's buffer.py, and not our package.

A user's module that has the name of another that Python finds first is loaded as `user_<name>`. Where one has the name
of a package of ours, modules of the working directory get an `__import__` of their own, which looks there first; all
others import as ever. The user's modules can still import what our package has and theirs has not.

On a host that has got a copy of the user's modules from the driver, that copy comes before the working directory.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rl.seams.own_packages import OWN_PACKAGES, PROJECT

COPY_VARIABLE = "ASYNC_RL_MODULES"
"""The environment variable with the folder of this host's copy of the user's modules, for processes that are started.
"""


def use_copied_modules(folder: str) -> None:
    """Have this process, and those that it starts, find the user's modules in `folder`, a copy of the driver's."""
    os.environ[COPY_VARIABLE] = folder
    here = os.getcwd()
    place = next((i for i, entry in enumerate(sys.path) if entry in ("", here)), len(sys.path))
    sys.path.insert(place, folder)
    importlib.invalidate_caches()


def users_folder() -> Path:
    """Return the folder with the user's modules: this host's copy of the driver's, or the working directory."""
    return Path(os.environ.get(COPY_VARIABLE) or os.getcwd())


def import_module(name: str) -> ModuleType:
    """Import a module. One of the working directory that another hides from Python is loaded as `user_<name>`."""
    root = name.partition(".")[0]
    file = _beside(root)
    found = importlib.util.find_spec(root) if file else None
    if file is None or found is None or os.path.realpath(found.origin or "") == os.path.realpath(file):
        return importlib.import_module(name)
    return _import_users(name, file) or importlib.import_module(name)


def find_users_modules() -> None:
    """Have every later import in this process find modules of the working directory by `_UsersModules`."""
    place = sys.meta_path.index(PathFinder)
    sys.meta_path.insert(place, _UsersModules)


class _UsersModules:
    """A finder before Python's, for modules of the user if another hides one of these: a package of ours, or a package
    of the working directory that hides a folder without __init__.py of the copy.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None and not any(map(_is_users, path)):
            return None
        copied = _find_copied_folder(name) if path is None else None
        if not any(map(_is_hidden, OWN_PACKAGES)):
            return copied
        spec = copied or PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader and _is_users(spec.loader.path):
            spec.loader = _UsersLoader(name, spec.loader.path)
        return spec


class _UsersLoader(SourceFileLoader):
    """Loads a module whose imports look into the working directory first."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import_in_users}
        super().exec_module(module)


def _import_in_users(
    name: str, globals: Mapping[str, Any] | None = None, locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (), level: int = 0,
) -> ModuleType:  # fmt: skip
    """Import as `__import__` does, in a module of the working directory."""
    root = name.partition(".")[0]
    if level == 0 and _is_hidden(root):
        file = _beside(root)
        module = _import_users(name, file) if file else None
        if module and all(hasattr(module, each) or _import_users(f"{name}.{each}", file) for each in fromlist or ()):
            return module if fromlist else sys.modules[f"user_{root}"]
    return builtins.__import__(name, globals, locals, fromlist or (), level)


def _import_users(name: str, file: Path | None) -> ModuleType | None:
    """Import the user's module `name`, whose first part is `file`, as `user_<name>`; None if the user has none."""
    root = f"user_{name.partition('.')[0]}"
    loaded = sys.modules.get(root)
    if loaded is None or loaded.__file__ != str(file):  # a file of another working directory may bear the name, too
        folders = [str(file.parent)] if file and file.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(
            root, file, loader=_UsersLoader(root, str(file)), submodule_search_locations=folders
        )
        assert spec is not None and spec.loader is not None
        for other in [other for other in sys.modules if other.startswith(f"{root}.")]:
            del sys.modules[other]
        sys.modules[root] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[root])
        except BaseException:
            del sys.modules[root]
            raise
    try:
        return importlib.import_module(f"user_{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(f"{root}."):
            return None
        raise


def _beside(name: str) -> Path | None:
    """Return the file of the user's module or package `name`; None if there is none."""
    folder = users_folder()
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _find_copied_folder(name: str) -> ModuleSpec | None:
    """Return the folder `name` of the copy as a package, if it has no __init__.py and the working directory's has one.
    """
    folder = users_folder()
    if COPY_VARIABLE not in os.environ or not (folder / name).is_dir():
        return None
    found = PathFinder.find_spec(name)
    origin = Path(found.origin or "") if found else Path()
    is_hidden = origin.is_relative_to(os.getcwd()) and not origin.is_relative_to(sys.prefix)
    return PathFinder.find_spec(name, [str(folder)]) if is_hidden else None


def _is_users(place: str) -> bool:
    """Return whether a file or folder is in the copy of the driver's modules, or in the working directory and not in an
    environment or a checkout in there.
    """
    here, path = Path.cwd(), Path(place)
    installed = [Path(each) for each in (PROJECT, sys.prefix) if Path(each).is_relative_to(here)]
    if COPY_VARIABLE in os.environ and path.is_relative_to(users_folder()):
        return True
    return path.is_relative_to(here) and not any(map(path.is_relative_to, installed))


def _is_hidden(package: str) -> bool:
    """Return whether `package` is one of ours, which hides a module of the user."""
    own = Path(PROJECT, package, "__init__.py")
    file = _beside(package) if package in OWN_PACKAGES and own.exists() else None
    return file is not None and not file.samefile(own)
