"""GSM8K's own files, with lines {question, answer}: read as rows in verl's schema, or converted to a file of such rows.

`async-rl prepare gsm8k` converts the files of github.com/openai/grade-school-math.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.base.config.suites import GSM8K_INSTRUCTION
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import numbered_lines

DATA_SOURCE = "openai/gsm8k"
COLUMNS = ("question", "answer")
_MARKED = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)")
"""The last line of an answer."""


def is_gsm8k_row(item: Mapping[str, Any]) -> bool:
    """Return whether question and answer are text, and the answer ends with a line `#### number`."""
    question, answer = (item.get(name) for name in COLUMNS)
    return isinstance(question, str) and isinstance(answer, str) and _marked_number(answer) is not None


def gsm8k_row(item: Mapping[str, Any], index: int, where: str) -> dict[str, Any]:
    """Convert a row to verl's schema. The ground truth is the number after `####`, without thousands separators.

    Args:
        index: the row's number in the file.
        where: the row, for error messages.

    Raises:
        ConfigError: the row has another form.
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
        "prompt": [{"role": "user", "content": f"{question}\n{GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.replace(",", "")},
        "extra_info": {"index": index, "question": question, "answer": answer},
    }


def _marked_number(answer: str) -> str | None:
    found = _MARKED.fullmatch(answer.rstrip().rpartition("\n")[2])
    return found[1] if found else None


def prepare_gsm8k(source: Path, target: Path) -> int:
    """Convert the file `source` to verl's schema, and write it to `target` (.parquet or .jsonl).

    Returns the number of rows.

    Raises:
        ConfigError: a file can't be read or written, or a line has another form.
    """
    if not source.is_file():
        raise ConfigError(f"the file to convert does not exist: {source}")
    if target.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"the file to write must end in .parquet or .jsonl, got {target}")
    if target.resolve() == source.resolve():
        raise ConfigError(f"the file to write must be another one than the file to convert, got {target} for both")
    lines = enumerate(numbered_lines(source))
    rows = [_row(line, index, f"{source}, line {number}") for index, (number, line) in lines]
    if not rows:
        raise ConfigError(f"{source} is empty. Download it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(rows, target)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror or error}. Name another file to write") from None
    return len(rows)


def _write(rows: list[dict[str, Any]], target: Path) -> None:
    if target.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
    else:
        target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(line: str, index: int, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        item = None
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: must be a JSON object with question and answer, both text, got {line[:80]!r}")
    return gsm8k_row(item, index, where)
