"""Reading the journal beside a buffer that writes it, and reading damaged, foreign and copied ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from async_rl.tools.view.journal_reader import JournalError, JournalReader
from buffer.journal import FILE_NAME
from tests.kit.view.run_dirs import CHARACTERS, JournalWriter, text_group


@pytest.fixture
def journal(run_dir: Path) -> JournalReader:
    return JournalReader(run_dir / FILE_NAME)


def ids_of(journal: JournalReader, where: str = "", order: str = "group_id DESC") -> list[int]:
    return [row["group_id"] for row in journal.groups(where, order)[0]]


@pytest.mark.parametrize(
    "where, ids",
    [
        ("", [7, 6, 5, 4, 3, 2, 1, 0]),
        ("step = 4", [1]),
        ("state = 'dropped' AND drop_reason = 'late'", [7, 6, 5, 4]),
        ("staleness >= 3", [3, 2]),  # groups 0 to 3 are trained at versions 2 to 5, their oldest token has 1
        ("staleness <= 1 -- a remark", [0]),
        ("reward > 0.6 OR prompt_index = 2", [2]),
        ("group_id IN (SELECT group_id FROM rows WHERE response_tokens > 20)", [3, 2, 1, 0]),
    ],
)
def test_groups_are_found_by_a_where_clause(journal: JournalReader, where: str, ids: list[int]) -> None:
    assert ids_of(journal, where) == ids


@pytest.mark.parametrize(
    "where",
    [
        "no_such_column = 1", "1; DROP TABLE groups", "1) UNION SELECT 1", "(SELECT 1", "randomblob(1000000000) > 1",
        "load_extension('x')", "group_id IN (SELECT name FROM pragma_database_list)", "writefile('a', 'b')",
        "1 IN (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n)",
    ],
)  # fmt: skip
def test_a_clause_that_is_wrong_dangerous_or_endless_is_refused(journal: JournalReader, where: str) -> None:
    with pytest.raises(JournalError):
        journal.groups(where)
    assert len(journal.groups()[0]) == 8


def test_one_group_has_its_answers_steps_and_tokens(journal: JournalReader) -> None:
    row = journal.group(1)
    assert row is not None
    assert (row["steps"], row["staleness"], len(row["rows"])) == ([4], 2, 2)
    payload = journal.payload(1)
    assert payload is not None
    assert "".join(CHARACTERS[i] for i in payload.rows[0].tokens) == "right answer"
    assert "".join(CHARACTERS[i] for i in journal.prompts([1])[1]).startswith("question 1 ")
    assert journal.group(99) is None


def test_a_journal_that_is_written_can_be_read_and_is_not_changed(tmp_path: Path) -> None:
    tmp_path.joinpath("run").mkdir()
    writer = JournalWriter(tmp_path / "run")
    writer.add(text_group(0, ["a"]))
    journal = JournalReader(tmp_path / "run" / FILE_NAME)
    assert len(journal.groups()[0]) == 1
    writer.add(text_group(1, ["b"]))
    assert len(journal.groups()[0]) == 2
    writer.close()


def test_reading_a_finished_journal_leaves_no_file_behind(run_dir: Path, journal: JournalReader) -> None:
    before = sorted(path.name for path in run_dir.iterdir())
    journal.groups()
    assert sorted(path.name for path in run_dir.iterdir()) == before


def test_a_copy_with_a_write_ahead_log_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    writer = JournalWriter(tmp_path / "run")
    writer.add(text_group(0, ["a"]))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    writer.close()
    assert len(JournalReader(tmp_path / "copy" / FILE_NAME).groups()[0]) == 1


@pytest.mark.parametrize("content", [None, b"not a database" * 500])
def test_a_journal_that_is_missing_or_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content:
        (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(JournalError):
        JournalReader(tmp_path / FILE_NAME).groups()


def test_tokens_that_were_removed_or_not_copied_are_none(run_dir: Path, journal: JournalReader) -> None:
    shutil.rmtree(run_dir / f"{FILE_NAME}-payloads")
    assert journal.payload(1) is None
    assert journal.prompts([1]) == {}
