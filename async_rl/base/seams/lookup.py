"""Finds what a configuration names: table entries, the user's `module:name`, extras, documentation pages."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from async_rl.base.errors import ConfigError, raised_at

OWN_PACKAGES = ("async_rl", "buffer", "learner", "rollout_server")
PROJECT = str(Path(__file__).parents[3])
"""The folder that contains OWN_PACKAGES."""
_OF_A_CHECKOUT = (*OWN_PACKAGES, "benchmarks", "tests")
_SENT = "py_modules_files"
"""The folder on a host into which Ray puts the modules that it has copied there."""


def check_module_names() -> None:
    """Raise ConfigError if a module of the user has the same name as one of our packages."""
    if Path("async_rl", "__init__.py").is_file():  # a checkout of this project
        return
    for name in OWN_PACKAGES:
        spec, own = importlib.util.find_spec(name), os.path.realpath(Path(PROJECT, name))
        candidates = [Path(f"{name}.py"), *Path(name).glob("*.py"), Path(spec.origin if spec and spec.origin else own)]
        for file in candidates:
            if file.exists() and not Path(os.path.realpath(file)).is_relative_to(own):
                raise ConfigError(f"{file.absolute()} has the name of a package of async-rl: rename it")


def own_file(module: str) -> Path | None:
    """Return the file in the working directory for the user's `module`, a name without dots; None if there is none."""
    files = (Path(f"{module}.py").absolute(), Path(module, "__init__.py").absolute())
    return next((file for file in files if file.is_file()), None)


def check_not_hidden(module: str, key: str) -> None:
    """Raise ConfigError if Python has imported another module than the user's `module`, a name without dots.

    Args:
        key: the configuration key that names it, for the error.
    """
    own = None if module in OWN_PACKAGES else own_file(module)
    found = getattr(sys.modules[module], "__file__", None) or "Python itself"
    if own and os.path.realpath(found) != os.path.realpath(own) and _SENT not in found:
        raise ConfigError(f"{key}: {own} is hidden by the module {module} of {found}: rename it")


def modules_to_send() -> list[str]:
    """Return the .py files and packages in the working directory, which are copied to the run's other hosts."""
    here = Path.cwd()
    ours = _OF_A_CHECKOUT if here.samefile(PROJECT) else ()
    modules = [each for each in here.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
    return sorted(str(each) for each in modules if each.stem not in ours)


def find_sent_modules_first() -> None:
    """Make this process find modules that Ray has copied here before those in this host's working directory."""
    sys.path.sort(key=lambda folder: _SENT not in folder)


Entry = TypeVar("Entry")


def find_entry(table: Mapping[str, Entry], name: str, key: str) -> Entry:
    """Return the entry `name` of a table. If `name` is `module:name`, import an entry of the user's.

    Args:
        name: the value of the configuration key `key`.

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
    """Import and return the object `module:name`.

    Modules are found as Python finds them, and in the working directory last.

    Args:
        name: the value of the configuration key `key`.

    Raises:
        ConfigError: `name` is malformed, the module can't be imported, it is not the one in the working directory, or
            it does not define the object.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(module_name.split(".")):
        raise ConfigError(f"{key} must have the form package.module:name, got {name!r}")
    if os.getcwd() not in sys.path:  # Python does not search it for an installed command
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            file = f"{missing.replace('.', '/')}.py"
            raise ConfigError(f"{key} {name!r}: there is no {file} in {os.getcwd()}, and no such package") from error
        at = raised_at(error)
        place = f", at {at}" if at and not at.startswith(__file__) else ""
        raise ConfigError(
            f"{key} {name!r} can't be imported from {os.getcwd()}: {type(error).__name__}: {error}{place}"
        ) from error
    check_not_hidden(module_name.partition(".")[0], key)
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key} {name!r}: {file} defines no {attribute}")
    return getattr(module, attribute)


def implementation(code: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    """Return the function or class of an entry's field: `code` itself, or if it is `module:name`, the imported object.

    Raises:
        ConfigError: `code` can't be imported; the message names the configuration key `key`.
    """
    found: Callable[..., Any] = import_object(code, key) if isinstance(code, str) else code
    return found


EXTRAS = {
    "page": ("bokeh", "starlette", "uvicorn"),
    "prometheus": ("prometheus_client",),
    "reasoning-gym": ("reasoning_gym",),
    "tensorboard": ("tensorboardX",),
}
"""For each extra of pyproject.toml: the modules that this project uses from it."""


def lacking(extra: str) -> str:
    """Return what of an extra is not installed and how to install it, as a sentence's end; "" if nothing is missing."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    return f"needs {', '.join(missing)}, not installed here. Run: pip install 'async-rl[{extra}]'" if missing else ""


def check_extra(extra: str, user: str) -> None:
    """Raise ConfigError if an extra is not installed.

    Args:
        user: what needs the extra; the message begins with it.
    """
    if text := lacking(extra):
        raise ConfigError(f"{user} {text}")


def doc_page(name: str) -> str:
    """Return the path of a documentation page: docs/NAME in the repository, or its file in an installed wheel.

    The wheel has the pages in async_rl/docs, which in the repository is a link to docs.
    """
    in_repository, in_wheel = Path(PROJECT, "docs", name), Path(PROJECT, "async_rl", "docs", name)
    return str(in_wheel) if in_wheel.exists() and not in_repository.exists() else f"docs/{name}"
