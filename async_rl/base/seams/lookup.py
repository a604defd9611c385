"""Looks up names that a configuration contains: entries of a table, or importable objects named `module:name`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from async_rl.base.errors import ConfigError, raised_at
from async_rl.base.seams.user_modules import check_not_hidden

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

    Modules are found as Python finds them, and in the working directory last.

    Raises:
        ConfigError: `name` has another form, the module can't be imported, it is not the one in the working directory,
            or it does not define the object.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(module_name.split(".")):
        raise ConfigError(f"{key} must have the form package.module:name, got {name!r}")
    if os.getcwd() not in sys.path:  # Python does not search it for an installed command
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
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
    """Return the function or class that an entry's `code` is, or import the one that it names as `module:name`.

    Raises:
        ConfigError: `code` can't be imported; the message names the configuration key `key`.
    """
    found: Callable[..., Any] = import_object(code, key) if isinstance(code, str) else code
    return found
