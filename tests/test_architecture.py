"""Sizes, import direction and cleanliness: the code stays as readable as it began. `make check` runs this."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import grimp
import pytest

from async_rl.base.config import Config

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
PACKAGES = ("async_rl", "buffer", "learner", "rollout_server", "benchmarks")
FOLDERS = (*PACKAGES, "tests")

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
"""`make check` mentions a longer file or function, and passes: a loop that reads from top to bottom may be long."""

LIGHT_MODULES = (
    "async_rl.base.config",
    "async_rl.base.types",
    "async_rl.base.errors",
    "async_rl.base.messages.codec",
    "async_rl.base.telemetry.metrics",
    "async_rl.base.telemetry.timeline",
    "async_rl.base.run_dir.checkpoints",
    "async_rl.base.config.loading",
    "async_rl.cli",
    "async_rl.run.before_start.preflight",
    "buffer.staleness",
    "buffer.server",
    "buffer.client",
    "rollout_server.engines.sglang.engine",
)
MAX_FILES_AT_THE_TOP = 10
MAX_TEST_NAME_LENGTH = 80
HEAVY = ("torch", "ray", "sglang", "transformers")


def python_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def forget_syntax_trees() -> Iterator[None]:
    """Nearly a million objects would make every later garbage collection slow."""
    yield
    nodes_of.cache_clear()


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file, its module first."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def test_long_files_and_functions_are_mentioned() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in python_files()}
    assert "tests/test_architecture.py" in lengths
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    for file in python_files():
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{file.relative_to(ROOT)}:{node.name}"] = lines
    if long:
        warnings.warn(f"long: {', '.join(f'{name} ({lines} lines)' for name, lines in long.items())}", stacklevel=1)


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [str(file) for file in python_files() if vague & {file.stem, file.parent.name}] == []


def test_every_file_of_the_packages_says_what_it_is_for() -> None:
    files = [file for file in python_files() if file.relative_to(ROOT).parts[0] in PACKAGES]
    modules = {str(file.relative_to(ROOT)): nodes_of(file)[0] for file in files}
    assert [name for name, module in modules.items() if module.body and ast.get_docstring(module) is None] == []


def test_the_name_of_a_test_can_be_read_at_a_glance() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    names = [node.name for file in python_files() for node in nodes_of(file) if isinstance(node, kinds)]
    assert [name for name in names if name.startswith("test_") and len(name) > MAX_TEST_NAME_LENGTH] == []


def test_files_share_only_what_stands_in_the_kit_of_the_tests() -> None:
    """None imports from a test file or a conftest.py. The extensions are what CONTRIBUTING.md shows."""
    shared = re.compile(r"tests\.(kit|extensions)\.(?!test_|conftest)")
    imported = [
        (file.relative_to(ROOT), name) for file in python_files()
        for node in nodes_of(file) for name in imported_names(node)
    ]
    ours = [f"{file}: {name}" for file, name in imported if name.startswith(("tests.", ".")) and not shared.match(name)]
    assert ours == []


def imported_names(node: ast.AST) -> list[str]:
    """Full names; those of a relative import begin with a dot."""
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_no_two_classes_of_the_product_have_one_name() -> None:
    names = Counter(
        node.name
        for file in python_files() if file.relative_to(ROOT).parts[0] in PACKAGES
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_the_top_of_async_rl_holds_few_files() -> None:
    assert len(list((ROOT / "async_rl").glob("*.py"))) <= MAX_FILES_AT_THE_TOP


def test_imports_point_down() -> None:
    report = run_tool("-c", "import importlinter.cli, sys; sys.exit(importlinter.cli.lint_imports_command())")
    kept = [line for line in report.splitlines() if line.endswith(" KEPT")]
    assert len(kept) == len(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"])
    assert len(kept) >= 3


def test_there_is_no_import_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)
    # Config calls these modules on itself, which is why they name its type.
    for module in ("cross_section", "resolve", "weight_sync"):
        graph.remove_import(importer=f"async_rl.base.config.{module}", imported="async_rl.base.config")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    order = list(graphlib.TopologicalSorter(imports).static_order())  # CycleError names the modules of a circle
    assert order.index("async_rl.base.errors") < order.index("async_rl.base.config") < order.index("async_rl.cli")


def test_no_function_but_resolve_changes_a_config() -> None:
    sections = {field.name for field in fields(Config)}
    found = []
    for file in python_files():
        name = str(file.relative_to(ROOT))
        if name.startswith(("tests/", "benchmarks/")) or name == "async_rl/base/config/resolve.py":
            continue
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("replace", "dataclasses.replace"):
                changed = ast.unparse(node.args[0]).rpartition(".")[2].lstrip("_")
                found += [f"{name}:{node.lineno}"] * (changed in {"config", "settings", *sections})
    assert found == []


def test_importing_the_light_modules_brings_nothing_heavy() -> None:
    """One process imports all of them, one after the other: a module that is heavy alone is so there too."""
    code = f"""
import importlib, sys
for module in {LIGHT_MODULES!r}:
    importlib.import_module(module)
    if heavy := set({HEAVY!r}) & set(sys.modules):
        sys.exit(f"{{module}} imports {{heavy}}")
"""
    assert run_tool("-c", code) == ""


def test_ruff_finds_nothing() -> None:
    assert run_tool("-m", "ruff", "check", "--no-fix", ".") == "All checks passed!\n"


def test_mypy_finds_nothing() -> None:
    assert re.search(r"no issues found in \d{3} source files", run_tool("-m", "mypy"))


def run_tool(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout
