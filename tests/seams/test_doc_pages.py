"""Messages name pages of the documentation where they lie: in the repository, or in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.seams import doc_pages
from async_rl.seams.doc_pages import doc_page

ROOT = Path(__file__).parents[2]
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
