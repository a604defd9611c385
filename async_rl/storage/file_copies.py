"""The cache of a host with copies of the driver's files.

The copy of a source (file_sources.py) is a folder whose name is a digest of the content, so that runs share it:
~/.cache/async-rl/copies/DIGEST, or below XDG_CACHE_HOME.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.storage.file_sources import FileSource

AWAITS_PUSH = "weights-come-by-push.json"
"""The file that takes the place of the weights in a copy of a model folder without them: {name: shape} of each."""
_PARTIAL = f"@{socket.gethostname()}.partial"
"""The end of the names of this host's half-written copies. Hosts that share a home folder share the cache, and may not
see each other's locks: on NFS the lock of a folder holds on its host alone."""
ABANDONED_S = 86400.0
"""Nobody writes a copy any more of which no file has changed for this time."""


def awaits_push(folder: str) -> bool:
    """Return whether a model folder is a copy without weights, of which a server gets the first ones by a push."""
    return Path(folder, AWAITS_PUSH).is_file()


def default_root() -> Path:
    """Return the folder of this host's copies. ConfigError: this user has no home folder, and no XDG_CACHE_HOME."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rl" / "copies"
    except RuntimeError:
        raise ConfigError("this user has no home folder for copies of files: set XDG_CACHE_HOME") from None


class CopyCache:
    """The copies that a host has of sources of drivers, each in a folder of `root`.

    A copy is whole from the moment at which its folder has its name. Folders that a killed process has left half
    written are removed when the same host makes the next copy, since nobody holds their lock; those of hosts with other
    names are removed after a day.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, source: FileSource, digests: Sequence[str]) -> Path | None:
        """Return the copy of a source with these contents, or None if there is none, or files of it are gone."""
        copy = self._root / source.copy_name(digests)
        try:
            is_whole = all((copy / file.name).stat().st_size == file.num_bytes for file in source.files)
        except OSError:
            return None
        return copy if is_whole and awaits_push(str(copy)) == source.lacks_weights else None

    def begin(self, source: FileSource, digests: Sequence[str]) -> PartialCopy:
        """Return a new copy, to be written. ConfigError: there is no room for it, or the folder can't be written."""
        with _writing(self._root):
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            free_bytes = shutil.disk_usage(self._root).free
            if free_bytes < source.num_bytes:
                raise ConfigError(
                    f"{self._root} has {free_bytes / 1e9:.2f} GB free, and {source.num_bytes / 1e9:.2f} GB are needed "
                    f"for a copy of {source.path} ({source.key}). Remove copies that no run uses, or set "
                    "XDG_CACHE_HOME before `ray start` to a folder on a disk with room"
                )
            place = self._root / source.copy_name(digests)
            if place.exists():  # it has lost files, else it would have been found
                shutil.rmtree(place)
            return PartialCopy(source, digests, place)

    def _sweep(self) -> None:
        for folder in (*self._root.glob("*.partial"), *self._root.glob("*.unlocked")):
            with suppress(OSError):  # another process writes it, or has just removed it
                changed_s = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
                if not folder.name.endswith(_PARTIAL) and time.time() - changed_s < ABANDONED_S:
                    continue
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


class PartialCopy:
    """A copy that is being written, in a folder beside its place; `finish` puts it there."""

    def __init__(self, source: FileSource, digests: Sequence[str], place: Path) -> None:
        self._source = source
        self._digests = dict(zip((file.name for file in source.files), digests, strict=True))
        self._place = place
        self._folder = place.with_name(f"{place.name}-{uuid.uuid4().hex[:8]}{_PARTIAL}")
        unlocked = self._folder.with_suffix(".unlocked")
        unlocked.mkdir(mode=0o700)
        self._lock = _lock(unlocked)
        unlocked.rename(self._folder)  # so no sweep of another process finds it before it is locked
        self._written = {file.name: (0, hashlib.sha256()) for file in source.files}
        for file in source.files:
            (self._folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / file.name).touch()
        if source.lacks_weights:
            (self._folder / AWAITS_PUSH).write_text(json.dumps(source.pushed))

    def write(self, name: str, offset_bytes: int, piece: bytes) -> None:
        """Append a piece to a file. ValueError: it is no file of the source, or not the next piece of it."""
        if name not in self._written or self._written[name][0] != offset_bytes:
            raise ValueError(f"a piece of {name} at byte {offset_bytes} does not follow the one before")
        written_bytes, digest = self._written[name]
        digest.update(piece)
        self._written[name] = written_bytes + len(piece), digest
        with _writing(self._place.parent), (self._folder / name).open("ab") as file:
            file.write(piece)

    def finish(self) -> Path:
        """Put the copy in its place, which is returned. ConfigError: it has not the contents that it should have."""
        for name, (_, digest) in self._written.items():
            if digest.hexdigest() != self._digests[name]:
                raise ConfigError(
                    f"{self._source.key} {self._source.path}: {name} was changed while it was copied. Start the run "
                    "when nothing writes it any more"
                )
        with _writing(self._place.parent):
            try:
                self._folder.rename(self._place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self.discard()  # another process has made the same copy meanwhile
                return self._place
        os.close(self._lock)
        return self._place

    def discard(self) -> None:
        """Remove what was written, unless it was finished."""
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"copies of the driver's files can't be written into {folder}: {error.strerror}. Set XDG_CACHE_HOME before "
            "`ray start` to a folder on a disk with room"
        ) from None


def _lock(folder: Path) -> int:
    """Lock a folder as long as this process lives and has the returned file open. OSError: another one holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
