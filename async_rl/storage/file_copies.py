"""Copies of the driver's local files for hosts that lack them: what belongs to a copy, and the cache that holds it.

A source is what one setting names: a model folder, or files of prompts. Its copy is a folder of the host's cache whose
name is a digest of the content, so that runs share it: ~/.cache/async-rl/copies/DIGEST, or below XDG_CACHE_HOME.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.hub import MODEL_FILES
from async_rl.storage.hub_names import find_data, find_model, is_data, names_in, with_name
from async_rl.storage.model_folder import TOKENIZER_FILES, weight_files, weight_shapes
from async_rl.storage.row_files import is_pattern, local_files

PIECE_BYTES = 8 * 2**20
"""Files are read, sent and written in pieces of so many bytes."""
AWAITS_PUSH = "weights-come-by-push.json"
"""The file that takes the place of the weights in a copy of a model folder without them: {name: shape} of each."""
_WEIGHTS, _WEIGHT_INDEX = ".safetensors", ".safetensors.index.json"
_HASHING_THREADS = 4
_PARTIAL = ".partial"

Places = Mapping[tuple[str, str], str]
"""{(key of a setting, a path that it names): the place of the copy on one host}."""
Likeness = Literal["same", "unsure", "other", "none"]
"""A host's own files compared with the driver's: equal, also in their times of change; equal in names and sizes alone;
others; or none."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    name: str
    """The path below the source's `base`."""
    num_bytes: int
    changed_ns: int
    """The time of the last change, since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """The local files that one value of a setting names."""

    key: str
    """The key of the setting, such as model.path."""
    path: str
    """The value of the setting, or one of its list."""
    base: str
    """The absolute path of the folder that a copy stands for."""
    rest: str
    """The name, or the glob, of the files or of their folder below `base`; empty: `base` itself."""
    files: tuple[SourceFile, ...]
    pushed: Mapping[str, Sequence[int]] | None = None
    """{name: shape} of the weights of a model that are left out, because the learner pushes them."""

    def without_weights(self) -> FileSource:
        """Return what is needed of this host's model folder to start a server that gets its first weights by a push.
        """
        kept = tuple(file for file in self.files if not file.name.endswith((_WEIGHTS, _WEIGHT_INDEX)))
        return replace(self, files=kept, pushed=weight_shapes(Path(self.base)))

    @property
    def lacks_weights(self) -> bool:
        return self.pushed is not None

    @property
    def absolute(self) -> str:
        """The path as every host of one working directory understands it."""
        return os.path.join(self.base, self.rest)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def named_in(self, copy: Path) -> str:
        """Return the value that the setting has on a host with the copy `copy`."""
        folder = glob.escape(str(copy)) if glob.has_magic(self.rest) else str(copy)
        return os.path.join(folder, self.rest) if self.rest else folder

    def copy_name(self, digests: Sequence[str]) -> str:
        """Return the name of the copy's folder, given the digest of each file."""
        content = [[file.name, digest] for file, digest in zip(self.files, digests, strict=True)]
        return hashlib.sha256(json.dumps([self.pushed, *content]).encode()).hexdigest()[:32]

    def digests(self, check: Callable[[], None] = lambda: None) -> list[str]:
        """Return the SHA-256 of each file. `check` is called for each piece that was read; what it raises ends this.

        Raises:
            ConfigError: a file can't be read.
        """

        def digest_of(file: SourceFile) -> str:
            digest = hashlib.sha256()
            for piece in self.pieces(file):
                check()
                digest.update(piece)
            return digest.hexdigest()

        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            return list(threads.map(digest_of, self.files))

    def pieces(self, file: SourceFile) -> Iterator[bytes]:
        """Yield the content of a file in pieces of PIECE_BYTES. ConfigError: it can't be read."""
        try:
            with Path(self.base, file.name).open("rb") as opened:
                while piece := opened.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise ConfigError(f"{self.key} {self.path}: {file.name} can't be read: {error.strerror}") from None


def find_source(key: str, path: str) -> FileSource:
    """Return the files that `path`, a value of the setting `key`, names on this host.

    Raises:
        ConfigError: there are no such files, or not all of them.
    """
    target = Path(os.path.abspath(path))
    if is_data(key):
        fixed = [i for i, part in enumerate(target.parts) if glob.has_magic(part)] if is_pattern(path) else []
        base = Path(*target.parts[: fixed[0]]) if fixed else target.parent
        found = [Path(os.path.abspath(file)) for file in local_files(path, key)]
    else:
        base, found = target, _model_files(target, key)
    try:
        told = [(str(file.relative_to(base)), file.stat()) for file in found]
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.filename} can't be read: {error.strerror}") from None
    return FileSource(
        key=key, path=path, base=str(base), rest="" if target == base else str(target.relative_to(base)),
        files=tuple(SourceFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in told),
    )


def _model_files(folder: Path, key: str) -> list[Path]:
    """Return the files of a model folder that are of use; those of the weights come last."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key} {folder} is not a folder with a model")
    useful = {file for pattern in (*MODEL_FILES, *TOKENIZER_FILES) for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in useful if file.suffix != _WEIGHTS) + weight_files(folder)


def local_names(config: Config, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each local folder and file that the settings `keys` name."""
    for key, name in names_in(config, keys):
        if not (find_data if is_data(key) else find_model)(name, key):
            yield key, name


def relocated(config: Config, places: Places) -> Config:
    """Return the configuration with the places of copies in place of the paths that they stand for."""
    for (key, path), place in places.items():
        config = with_name(config, key, path, place)
    return config


def awaits_push(folder: str) -> bool:
    """Return whether a model folder is a copy without weights, of which a server gets the first ones by a push."""
    return Path(folder, AWAITS_PUSH).is_file()


def likeness(source: FileSource) -> Likeness:
    """Compare the files that this host has at the path of a source of the driver, without reading them."""
    try:
        own = find_source(source.key, source.absolute)
    except (OSError, ValueError):  # also a ConfigError
        return "none"
    if [(file.name, file.num_bytes) for file in own.files] != [(file.name, file.num_bytes) for file in source.files]:
        return "other"
    return "same" if own.files == source.files else "unsure"


def default_root() -> Path:
    """Return the folder of this host's copies. ConfigError: this user has no home folder, and no XDG_CACHE_HOME."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rl" / "copies"
    except RuntimeError:
        raise ConfigError("this user has no home folder for copies of files: set XDG_CACHE_HOME") from None


class CopyCache:
    """The copies that a host has of sources of drivers, each in a folder of `root`.

    A copy is whole from the moment at which its folder has its name. Folders that a killed process has left half
    written are removed when the next copy is made: nobody holds their lock.
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
        for folder in self._root.glob(f"*{_PARTIAL}"):
            with suppress(OSError):  # another process writes it, or has just removed it
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
        self._folder.mkdir(mode=0o700)
        self._lock = _lock(self._folder)
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
