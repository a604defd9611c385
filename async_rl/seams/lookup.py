"""Looks up names that a configuration contains: entries of a table, or importable objects named `module:name`."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from async_rl.errors import ConfigError, raised_at
from async_rl.seams.own_packages import OWN_PACKAGES, PROJECT

Entry = TypeVar("Entry")


def find_entry(table: Mapping[str, Entry], name: str, key: str) -> Entry:
    """Return the entry of `table` named `name`, the value of the configuration key `key`, or import `module:name`.

    Raises:
        ConfigError: there is no such entry, or the imported object is not of the class of the table's entries.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
        hint = f". Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key} must be one of {', '.join(table)}, or module:name, got {name!r}{hint}")
    kind = type(next(iter(table.values())))
    entry = import_object(name, key)
    if not isinstance(entry, kind):
        raise ConfigError(
            f"{key} {name!r} must be an instance of {kind.__module__}.{kind.__qualname__}, "
            f"got an object of type {type(entry).__name__}"
        )
    return entry


def import_object(name: str, key: str) -> Any:
    """Import and return the object that `name`, the value of `key`, names as `module:name`.

    A file module.py in the working directory is what `module` means, also where Python knows another of that name. All
    other modules are found as Python finds them, and in the working directory last.

    Raises:
        ConfigError: `name` has another form, the module can't be imported, or the module does not define the object.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(module_name.split(".")):
        raise ConfigError(f"{key} must have the form package.module:name, got {name!r}")
    if os.getcwd() not in sys.path:  # Python does not search it for an installed command
        sys.path.append(os.getcwd())
    try:
        module = _import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        at = raised_at(error)
        place = f", at {at}" if at and not at.startswith(__file__) else ""
        raise ConfigError(
            f"{key} {name!r} can't be imported from {os.getcwd()}: {type(error).__name__}: {error}{place}"
            f"{''.join(advice for package, advice in _hidden() if repr(package)[:-1] in str(error))}"
        ) from error
    for package, advice in _hidden():
        if sys.modules.get(package, module) in vars(module).values():
            raise ConfigError(f"{key} {name!r}: {module.__file__} imports {package}{advice}")
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key} {name!r}: {file} defines no {attribute}")
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    """Import a module. One of the working directory that another hides from Python is loaded as `user_<name>`."""
    file = _beside(name)
    found = importlib.util.find_spec(name) if file else None
    if file is None or found is None or os.path.realpath(found.origin or "") == os.path.realpath(file):
        return importlib.import_module(name)
    own_name = f"user_{name}"
    loaded = sys.modules.get(own_name)
    if loaded is None or loaded.__file__ != str(file):  # a file of another working directory may bear the name, too
        spec = importlib.util.spec_from_file_location(own_name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[own_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[own_name])
        except BaseException:
            del sys.modules[own_name]
            raise
    return sys.modules[own_name]


def _beside(name: str) -> Path | None:
    """Return the file of the module or package `name` in the working directory; None if there is none."""
    files = (Path.cwd() / f"{name}.py", Path.cwd() / name / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _hidden() -> Iterator[tuple[str, str]]:
    """Yield the packages of this project that hide a file of the working directory, each with advice for an error."""
    for package in OWN_PACKAGES:
        file, own = _beside(package), Path(PROJECT, package, "__init__.py")
        if file and own.exists() and not file.samefile(own):  # a wheel has no benchmarks
            yield package, f". That is the package of async-rl, which hides {file} from `import`: rename that file"


def implementation(code: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    """Return the function or class that an entry's `code` is, or import the one that it names as `module:name`.

    Raises:
        ConfigError: `code` can't be imported; the message names the configuration key `key`.
    """
    found: Callable[..., Any] = import_object(code, key) if isinstance(code, str) else code
    return found
