"""Writes model folders so that they are never incomplete: the results of `async-rl sft`, `reward-model` and `export`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import SCHEME
from async_rl.base.models_and_data.model_folder import Maker, partial_of


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context that converts a failed write to a ConfigError. The error names `folder`, where the user wants a model.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} can't be written: {reason}. Name a folder on a disk with room for it") from None


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A context with a new folder next to `folder` to write a model into. Its end renames the new folder to `folder`.

    So `folder` is always complete, or missing. If the block raises, the files that it has written are removed.
    """
    target = folder.resolve()
    partial = partial_of(target)
    with writing(folder):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(folder):
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_target(key: str, path: str, maker: Maker) -> Path:
    """Return the folder `path`, the value of `key`, into which a command writes the model that it creates.

    Raises:
        ConfigError: it contains something else than an earlier result, or `path` names a model of the hub.
    """
    target = Path(path)
    others = target.is_dir() and not (target / maker.marker).is_file() and any(target.iterdir())
    if others or target.is_file() or path.startswith(SCHEME):
        raise ConfigError(
            f"{key} {path} exists and was not written by `{maker.command}`; it will not be overwritten. "
            f"Set {key} to a new folder for the result, and {maker.base_key} to the model to start from"
        )
    return target
