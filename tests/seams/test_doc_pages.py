"""Messages name pages of the documentation where they lie: in the repository, or in an installed package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from async_rl.base.seams import doc_pages
from async_rl.base.seams.doc_pages import doc_page

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_rl", "buffer", "learner", "rollout_server")


def test_a_page_is_named_from_the_root_of_the_repository_or_by_its_file_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doc_page("python.md") == "docs/python.md"
    monkeypatch.setattr(doc_pages, "PROJECT", str(tmp_path))
    assert doc_page("python.md") == "docs/python.md", "there is neither"
    file = tmp_path / "async_rl" / "docs" / "python.md"
    file.parent.mkdir(parents=True)
    file.touch()
    assert doc_page("python.md") == str(file)


def test_the_folder_that_a_wheel_takes_pages_from_is_that_of_the_repository() -> None:
    assert (ROOT / "async_rl" / "docs").resolve() == ROOT / "docs"


def test_every_page_of_a_message_is_named_by_the_function_and_exists() -> None:
    """Docstrings name pages as in the repository, which the reference of the configuration shows, too."""
    named, literal = [], []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "doc_page":
                named += [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                literal += [(file.name, page) for page in re.findall(r"docs/[\w-]+\.md", node.value)]
    assert named and [name for name in named if not (ROOT / "docs" / name).is_file()] == []
    assert literal == []
