"""Rows of GSM8K's own files, {question, answer}, as rows in verl's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from async_rl.base.errors import ConfigError

INSTRUCTION = "Work it out step by step. End with a line that reads `#### ` followed by the number alone."
DATA_SOURCE = "openai/gsm8k"
COLUMNS = ("question", "answer")
_MARKED = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)")
"""The last line of an answer."""


def is_gsm8k_row(item: Mapping[str, Any]) -> bool:
    """Return whether question and answer are text, and the answer ends with a line `#### number`."""
    question, answer = (item.get(name) for name in COLUMNS)
    return isinstance(question, str) and isinstance(answer, str) and _marked_number(answer) is not None


def gsm8k_row(item: Mapping[str, Any], index: int, where: str) -> dict[str, Any]:
    """Return the row in verl's schema. The ground truth is the number after `####`, without thousands separators.

    Raises:
        ConfigError: `where`, the row is of another form.
    """
    question, answer = (item.get(name) for name in COLUMNS)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(
            f"{where}: must be a JSON object with question and answer, both text, got {str(dict(item))[:80]!r}"
        )
    number = _marked_number(answer)
    if number is None:
        raise ConfigError(
            f"{where}: the answer has no `#### number` as its last line, with which GSM8K's end, got {answer[-80:]!r}. "
            "Data of your own needs no conversion: task.path reads it, with task.columns.prompt: question and "
            "task.columns.reference: answer"
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.replace(",", "")},
        "extra_info": {"index": index, "question": question, "answer": answer},
    }


def _marked_number(answer: str) -> str | None:
    found = _MARKED.fullmatch(answer.rstrip().rpartition("\n")[2])
    return found[1] if found else None
