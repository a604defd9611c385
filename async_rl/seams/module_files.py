"""Finds the files of the user's own modules that a run needs, by reading their imports and without importing them.

A module is the user's if its file is in the driver's working directory: a file module.py, a package, or a module in a
folder without __init__.py. Not the user's are the packages of this project, environments, and hidden files.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from async_rl.seams.own_packages import OWN_PACKAGES, PROJECT

PACKAGE_BYTES, PACKAGE_FILES = 64_000_000, 5_000
"""A folder with more than this is not sent whole: a package without its data, another not at all."""
PLACE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
"""A text of the form module:name."""


def module_files(names: Iterable[str], folder: Path) -> list[Path]:
    """Return the files of those of the modules `names` that are the user's in `folder`, and of all that these import.

    An import counts wherever it stands, also within a function; so do import_module("...") and a text "module:name".
    Of a package all files count, also data, unless they are more than PACKAGE_BYTES or PACKAGE_FILES.
    """
    packages: set[Path] = set()
    found: set[Path] = set()
    pending = list(names)
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for place in _places(name, folder):
            files = python_files(place) if place.is_dir() else [place]
            packages |= {place} if place.is_dir() else set()
            for file in files:
                if file not in found:
                    found.add(file)
                    pending += _imported(file, folder)
    for package in packages:
        found.update(small_folder(package) or ())
    return sorted(found)


def loaded_modules(folder: Path) -> list[str]:
    """Return the names of the modules from `folder` that this process has imported, however it did that."""
    names = []
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        is_program = name in ("__main__", "__mp_main__")
        if isinstance(file, str) and Path(file).is_relative_to(folder) and not is_program:
            names += [name, name.removeprefix("user_")]  # see user_modules.py
    return names


def small_folder(folder: Path) -> list[Path] | None:
    """Return all files of a folder that is small enough to be sent whole, or None if it is not."""
    files, num_bytes = [], 0
    for file in _walk(folder):
        files.append(file)
        num_bytes += file.stat().st_size
        if num_bytes > PACKAGE_BYTES or len(files) > PACKAGE_FILES:
            return None
    return files


def python_files(folder: Path) -> list[Path]:
    """Return all .py files of a folder but those that `_walk` leaves out."""
    return [file for file in _walk(folder) if file.suffix == ".py"]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that can be read: no hidden ones, none in environments, none behind folder links.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name != "__pycache__" and not Path(place, name, "pyvenv.cfg").exists()
        )
        for file in (Path(place, name) for name in files if not name.startswith(".")):
            if file.is_file() and os.access(file, os.R_OK):
                yield file


def _places(name: str, folder: Path) -> list[Path]:
    """Return what a module's name stands for in `folder`: the folder of its outermost package, or the module's file.

    Both, if both are there: which one Python takes depends on who imports it.
    """
    first, _, rest = name.partition(".")
    package, module = folder / first, folder / f"{first}.py"
    if first in OWN_PACKAGES and os.path.samefile(folder, PROJECT):
        return []
    if not first or package.is_relative_to(sys.prefix) or (package / "pyvenv.cfg").exists():
        return []
    found = [module] if module.is_file() else []
    if (package / "__init__.py").is_file():
        return [*found, package]
    return found or (_places(rest, package) if rest and package.is_dir() else [])


def _imported(file: Path, folder: Path) -> Iterator[str]:
    """Yield the names of the modules that a file's code names; none if it is not valid Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return  # whoever imports it is told what is wrong
    package = file.relative_to(folder).parent.parts
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                parents = package[: len(package) + 1 - level] if level else ()
                origin = ".".join((*parents, *filter(None, [module])))
                yield from (f"{origin}.{alias.name}".removeprefix(".") for alias in names)
            case ast.Call(ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"), [
                ast.Constant(str(name)), *_
            ]):
                yield name
            case ast.Constant(str(text)) if place := PLACE.fullmatch(text):
                yield place[1]
