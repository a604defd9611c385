"""All that the packages import comes with the wheel, with an extra, or from the user, as a document says."""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("async_rl", "buffer", "learner", "rollout_server")
OF_USERS = {
    "mcp": "how-to/environments.md", "nvidia-ml-py": "reference/metrics.md", "skyrl-gym": "how-to/environments.md",
    "textarena": "how-to/environments.md", "trackio": "reference/metrics.md", "verifiers": "how-to/agents.md",
    "vllm": "how-to/install.md",
}  # fmt: skip
"""Packages of modules that a user brings who wants them, and the document that says so."""
NOT_OURS = ("dev", "peers", "sglang-cpu")
"""Extras whose packages are imported by tests or by SGLang."""
UNINSTALLED = {"pynvml": "nvidia-ml-py", "omegaconf": "skyrl-gym"}
"""The package that brings a module, where it is not installed here under the module's name."""


def modules_of(file: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports, also within its functions."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.partition(".")[0] for name in names}


@cache
def imported() -> dict[str, str]:
    """[module] a file that imports it, of all modules that are neither Python's nor of this project."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    known = {*PACKAGES, *sys.stdlib_module_names}
    return {
        module: str(file.relative_to(ROOT)) for file in files for module in modules_of(file) - known
        if not file.with_name(f"{module}.py").exists()  # a program of its own imports the files beside it
    }


def declared() -> set[str]:
    """The packages that pip installs with the wheel or with an extra for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name not in NOT_OURS}
    texts = [*project["dependencies"], *(text for each in extras.values() for text in each)]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_every_import_is_of_a_package_that_is_declared() -> None:
    brings = packages_distributions()
    undeclared = {}
    for module, file in imported().items():
        packages = [UNINSTALLED[module]] if module in UNINSTALLED else brings.get(module, [module])
        if not {canonicalize_name(name) for name in packages} & (declared() | set(OF_USERS)):
            undeclared[module] = file
    assert len(imported()) > 30 and undeclared == {}
