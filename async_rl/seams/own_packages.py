"""The packages of this project, which Python finds where this file is, whatever else has their names.

Names such as `buffer` are common, and Python searches the working directory first in Ray's workers and with
`python -m`: a user's buffer.py there would take the place of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OWN_PACKAGES = ("async_rl", "benchmarks", "buffer", "learner", "rollout_server")
PROJECT = str(Path(__file__).parents[2])
"""The folder with OWN_PACKAGES."""


class _OwnPackages:
    """The first of Python's finders: it finds OWN_PACKAGES and leaves all other modules to the finders after it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [PROJECT]) if name in OWN_PACKAGES else None


def find_own_packages_first() -> None:
    """Have every later import in this process take OWN_PACKAGES from the folder of this package.

    A program may have imported modules of its own by these names before: it keeps them, but the names are ours now.
    """
    sys.meta_path.insert(0, _OwnPackages)
    others = {package for package in OWN_PACKAGES if package in sys.modules and not _is_own(sys.modules[package])}
    for name in [name for name in sys.modules if name.partition(".")[0] in others]:
        del sys.modules[name]


def _is_own(module: ModuleType) -> bool:
    """Return whether the module is the package of its name in PROJECT, or PROJECT has none (a wheel: benchmarks)."""
    own = Path(PROJECT, module.__name__, "__init__.py")
    return not own.exists() or os.path.realpath(module.__file__ or "") == os.path.realpath(own)
