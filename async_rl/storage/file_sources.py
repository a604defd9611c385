"""The driver's local files that processes on other hosts need: of each setting that names some, a source.

Hosts compare their own files with a source, and copy what they lack (file_copies.py).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.seams.module_files import PLACE, loaded_modules, module_files, small_folder
from async_rl.storage.hub import MODEL_FILES
from async_rl.storage.hub_names import find_data, find_model, is_data, names_in, with_name
from async_rl.storage.model_folder import TOKENIZER_FILES, weight_files, weight_shapes
from async_rl.storage.param_files import PARAM_KEYS, texts_in, with_param
from async_rl.storage.row_files import is_pattern, local_files

MODULES = "modules"
"""The user's own modules have this in place of the key of a setting, and the working directory as their path."""
PIECE_BYTES = 8 * 2**20
"""Files are read, sent and written in pieces of so many bytes."""
_WEIGHTS, _WEIGHT_INDEX = ".safetensors", ".safetensors.index.json"
_HASHING_THREADS = 4

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
    """The local files that one value of a setting names, or the user's own modules."""

    key: str
    """The key of the setting, such as model.path, or MODULES."""
    path: str
    """The value of the setting, or one of its list; of MODULES the driver's working directory."""
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
        folder = glob.escape(str(copy)) if is_data(self.key) and glob.has_magic(self.rest) else str(copy)
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
    elif key in PARAM_KEYS:
        base, found = target.parent, _named_files(target, key)
    else:
        base, found = target, _model_files(target, key)
    return _source(key, path, base, target, found)


def find_modules(config: Config) -> FileSource | None:
    """Return the user's own modules of the working directory that a run needs, or None if it needs none.

    These are the modules that the configuration names as `module:name`, those that this process has imported, and what
    they import.
    """
    folder = Path.cwd()
    named = [place[1] for text in texts_in(config) if (place := PLACE.fullmatch(text))]
    files = module_files([*named, *loaded_modules(folder)], folder)
    return _source(MODULES, str(folder), folder, folder, files) if files else None


def find_own(source: FileSource) -> FileSource:
    """Return the files that this host has in place of those of a driver's source.

    Raises:
        ConfigError: there are no such files, or not all of them.
    """
    if source.key != MODULES:
        return find_source(source.key, source.absolute)
    base = Path(source.base)
    found = [base / file.name for file in source.files if (base / file.name).is_file()]
    if not found:
        raise ConfigError(f"{base} has none of the modules {', '.join(file.name for file in source.files)}")
    return _source(source.key, source.path, base, base, found)


def _source(key: str, path: str, base: Path, target: Path, found: Sequence[Path]) -> FileSource:
    """Return the source of the files `found` below `base`; raises ConfigError if one can't be read."""
    try:
        told = [(str(file.relative_to(base)), file.stat()) for file in found]
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.filename} can't be read: {error.strerror}") from None
    return FileSource(
        key=key, path=path, base=str(base), rest="" if target == base else str(target.relative_to(base)),
        files=tuple(SourceFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in told),
    )


def _named_files(target: Path, key: str) -> list[Path]:
    """Return the file, or the files of the folder, that a text in the params `key` names."""
    found = [target] if target.is_file() else sorted(small_folder(target) or ())
    if not found:
        raise ConfigError(f"{key}: {target} is no file, and no folder that is small enough to be sent")
    return found


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
        if key != MODULES:  # entering.py has the process find these
            config = (with_param if key in PARAM_KEYS else with_name)(config, key, path, place)
    return config


def likeness(source: FileSource) -> Likeness:
    """Compare the files that this host has at the path of a source of the driver, without reading them."""
    try:
        own = find_own(source)
    except (OSError, ValueError):  # also a ConfigError
        return "none"
    if [(file.name, file.num_bytes) for file in own.files] != [(file.name, file.num_bytes) for file in source.files]:
        return "other"
    return "same" if own.files == source.files else "unsure"
