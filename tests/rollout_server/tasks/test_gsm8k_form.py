"""Files of question and answer: those of GSM8K's own form, and those that only look like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import ColumnsConfig
from async_rl.base.config.suites import GSM8K_INSTRUCTION
from tests.kit.data_files import opened, written

GSM8K = {"question": "How many?", "answer": "1000 + 234 = 1234\n#### 1,234"}
HEADING = {"question": "What is RL?", "answer": "It is learning.\n#### How\nBy trying."}
PLAIN = {"question": "8 * 9?", "answer": "72"}


def test_a_file_of_gsm8ks_own_form_is_told_with_the_instruction_that_is_added(tmp_path: Path) -> None:
    rows = [GSM8K, {"question": "Less?", "answer": "#### -0.5\n"}]
    task = opened(written(tmp_path / "rows.jsonl", rows), shuffle=False)
    first, second = (task.prompt(i).question for i in range(2))
    assert first.messages == ({"role": "user", "content": f"How many?\n{GSM8K_INSTRUCTION}"},)
    assert (first.ground_truth, first.solution, first.source) == ("1234", GSM8K["answer"], "openai/gsm8k")
    assert second.ground_truth == "-0.5"
    (caution,) = task.cautions
    assert "rows.jsonl" in caution and GSM8K_INSTRUCTION in caution and "task.columns" in caution


@pytest.mark.parametrize("rows", [
    [HEADING, PLAIN], [{"question": "?", "answer": "#### 7 apples"}],
    [{"question": "?", "answer": "#### 7\nSo it is."}], [{"question": "?", "answer": "It is #### 7"}],
    [GSM8K, PLAIN], [GSM8K | {"id": 3}],
], ids=["a-heading", "words-after", "not-the-end", "within-a-line", "some", "a-column"])
def test_another_file_of_questions_and_answers_stays_as_it_is(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    task = opened(written(tmp_path / "rows.jsonl", rows), shuffle=False)
    for i, row in enumerate(rows):
        question = task.prompt(i).question
        assert question.messages == ({"role": "user", "content": row["question"]},)
        assert (question.ground_truth, question.source) == (row["answer"], "rows")
        assert question.extra == ({"id": 3} if "id" in row else {})
    (caution,) = task.cautions
    assert "task.columns" in caution and GSM8K_INSTRUCTION not in caution


def test_named_columns_are_taken_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [GSM8K])
    task = opened(path, columns=ColumnsConfig(prompt="question", reference="answer"))
    assert task.prompt(0).question.ground_truth == GSM8K["answer"] and task.cautions == []
    some = opened(path, columns=ColumnsConfig(prompt="question"))
    assert some.prompt(0).question.ground_truth == GSM8K["answer"]
    assert len(some.cautions) == 1  # the reference was guessed
