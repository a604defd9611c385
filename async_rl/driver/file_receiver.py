"""The Ray actor that takes copies of the driver's files on another host; file_sending.py starts and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from async_rl.storage.file_copies import CopyCache, PartialCopy, default_root
from async_rl.storage.file_sources import FileSource, Likeness, find_own, likeness


class FileReceiver:
    """A Ray actor that writes copies of the driver's files into the cache of its host."""

    def __init__(self) -> None:
        self._partial: PartialCopy | None = None

    def sees(self, file: str) -> bool:
        """Whether there is such a file on this host."""
        return Path(file).exists()

    def likeness(self, source: FileSource) -> Likeness:
        """Compare what this host has at the paths of `source`."""
        return likeness(source)

    def find(self, source: FileSource, digests: Sequence[str]) -> str:
        """Return where this host has files of these contents, or "" after it has begun a copy, which `write` fills."""
        is_unsure = not source.lacks_weights and likeness(source) == "unsure"
        if is_unsure and find_own(source).digests() == list(digests):
            return source.path
        cache = CopyCache(default_root())
        if copy := cache.find(source, digests):
            return source.named_in(copy)
        self._partial = cache.begin(source, digests)
        return ""

    def write(self, name: str, offset_bytes: int, piece: bytes) -> None:
        """Append a piece to a file of the copy."""
        assert self._partial is not None
        self._partial.write(name, offset_bytes, piece)

    def finish(self, source: FileSource) -> str:
        """Complete the copy, and return what the setting names on this host."""
        assert self._partial is not None
        partial, self._partial = self._partial, None
        return source.named_in(partial.finish())

    def discard(self) -> None:
        """Remove an incomplete copy."""
        if self._partial is not None:
            self._partial.discard()
