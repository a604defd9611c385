"""Reads JSONL files line by line, with line numbers for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from async_rl.errors import ConfigError


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line that is not blank.

    A line ends at a line feed only: str.splitlines would also cut at U+2028, U+0085 and others inside JSON strings.

    Raises:
        ConfigError: the file can't be read, or a line is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{path}, line {number}: must be UTF-8, got {line[error.start : error.start + 8]!r} at byte "
                        f"{error.start}. Convert the file: iconv -f <its encoding> -t utf-8"
                    ) from None
                if text.strip():
                    yield number, text
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
