"""The names of models and data sets on the Hugging Face hub.

    Qwen/Qwen2.5-0.5B-Instruct                  a model, if there is no such folder
    hf://Qwen/Qwen2.5-0.5B-Instruct@v1          a model in any case; after @ a branch, a tag or a commit
    hf://openai/gsm8k:main/train                a data set: the split `train` of its config `main`
    hf://openai/gsm8k@v1:main/train             the same at a branch, a tag or a commit
    hf://owner/name/data/questions.parquet      a file of a data set
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from async_rl.config import Config
from async_rl.config.task_parts import data_of
from async_rl.errors import ConfigError

MODEL_KEYS = ("model.path", "critic.path", "reference.path", "reward_model.path", "judge.path")
"""The keys of the models of a run: each is a folder, or the name of a model on the hub."""
DATA_KEYS = ("task.path", "task.eval_path", "task.pretrain_path")
"""The keys of the data sets of a run: each is a file, or the name of a data set on the hub."""
SERVER_MODELS, SERVER_DATA = ("model.path", "judge.path"), ("task.path", "task.eval_path")
"""The parts of MODEL_KEYS and DATA_KEYS that the processes of servers read; the learner alone reads the others."""
LOCAL_FOLDERS = ("checkpoints", "data", "models", "runs")
"""Words with which a path of two begins if it is not the name of a model on the hub."""
COMPARISON_KEYS = ("reward_training.path", "reward_training.eval_path")
"""The keys of the data sets of `async-rl reward-model`, like DATA_KEYS."""
SCHEME = "hf://"
_ID = r"\w[\w.-]*/\w[\w.-]*"
_MODEL = re.compile(rf"(?P<id>{_ID})(?:@(?P<revision>[\w./-]+))?")
_DATA = re.compile(
    r"hf://(?:datasets/)?(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>refs/\w+/\w+|[\w.-]+))?"
    r"(?::(?P<part>[\w.-]+(?:/[\w.-]+)?)|/(?P<file>.+))?"
)
_PAGE = re.compile(rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?(?P<id>{_ID})(?:[/?#].*)?")
"""The address of a data set's page."""
_DATA_SUFFIXES = (".parquet", ".jsonl", ".arrow", ".json", ".csv")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A repository of the hub, as the setting `key` names it."""

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
    """CONFIG/SPLIT of a data set, or one of the two; empty: not given."""
    file: str = ""
    """The path of a file of a data set; empty: `part` says which files are meant."""

    @property
    def is_pinned(self) -> bool:
        """Whether the name holds a commit, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    def at(self, commit: str) -> str:
        """Return the name that names this commit."""
        given = self.name.removeprefix(SCHEME)
        base = f"{given[: given.index(self.id)]}{self.id}"
        rest = given.removeprefix(base).removeprefix(f"@{self.revision}" if self.revision else "")
        return f"{SCHEME}{base}@{commit}{rest}"


def find_model(name: str, key: str) -> HubRepo | None:
    """Return the model of the hub that `name` names, or None if it names a folder.

    Without hf:// a name is a folder if that or the folder above it exists, or if it begins with one of LOCAL_FOLDERS.

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
    """Return the data set of the hub that `name` names, or None if it is the path of a file.

    Raises:
        ConfigError: the name begins with hf:// and has none of the forms of data sets above.
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


def data_hint(name: str) -> str:
    """Return what to say of a name that is no file, if it looks like that of a data set of the hub; else ""."""
    is_local = Path(name).suffix in _DATA_SUFFIXES or name.partition("/")[0] in LOCAL_FOLDERS
    found = _PAGE.fullmatch(name) or (None if is_local else re.fullmatch(f"(?P<id>{_ID})", name))
    return f". The data set of the hub is named {SCHEME}{found['id']}" if found else ""


def hub_repos(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> Iterator[HubRepo]:
    """Yield the repositories of the hub that the settings `keys` name; raises ConfigError for a name without form."""
    for key, name in names_in(config, keys):
        if repo := (find_data if is_data(key) else find_model)(name, key):
            yield repo


def names_in(config: Config, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of each model and data set, of the hub or local, that the settings `keys` name."""
    for key in keys:
        value = attrgetter(key)(config)
        names = [each.path for each in data_of(value)] if is_data(key) else [value]
        yield from ((key, name) for name in names if name)


def recorded_name(of_run: Config, repo: HubRepo) -> str | None:
    """Return the name that a run's configuration has for `repo`, if it names a commit of the same repository."""
    for earlier in hub_repos(of_run, [repo.key]):
        if earlier.id == repo.id and earlier.is_pinned and repo.at(earlier.revision) == earlier.name:
            return earlier.name
    return None


def is_data(key: str) -> bool:
    """Return whether a setting names data sets, and not a model."""
    return key in (*DATA_KEYS, *COMPARISON_KEYS)


def with_name(config: Config, key: str, before: str, after: str) -> Config:
    """Return the configuration with the name `after` where the setting `key` is, or has in its list, `before`."""
    section, _, field = key.partition(".")
    value: Any = getattr(getattr(config, section), field)
    if isinstance(value, tuple):
        changed: Any = tuple(dataclasses.replace(each, path=after) if each.path == before else each for each in value)
    else:
        changed = after if value == before else value
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: changed})})
