from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.tools.retrieval import TextFolder
from rollout_server.episodes.tools.tool import Tool


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


@pytest.mark.parametrize("query", ["", "zebra", "6", "!?"])
def test_a_search_without_a_result_says_so(notes: TextFolder, query: str) -> None:
    assert "[" not in notes.search(query)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(folder)):
            TextFolder(folder)


def test_a_method_of_a_folder_is_a_tool(notes: TextFolder) -> None:
    function = Tool.from_function(notes.search).schema["function"]
    assert function["name"] == "search" and function["parameters"]["required"] == ["query"]
    assert set(function["parameters"]["properties"]) == {"query", "count"}
