"""Puts the last lines of a process's log into an error message, and finds them in it."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_LINES = 20
_NOISE = re.compile(r"Ignore import error when loading|site-packages/\S+ \w*Warning: |^\s*warnings\.warn\(")
"""Lines that packages write when they are imported, which explain no failure."""
_TAIL = re.compile(r"\n?last lines of [^\n]+:(?:\n    [^\n]*)*")


def log_tail(file: Path, start_bytes: int = 0) -> str:
    """Return "last lines of FILE:" with the last TAIL_LINES lines below, indented, without packages' import warnings.

    Args:
        start_bytes: the place in the file at which to begin; an earlier process wrote what comes before it.
    """
    with file.open("rb") as log:
        log.seek(start_bytes)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    shown = [line for line in lines if not _NOISE.search(line)] or lines or ["(it is empty)"]
    return f"last lines of {file}:\n" + "\n".join("    " + line for line in shown[-TAIL_LINES:])


def split_tails(message: str) -> tuple[str, str]:
    """Return (the `log_tail`s in an error message, the rest of it): the rest is the cause, to be read last."""
    return "".join(_TAIL.findall(message)).strip("\n"), _TAIL.sub("", message)
