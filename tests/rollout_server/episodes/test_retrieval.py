from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.tools.retrieval import TextFolder


@pytest.fixture
def notes(tmp_path: Path) -> TextFolder:
    (tmp_path / "more").mkdir()
    (tmp_path / "animals.txt").write_text("A spider has eight legs.\n\nAn ant has six legs, and an ant is small.\n")
    (tmp_path / "more" / "plants.md").write_text("An oak is a tree.\n  \nMoss has no roots.\n\n\n")
    (tmp_path / "table.csv").write_text("ant,6\n")
    return TextFolder(tmp_path)


def test_the_passage_that_says_most_about_the_words_comes_first(notes: TextFolder) -> None:
    assert notes.search("legs of the ant", count=2) == (
        "[animals.txt] An ant has six legs, and an ant is small.\n\n[animals.txt] A spider has eight legs."
    )


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(folder)):
            TextFolder(folder)
