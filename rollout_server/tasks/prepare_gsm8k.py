"""`async-rl prepare gsm8k`: converts the files of github.com/openai/grade-school-math to verl's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import numbered_lines
from rollout_server.tasks.gsm8k_rows import gsm8k_row


def prepare_gsm8k(source: Path, target: Path) -> int:
    """Convert `source`, lines of {"question", "answer"}, to `target`, .parquet or .jsonl; return the number of rows."""
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
