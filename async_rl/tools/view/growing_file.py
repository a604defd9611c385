"""A file to which a run appends lines. Each call reads only the new ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Self


class GrowingFile:
    """A file that grows. Thread-safe. If a resume replaces the file, it is read again from the start.

    A subclass keeps what the lines say, in `_add`, and forgets it in `_forget`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode, self._offset = -1, 0
        self._forget()

    def _forget(self) -> None:
        """Make this object as it is before the first line."""
        raise NotImplementedError

    def _add(self, line: bytes) -> None:
        """Take in a line, which may be damaged."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Prepare for new lines."""

    def refresh(self) -> Self:
        """Read the lines added since the last call. Returns this object."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != self._inode or found.st_size < self._offset:
                        self._inode, self._offset = found.st_ino, 0
                        self._forget()
                    if found.st_size > self._offset:
                        self._begin()
                    file.seek(self._offset)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break  # half written
                        self._offset += len(line)
                        self._add(line)
            except OSError:
                pass  # not written yet, or just being replaced: the next call finds it
        return self
