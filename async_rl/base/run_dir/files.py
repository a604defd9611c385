"""Writes files so that they are never incomplete, and reads the ends of logs."""

from __future__ import annotations

import os
import re
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a text to a new file next to `file`, then rename it to `file`.

    Raises:
        OSError: as `Path.write_text`; `file` is then as it was.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def whole_lines(file: Path) -> list[str]:
    """Return the lines of a file, without a last line that a crash has cut short."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


TAIL_LINES = 20
END_BYTES = 2**20
"""How much is read of the end of a log, which may have become very large."""
_NOISE = re.compile(r"Ignore import error when loading|site-packages/\S+ \w*Warning: |^\s*warnings\.warn\(")
"""Lines that packages write when they are imported and that explain no failure."""
_TAIL = re.compile(r"\n?last lines of [^\n]+:(?:\n    [^\n]*)*")


def log_tail(file: Path, start_bytes: int = 0) -> str:
    """Return "last lines of FILE:", followed by the last TAIL_LINES lines, indented, without packages' import warnings.

    Args:
        start_bytes: where to begin in the file; an earlier process wrote the text before it.
    """
    lines = [line for line in end_of_log(file, start_bytes).splitlines() if line.strip()]
    empty = "(nothing since the process was started)" if start_bytes else "(it is empty)"
    shown = [line for line in lines if not _NOISE.search(line)] or lines or [empty]
    return f"last lines of {file}:\n" + "\n".join("    " + line for line in shown[-TAIL_LINES:])


def end_of_log(file: Path, start_bytes: int = 0) -> str:
    """Return the text of a log from `start_bytes` on, but at most the last END_BYTES."""
    with file.open("rb") as log:
        log.seek(max(start_bytes, log.seek(0, os.SEEK_END) - END_BYTES))
        return log.read(END_BYTES).decode(errors="replace")


def split_tails(message: str) -> tuple[str, str]:
    """Split an error message into (the `log_tail`s in it, the rest). The rest is the cause, to be shown last."""
    return "".join(_TAIL.findall(message)).strip("\n"), _TAIL.sub("", message)
