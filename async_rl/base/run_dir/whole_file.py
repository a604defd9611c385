"""Writes a text file whole or not at all, so that neither a reader nor a crash ever meets half of it."""

from __future__ import annotations

from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a text beside `file`, and put it in its place when it is whole.

    Raises:
        OSError: as `Path.write_text`; `file` is then as it was.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)
