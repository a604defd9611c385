"""Payloads of groups in files beside the journal, written once; the journal says where each one is.

A payload in a row of SQLite is written three times (log, table, and again when its pages are used anew), which takes
longer than all else that the buffer does with a group. Here it is appended to the newest file; a file goes once nothing
in it is kept. What was appended survives the end of the process; the end of the machine may cost the last ones.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

FILE_BYTES = 64 * 2**20
"""A new file is begun after so many: disk that pruning gives back comes in such pieces."""
MAX_BUFFERS = 512
"""In one write; POSIX allows at least 1024."""


class Place(NamedTuple):
    file: int
    start: int
    bytes: int


class PayloadFiles:
    """
    Args:
        kept: places that the journal still knows; files with none of them are removed.

    Raises:
        OSError: in every method: the folder or a file can't be read or written.
    """

    def __init__(self, folder: Path, kept: Iterable[Place]) -> None:
        self._folder = folder
        self._kept = Counter(place.file for place in kept)
        folder.mkdir(parents=True, exist_ok=True)
        there = {int(path.name) for path in folder.iterdir()}
        for number in there - self._kept.keys():
            (folder / str(number)).unlink()
        # Never the last one of a buffer that was killed: its last write may be torn.
        self._newest = max(there, default=-1)
        self._end = FILE_BYTES
        self._file: int | None = None

    def append(self, payloads: Sequence[memoryview]) -> list[Place]:
        places = []
        for first in range(0, len(payloads), MAX_BUFFERS):
            part = payloads[first : first + MAX_BUFFERS]
            if self._end >= FILE_BYTES:
                self._begin()
            assert self._file is not None
            written = os.writev(self._file, part)
            if written != sum(map(len, part)):  # 2 GiB are its most; a disk that fills up tells so only at the next
                rest = memoryview(b"".join(part))[written:]
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            for payload in part:
                places.append(Place(self._newest, self._end, len(payload)))
                self._end += len(payload)
            self._kept[self._newest] += len(part)
        return places

    def remove(self, places: Iterable[Place]) -> None:
        """They are not needed any more."""
        for place in places:
            self._kept[place.file] -= 1
            if not self._kept[place.file]:
                del self._kept[place.file]
                if place.file != self._newest:
                    (self._folder / str(place.file)).unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _begin(self) -> None:
        self.close()
        if self._newest >= 0 and not self._kept[self._newest]:
            (self._folder / str(self._newest)).unlink(missing_ok=True)
        self._newest += 1
        self._end = 0
        self._file = os.open(self._folder / str(self._newest), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def share_files(source: Path, target: Path) -> list[int]:
    """Every file of the folder `source` in the folder `target` too, without a copy if the disk can do that.

    A `PayloadFiles` writes to its own files only. Returns the numbers of the files; none if there is no `source`.

    Raises:
        OSError: a file can't be read or written.
    """
    paths = list(source.iterdir()) if source.is_dir() else []
    for path in paths:
        copy = target / path.name
        if not copy.exists():
            try:
                copy.hardlink_to(path)
            except OSError:
                shutil.copyfile(path, copy)
    return [int(path.name) for path in paths]


def read_payload(folder: Path, place: Place) -> bytes:
    """
    Raises:
        OSError: it is not there, or not whole.
    """
    with (folder / str(place.file)).open("rb") as file:
        file.seek(place.start)
        data = file.read(place.bytes)
    if len(data) != place.bytes:
        raise OSError(f"{folder / str(place.file)} ends before byte {place.start + place.bytes}")
    return data
