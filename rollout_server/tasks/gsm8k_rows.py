"""Rows of GSM8K's own files, {question, answer}, as rows in verl's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.errors import ConfigError

INSTRUCTION = "Work it out step by step. End with a line that reads `#### ` followed by the number alone."
DATA_SOURCE = "openai/gsm8k"
COLUMNS = ("question", "answer")


def gsm8k_row(item: Mapping[str, Any], index: int, where: str) -> dict[str, Any]:
    """Return the row in verl's schema. The ground truth is what follows `####`, without thousands separators.

    Raises:
        ConfigError: `where`, the row is of another form.
    """
    question, answer = (item.get(name) for name in COLUMNS)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(
            f"{where}: must be a JSON object with question and answer, both text, got {str(dict(item))[:80]!r}"
        )
    _, mark, number = answer.rpartition("####")
    if not mark:
        raise ConfigError(f"{where}: the answer has no `#### number`, with which GSM8K's end: {answer[-80:]!r}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"index": index, "question": question, "answer": answer},
    }
