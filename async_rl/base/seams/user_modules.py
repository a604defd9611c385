"""The user's modules: the .py files and packages of the working directory.

Python finds them there. To other hosts of a run Ray carries them (run/processes/ray_start.py). One with the name of a
package of ours is refused, because Python finds one of the two and hides the other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from async_rl.base.errors import ConfigError

OWN_PACKAGES = ("async_rl", "buffer", "learner", "rollout_server")
PROJECT = str(Path(__file__).parents[3])
"""The folder with OWN_PACKAGES."""
_OF_A_CHECKOUT = (*OWN_PACKAGES, "benchmarks", "tests")
_SENT = "py_modules_files"
"""The folder on a host where Ray puts the modules that it has carried there."""


def check_module_names() -> None:
    """Raise ConfigError if a module of the user has the name of one of our packages."""
    if Path("async_rl", "__init__.py").is_file():  # a checkout of this project
        return
    for name in OWN_PACKAGES:
        spec, own = importlib.util.find_spec(name), os.path.realpath(Path(PROJECT, name))
        candidates = [Path(f"{name}.py"), *Path(name).glob("*.py"), Path(spec.origin if spec and spec.origin else own)]
        for file in candidates:
            if file.exists() and not Path(os.path.realpath(file)).is_relative_to(own):
                raise ConfigError(f"{file.absolute()} has the name of a package of async-rl: rename it")


def own_file(module: str) -> Path | None:
    """Return the file of the working directory that the user means by `module`, a name without dots, or None."""
    files = (Path(f"{module}.py").absolute(), Path(module, "__init__.py").absolute())
    return next((file for file in files if file.is_file()), None)


def check_not_hidden(module: str, key: str) -> None:
    """Raise ConfigError if Python has imported another module than the user's `module`, a name without dots."""
    own = None if module in OWN_PACKAGES else own_file(module)
    found = getattr(sys.modules[module], "__file__", None) or "Python itself"
    if own and os.path.realpath(found) != os.path.realpath(own) and _SENT not in found:
        raise ConfigError(f"{key}: {own} is hidden by the module {module} of {found}: rename it")


def modules_to_send() -> list[str]:
    """Return the .py files and packages in the working directory, which the run's other hosts get."""
    here = Path.cwd()
    ours = _OF_A_CHECKOUT if here.samefile(PROJECT) else ()
    modules = [each for each in here.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
    return sorted(str(each) for each in modules if each.stem not in ours)


def find_sent_modules_first() -> None:
    """Have this process find the modules that Ray has carried here before modules of this host's working directory."""
    sys.path.sort(key=lambda folder: _SENT not in folder)
