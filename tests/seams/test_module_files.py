"""Tests which files of a working directory belong to the modules that a run names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from async_rl.seams import module_files as finder
from async_rl.seams.module_files import loaded_modules, module_files
from async_rl.seams.own_packages import PROJECT


def write(folder: Path, **files: str) -> None:
    """Write modules: `words__deep` is words/deep.py, and `words_init` is words/__init__.py."""
    for name, code in files.items():
        file = folder / f"{name.replace('__', '/').replace('_init', '/__init__')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)


def found(folder: Path, *names: str) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in module_files(names, folder)]


@pytest.mark.parametrize("code", [
    "import helper", "import helper as h, json", "from helper import one", "def late():\n    import helper",
    "import importlib\nimportlib.import_module('helper')", "__import__('helper')", "ENTRY = 'helper:one'",
    "try:\n    from helper import *\nexcept ImportError: ...", "import between",
])  # fmt: skip
def test_a_helper_is_found_however_it_is_imported(tmp_path: Path, code: str) -> None:
    write(tmp_path, reward=code, helper="one = 1", between="import helper, reward", unrelated="def broken(")
    expected = {"reward.py", "helper.py"} | ({"between.py"} if "between" in code else set())
    assert set(found(tmp_path, "reward")) == expected


def test_modules_that_are_not_in_the_working_directory_are_left_to_python(tmp_path: Path) -> None:
    write(tmp_path, reward="import json, numpy.linalg, no_such_module\nfrom os import path")
    assert found(tmp_path, "reward", "math_verify", "tests.kit") == ["reward.py"]


def test_a_module_that_is_no_valid_python_is_sent_as_it_is(tmp_path: Path) -> None:
    """Whoever imports it is told what is wrong."""
    write(tmp_path, reward="import helper\ndef broken(", helper="")
    (tmp_path / "latin.py").write_bytes(b"NAME = '\xe9'")
    assert found(tmp_path, "reward", "latin") == ["latin.py", "reward.py"]


def test_a_package_comes_whole_with_its_data_and_what_it_imports(tmp_path: Path) -> None:
    write(tmp_path, words__inner__deep="from .. import near\nimport outside", words__near="", outside="")
    (tmp_path / "words" / "__init__.py").touch()
    (tmp_path / "words" / "table.json").write_text("{}")
    for hidden in (".git/config", "__pycache__/near.pyc", "venv/lib.py", ".env"):
        (tmp_path / "words" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "words" / hidden).touch()
    (tmp_path / "words" / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "words" / "gone.py").symlink_to("nowhere")
    expected = ["outside.py", "words/__init__.py", "words/inner/deep.py", "words/near.py", "words/table.json"]
    assert found(tmp_path, "words.inner.deep") == expected


@pytest.mark.parametrize(("limit", "value"), [("PACKAGE_BYTES", 100), ("PACKAGE_FILES", 2)])
def test_a_large_package_comes_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    write(tmp_path, words_init="", words__near="")
    (tmp_path / "words" / "table.bin").write_bytes(b"0" * 101)
    monkeypatch.setattr(finder, limit, value)
    assert found(tmp_path, "words") == ["words/__init__.py", "words/near.py"]


def test_of_a_folder_without_init_only_what_is_imported_comes(tmp_path: Path) -> None:
    write(tmp_path, scripts__reward="from . import near\nfrom scripts.deep import more", scripts__near="")
    write(tmp_path, scripts__other="", scripts__deep__more="", scripts__deep__rest="")
    assert found(tmp_path, "scripts") == []
    assert found(tmp_path, "scripts.reward") == ["scripts/deep/more.py", "scripts/near.py", "scripts/reward.py"]


def test_modules_with_the_names_of_our_packages_are_the_users_beside_a_config(tmp_path: Path) -> None:
    write(tmp_path, reward="import buffer\nfrom learner import rate", buffer="", learner_init="")
    assert found(tmp_path, "reward") == ["buffer.py", "learner/__init__.py", "reward.py"]


def test_our_packages_are_not_sent_from_a_checkout() -> None:
    assert module_files(["buffer.server", "async_rl", "benchmarks"], Path(PROJECT)) == []


def test_a_module_is_known_by_its_import_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may be computed. The program of the caller itself is no module that others import."""
    write(tmp_path, found_by_chance="")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
    assert loaded_modules(tmp_path) == []
    importlib.import_module("found_by_" + "chance")
    assert set(loaded_modules(tmp_path)) == {"found_by_chance"}
    del sys.modules["found_by_chance"]
