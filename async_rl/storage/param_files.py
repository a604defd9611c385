"""Files that texts in `params` of the configuration name, such as task.params: {table: data/table.json}."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.seams.module_files import PACKAGE_BYTES, PACKAGE_FILES, small_folder

PARAM_KEYS = (
    "task.params", "task.rewards", "rollout.params", "rollout.server_args", "judge.server_args", "weight_sync.params",
    "algorithm.params",
)  # fmt: skip
"""The keys of settings with values that no section of the configuration declares. Those of task.rewards are its params.
"""


def param_files(config: Config, note: Callable[[str], None] = lambda text: None) -> list[tuple[str, str]]:
    """Return (key, text) of each text in PARAM_KEYS that names a file, or a folder to send, of this host.

    A file counts if the text has a / or an ending, as in `rows.jsonl`, unless it may be executed, as a program may; a
    folder counts if the text ends in a /, as in `corpus/`. `note` is told of each such folder that is too large.
    """
    found: dict[tuple[str, str], None] = {}
    for key in PARAM_KEYS:
        for text in dict.fromkeys(texts_in(_params_of(config, key))):
            if _names_a_file(text):
                found[key, text] = None
            elif _names_a_folder(text):
                if (files := small_folder(Path(text))) is None:
                    note(
                        f"caution: {key} names the folder {text}, which has more than {PACKAGE_BYTES / 1e6:.0f} MB or "
                        f"{PACKAGE_FILES} files and is not sent: every host needs it at that path"
                    )
                elif files:
                    found[key, text] = None
    return list(found)


def with_param(config: Config, key: str, before: str, after: str) -> Config:
    """Return the configuration with the text `after` in place of each `before` in the params of the setting `key`."""
    section, _, field = key.partition(".")
    changed = _replaced(_params_of(config, key), before, after)
    if key == "task.rewards":
        rewards = zip(config.task.rewards, changed, strict=True)
        changed = tuple(dataclasses.replace(reward, params=params) for reward, params in rewards)
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: changed})})


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value of the configuration, however deep in sections, lists and dicts."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def _params_of(config: Config, key: str) -> Any:
    value = attrgetter(key)(config)
    return [reward.params for reward in value] if key == "task.rewards" else value


def _replaced(value: Any, before: str, after: str) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(each, before, after) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, before, after) for each in value)
    return after if value == before else value


def _names_a_file(text: str) -> bool:
    looks_like_one = _can_be_a_path(text) and (os.sep in text or bool(Path(text).suffix))
    return looks_like_one and os.path.isfile(text) and not os.access(text, os.X_OK)


def _names_a_folder(text: str) -> bool:
    """Return whether a text ends in a / and names a folder, and none in which the working directory is."""
    is_folder = _can_be_a_path(text) and text.endswith(os.sep) and os.path.isdir(text)
    return is_folder and not Path.cwd().is_relative_to(os.path.abspath(text))


def _can_be_a_path(text: str) -> bool:
    return "\0" not in text and "\n" not in text and len(text) < 4096
