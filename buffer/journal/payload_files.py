"""Keeps the encoded groups (payloads) in files beside the journal, which holds the place of each.

SQLite would write a payload three times, which takes longer than everything else that the buffer does with a group.
Here it is appended to the newest file, and a file is removed once no payload in it is kept. If the machine stops, the
last payloads may be lost.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

FILE_BYTES = 64 * 2**20
"""A file of this size is followed by a new one. Pruning frees disk space by whole files."""


class Place(NamedTuple):
    """The place of a payload: the number of its file, its first byte, and its length."""

    file: int
    start: int
    bytes: int


class PayloadFiles:
    """Appends payloads to numbered files in a folder, and deletes a file, but the newest, once it keeps no payload.

    `kept` has the places of the payloads that an earlier buffer wrote and that are still kept; files without any are
    deleted at once. Every method raises OSError if the folder or a file can't be read or written.
    """

    def __init__(self, folder: Path, kept: Iterable[Place]) -> None:
        self._folder = folder
        self._kept = Counter(place.file for place in kept)
        folder.mkdir(parents=True, exist_ok=True)
        there = set(_numbers(folder))
        for number in there - self._kept.keys():
            (folder / str(number)).unlink()
        # Never append to the last file of a buffer that was killed: its last write may be incomplete.
        self._newest = max(there, default=-1)
        self._end = FILE_BYTES
        self._file: BinaryIO | None = None

    def append(self, payloads: Sequence[memoryview]) -> list[Place]:
        """Write payloads to the end of the newest file, or of a new one if it is full, and return the place of each."""
        places = []
        for payload in payloads:
            if self._end >= FILE_BYTES:
                self._begin()
            assert self._file is not None
            self._file.write(payload)
            places.append(Place(self._newest, self._end, len(payload)))
            self._end += len(payload)
            self._kept[self._newest] += 1
        if self._file is not None:
            self._file.flush()
        return places

    def remove(self, places: Iterable[Place]) -> None:
        """Stop keeping the payloads at `places`. A file that then has none is deleted, unless it is the newest."""
        for place in places:
            self._kept[place.file] -= 1
            if not self._kept[place.file]:
                del self._kept[place.file]
                if place.file != self._newest:
                    (self._folder / str(place.file)).unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self.close()
        if self._newest >= 0 and not self._kept[self._newest]:
            (self._folder / str(self._newest)).unlink(missing_ok=True)
        self._newest += 1
        self._end = 0
        self._file = (self._folder / str(self._newest)).open("xb")


def share_files(source: Path, target: Path) -> list[int]:
    """Link every file of the folder `source` into the folder `target`, or copy it if the disk can't link.

    Returns the numbers of the files, [] without a folder `source`. A linked file is safe, as none is ever appended to.
    """
    numbers = _numbers(source) if source.is_dir() else []
    for number in numbers:
        path, copy = source / str(number), target / str(number)
        if not copy.exists():
            try:
                copy.hardlink_to(path)
            except OSError:
                shutil.copyfile(path, copy)
    return numbers


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the payload files in a folder. Others, such as NFS's .nfs0000a1, are left alone."""
    return [int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdecimal()]


def read_payload(folder: Path, place: Place) -> bytes:
    """Return the payload at a place. Raises OSError if it is missing or incomplete."""
    with (folder / str(place.file)).open("rb") as file:
        file.seek(place.start)
        data = file.read(place.bytes)
    if len(data) != place.bytes:
        raise OSError(f"the payload file {folder / str(place.file)} ends before byte {place.start + place.bytes}")
    return data
