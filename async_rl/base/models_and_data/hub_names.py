"""The names of models and data sets on the Hugging Face hub.

    Qwen/Qwen2.5-0.5B-Instruct                  a model, if there is no such folder
    hf://Qwen/Qwen2.5-0.5B-Instruct@v1          always a model; after @ a branch, a tag or a commit
    hf://openai/gsm8k:main/train                a data set: the split `train` of its config `main`
    hf://openai/gsm8k@v1:main/train             the same at a branch, a tag or a commit
    hf://owner/name/data/train-*.parquet        files of a data set
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from async_rl.base.config import Config
from async_rl.base.config.resolve import Decided, renamed
from async_rl.base.config.task_parts import data_of
from async_rl.base.errors import ConfigError

MODEL_KEYS = ("model.path", "critic.path", "reference.path", "reward_model.path", "judge.path")
"""The settings that name a run's models. Each value is a folder, or the name of a model on the hub."""
DATA_KEYS = ("task.path", "task.eval_path", "task.pretrain_path", "eval.suite")
"""The settings that name a run's data sets. Each value is a file, or the name of a data set on the hub."""
SERVER_KEYS = ("model.path", "task.path", "task.eval_path", "eval.suite")
"""The settings that name what a rollout server's process reads."""
LEARNER_MODELS = MODEL_KEYS[:4]
LEARNER_KEYS = (*LEARNER_MODELS, "task.pretrain_path")
"""The settings that name what a learner rank's process reads."""
LOCAL_FOLDERS = ("checkpoints", "data", "models", "runs")
"""A name FOLDER/NAME with one of these folders is a path, never a model on the hub."""
COMPARISON_KEYS = ("reward_training.path", "reward_training.eval_path")
"""The settings that name data sets of `async-rl reward-model`, like DATA_KEYS."""
SCHEME = "hf://"
_ID = r"\w[\w.-]*/\w[\w.-]*"
_MODEL = re.compile(rf"(?P<id>{_ID})(?:@(?P<revision>[\w./-]+))?")
_DATA = re.compile(
    r"hf://(?:datasets/)?(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>refs/\w+/\w+|[\w.-]+))?"
    r"(?::(?P<part>[\w.-]+(?:/[\w.-]+)?)|/(?P<file>.+))?"
)
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
"""The endings of files with rows."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A repository of the hub that a setting names."""

    key: str
    """The key of the setting, such as model.path."""
    name: str
    """The value of the setting."""
    id: str
    """OWNER/NAME."""
    revision: str
    """A branch, a tag or a commit; empty: the default branch."""
    kind: Literal["model", "dataset"]
    part: str = ""
    """CONFIG/SPLIT of a data set, or one of the two; empty: the name has neither."""
    file: str = ""
    """The path of a data set's file, or a glob; empty: `part` determines the files."""

    @property
    def is_pinned(self) -> bool:
        """Whether the name has a commit, so that it always means the same files."""
        return bool(_COMMIT.fullmatch(self.revision))

    def at(self, commit: str) -> str:
        """Return the name with this commit as its revision."""
        given = self.name.removeprefix(SCHEME)
        base = f"{given[: given.index(self.id)]}{self.id}"
        rest = given.removeprefix(base).removeprefix(f"@{self.revision}" if self.revision else "")
        return f"{SCHEME}{base}@{commit}{rest}"


def find_model(name: str, key: str) -> HubRepo | None:
    """Parse `name` as a model of the hub. Returns None if it means a local folder.

    Without hf:// it means a folder if that or the folder above it exists, or if it begins with one of LOCAL_FOLDERS.

    Args:
        key: the setting with this value, for errors.

    Raises:
        ConfigError: the name begins with hf:// and has another form than hf://OWNER/NAME or hf://OWNER/NAME@REVISION.
    """
    found = _MODEL.fullmatch(name.removeprefix(SCHEME))
    if found is None and name.startswith(SCHEME):
        raise ConfigError(f"{key} must be a folder, OWNER/NAME or {SCHEME}OWNER/NAME@REVISION, got {name!r}")
    if found is None or not (name.startswith(SCHEME) or _is_no_folder(Path(name))):
        return None
    return HubRepo(key=key, name=name, id=found["id"], revision=found["revision"] or "", kind="model")


def _is_no_folder(path: Path) -> bool:
    return path.parts[0] not in LOCAL_FOLDERS and not path.exists() and not path.parent.is_dir()


def find_data(name: str, key: str) -> HubRepo | None:
    """Parse `name` as a data set of the hub. Returns None if it is the path of a file.

    Raises:
        ConfigError: the name begins with hf:// but has none of the forms above.
    """
    if not name.startswith(SCHEME):
        return None
    found = _DATA.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"{key} must be a file, {SCHEME}OWNER/NAME:CONFIG/SPLIT or {SCHEME}OWNER/NAME/PATH/OF/FILE, with "
            f"@REVISION after NAME if you want one, got {name!r}"
        )
    return HubRepo(
        key=key, name=name, id=found["id"], revision=found["revision"] or "", kind="dataset",
        part=found["part"] or "", file=found["file"] or "",
    )


def hub_repo(name: str, key: str) -> HubRepo | None:
    """Parse `name`, a value of the setting `key`, as a model or data set of the hub; None if it is a path."""
    return (find_data if is_data(key) else find_model)(name, key)


def hub_repos(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> Iterator[HubRepo]:
    """Yield the repositories of the hub that the settings `keys` name. Raises ConfigError if a name is malformed."""
    for key, name in names_in(config, keys):
        if repo := hub_repo(name, key):
            yield repo


def names_in(config: Config, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, name) for each model and data set, local or on the hub, in the settings `keys`."""
    for key in keys:
        value = attrgetter(key)(config)
        names = [each.path for each in data_of(value)] if is_data(key) else [value]
        yield from ((key, name) for name in names if name)


def absolute_paths(config: Config) -> Decided:
    """Return the settings for local models and data, with absolute paths.

    So a host that lacks a path does not look it up on the hub.
    """
    found = list(names_in(config, (*MODEL_KEYS, *DATA_KEYS)))
    paths = {name: os.path.abspath(name) for key, name in found if not hub_repo(name, key)}
    return {key: renamed(config, key, paths) for key, name in found if name in paths}


def recorded_name(of_run: Config, repo: HubRepo) -> str | None:
    """Return the name with commit that a run's configuration has for `repo`; None if it names no commit of it."""
    for earlier in hub_repos(of_run, [repo.key]):
        if earlier.id == repo.id and earlier.is_pinned and repo.at(earlier.revision) == earlier.name:
            return earlier.name
    return None


def is_data(key: str) -> bool:
    """Return whether a setting names data sets; the others name models."""
    return key in (*DATA_KEYS, *COMPARISON_KEYS)
