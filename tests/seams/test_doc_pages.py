"""Messages name pages of the documentation where they lie: in the repository, or in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.seams import lookup
from async_rl.base.seams.lookup import doc_page


def test_a_page_is_named_from_the_root_of_the_repository_or_by_its_file_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doc_page("how-to/python.md") == "docs/how-to/python.md"
    monkeypatch.setattr(lookup, "PROJECT", str(tmp_path))
    assert doc_page("how-to/python.md") == "docs/how-to/python.md", "there is neither"
    file = tmp_path / "async_rl" / "docs" / "how-to" / "python.md"
    file.parent.mkdir(parents=True)
    file.touch()
    assert doc_page("how-to/python.md") == str(file)
