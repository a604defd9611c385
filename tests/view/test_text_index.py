"""Full-text search over prompts and answers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.view.run_files import RunFiles
from async_rl.view.text_index import TextIndex
from async_rl.view.token_texts import TokenTexts
from buffer.journal.journal import FILE_NAME
from tests.kit.view.run_dirs import JournalWriter, make_run, text_group

FOUND_LIMIT_S = 20.0


@pytest.fixture
def index(run_dir: Path) -> Iterator[TextIndex]:
    run = RunFiles(run_dir)
    index = TextIndex(run.journal, TokenTexts(run))
    index.start()
    yield index
    index.close()


def found(index: TextIndex, text: str, number: int) -> list[int]:
    """Search until there are `number` hits and everything is indexed, or until FOUND_LIMIT_S."""
    end_s = time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < end_s:
        result = index.search(text)
        if not result.note and len(result.group_ids) >= number:
            return result.group_ids
        time.sleep(0.05)
    return index.search(text).group_ids


def test_parts_of_prompts_and_answers_are_found_in_any_case(index: TextIndex) -> None:
    assert found(index, "QUESTION 2", 1) == [2]
    assert found(index, "ght answ", 4) == [3, 2, 1, 0]
    assert found(index, "window.hacked", 4) == [3, 2, 1, 0]
    assert index.search("nowhere at all").group_ids == []


@pytest.mark.parametrize("text", ['"quoted', "a AND (b", "NEAR(*", "'; DROP TABLE texts; --"])
def test_signs_of_the_query_language_are_plain_text(index: TextIndex, text: str) -> None:
    assert found(index, "ght answ", 4) == [3, 2, 1, 0]  # all is indexed
    assert (index.search(text).group_ids, index.search(text).note) == ([], "")


def test_groups_of_a_resumed_run_are_found_by_their_texts_not_by_those_before(index: TextIndex, run_dir: Path) -> None:
    assert found(index, "question 2", 1) == [2]
    (run_dir / FILE_NAME).rename(run_dir / "trajectories.lineage_0.sqlite")
    journal = JournalWriter(run_dir)
    journal.add(text_group(2, ["a pear"], prompt="another"), step=3)
    journal.close()
    assert found(index, "another", 1) == [2]
    assert index.search("question 2").group_ids == index.search("ght answ").group_ids == []


def test_a_search_before_anything_is_read_says_so(run_dir: Path) -> None:
    run = RunFiles(run_dir)
    index = TextIndex(run.journal, TokenTexts(run))
    assert "for the first time" in index.search("right answer").note
    index.close()


def test_a_short_text_is_refused_with_a_sentence(index: TextIndex) -> None:
    assert "at least 3 characters, got 2" in index.search("ab").note


def test_a_text_with_the_character_nul_is_refused_with_a_sentence(index: TextIndex) -> None:
    assert "can't hold the character NUL" in index.search("a\0bc").note


def test_without_a_tokenizer_there_is_no_search(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    index = TextIndex(run.journal, TokenTexts(run))
    index.start()
    assert "without text" in index.search("anything").note
    index.close()


def test_a_full_index_gives_up_the_oldest_groups_for_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.view.text_index.MAX_CHARS", 1000)
    run_dir = make_run(tmp_path / "long", groups=0)
    run = RunFiles(run_dir)
    index = TextIndex(run.journal, TokenTexts(run))

    def add(*group_ids: int) -> None:
        journal = JournalWriter(run_dir)
        for group_id in group_ids:
            journal.add(text_group(group_id, ["x" * 300], prompt=f"the one {group_id}"), step=1)
        journal.close()
        while index._index_some():
            pass

    add(1, 2)
    assert index.search("the one").group_ids == [2, 1] and not index.search("the one").note
    add(*range(3, 9))
    add(9)
    full = index.search("the one")
    assert full.group_ids == [9, 8, 7, 6]
    assert full.note == "Searched are the newest 4 groups: the index is full."
    with closing(sqlite3.connect(run_dir / FILE_NAME)) as database:
        database.execute("DELETE FROM payloads WHERE group_id < 9")
        database.commit()
    while index._index_some():
        pass
    assert index.search("the one").group_ids == [9] and not index.search("the one").note
    index.close()
