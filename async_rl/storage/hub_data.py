"""Data sets of the Hugging Face hub: the files that hold the part which a name means.

The configs and splits are those of the data set's card, as on its page of the hub. Without any in the card, a file is
of the split that a word in its path means. A name may leave out what the data set has only one of, and what is usual:
the config that the card calls its default, or else that with the name `default` or `main`; the split `test` of what is
held out, and `train` of all else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.hub import exactly, fetch, model_folder, repo_files, some_of
from async_rl.storage.hub_names import DATA_KEYS, MODEL_KEYS, SCHEME, HubRepo, hub_repos

SUFFIXES = (".parquet", ".jsonl")
"""The endings of files that a task can read."""
CARD = "README.md"
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""The split of each word in the name of a file that tells one."""
_SPLIT_IN_PATH = re.compile(rf"(?:^|[/_.-])({'|'.join(_SPLITS)})(?=[/_.-])", re.IGNORECASE)

Splits = Mapping[str, Mapping[str, Sequence[str]]]
"""[config][split] the files of a data set."""


def data_files(repo: HubRepo, *, cached_only: bool = False) -> list[Path]:
    """Return the files of the part of a data set that `repo.name` names, in this host's cache; downloads them first.

    Raises:
        ConfigError: there is no such part, several could be meant, or a file can't be read or downloaded.
    """
    folder = fetch(repo, [CARD], cached_only=cached_only)
    names = repo_files(repo, folder)
    if repo.file:
        wanted: Sequence[str] = [repo.file]
        if repo.file not in names:
            raise ConfigError(f"{repo.key} {repo.name}: the data set has no file {repo.file}. It has {some_of(names)}")
    else:
        wanted = _chosen(repo, _card(folder / CARD), names)
    if wrong := [name for name in wanted if not name.endswith(SUFFIXES)]:
        raise ConfigError(
            f"{repo.key} {repo.name}: a task reads {' and '.join(SUFFIXES)}, got {wrong[0]}. Most data sets of the hub "
            f"have Parquet files at a revision of their own: {SCHEME}{repo.id}@refs/convert/parquet/PATH/OF/FILE"
        )
    folder = fetch(repo, exactly(wanted), cached_only=cached_only)
    return [folder / name for name in wanted]


def fetch_all(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> None:
    """Download what the settings `keys` name on the hub into this host's cache, unless it is there.

    Raises:
        ConfigError: one of them can't be downloaded.
    """
    for repo in hub_repos(config, keys):
        data_files(repo) if repo.kind == "dataset" else model_folder(repo)


def splits_of(card: Mapping[str, Any], names: Sequence[str]) -> Splits:
    """Return the files of each config and split of a data set.

    Args:
        card: the metadata of its card. `configs` has a mapping {config_name, data_files, data_dir} for each config;
            data_files is a pattern, a list of patterns, or a list of {split, path}, where path may be a list.
        names: all files of the repository.
    """
    configs = card.get("configs") or []
    if not configs:
        return {"default": _splits_by_name(names)} if any(name.endswith(SUFFIXES) for name in names) else {}
    splits: dict[str, dict[str, list[str]]] = {}
    for config in configs:
        below = f"{config['data_dir'].strip('/')}/" if config.get("data_dir") else ""
        parts = config.get("data_files")
        found = splits[str(config.get("config_name", "default"))] = {}
        if parts is None:
            found |= _splits_by_name([name for name in names if name.startswith(below)])
            continue
        for part in parts if isinstance(parts, list) else [parts]:
            split, paths = (part["split"], part["path"]) if isinstance(part, dict) else ("train", part)
            patterns = [_pattern(f"{below}{path}") for path in (paths if isinstance(paths, list) else [paths])]
            files = [name for name in names if any(pattern.fullmatch(name) for pattern in patterns)]
            found[str(split)] = sorted({*found.get(str(split), []), *files})
    return splits


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern of a card as a regular expression: * and ? stay within a folder, and ** also crosses folders."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^/\]]+\])", text)
    for index in range(0, len(parts), 2):
        parts[index] = re.escape(parts[index])
    for index in range(1, len(parts), 2):
        letters = parts[index].replace("\\", "\\\\").replace("[!", "[^")
        parts[index] = known.get(parts[index], letters)
    return re.compile("".join(parts))


def _splits_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by the names of the files. A file without a split in its name is of train."""
    splits: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.endswith(SUFFIXES)):
        held = _SPLIT_IN_PATH.findall(name)
        splits.setdefault(_SPLITS[held[-1].lower()] if held else "train", []).append(name)
    return splits


def _chosen(repo: HubRepo, card: Mapping[str, Any], names: Sequence[str]) -> Sequence[str]:
    """Return the files of the part of a data set that `repo` names; of the usual part if the name leaves it open."""
    splits = splits_of(card, names)
    known = {f"{config}/{split}": files for config, found in splits.items() for split, files in found.items()}
    if not known:
        raise ConfigError(
            f"{repo.key} {repo.name}: its card names no configs, and it has no {' or '.join(SUFFIXES)} file. "
            f"It has {some_of(names)}"
        )
    meant = [name for name in known if repo.part in ("", name, *name.split("/"))]
    usual = _usual(meant, card, "test" if "eval_path" in repo.key else "train")
    if len(usual) != 1:
        advice = ", ".join(f"{SCHEME}{repo.id}:{name}" for name in meant or known)
        raise ConfigError(
            f"{repo.key} {repo.name} must name one split of the data set: {advice}"
            + ("" if meant or not repo.part else f". It has no {repo.part}")
        )
    if not known[usual[0]]:
        raise ConfigError(f"{repo.key} {repo.name}: the repository has none of the files that its card names")
    return known[usual[0]]


def _usual(parts: Sequence[str], card: Mapping[str, Any], split: str) -> Sequence[str]:
    """Return those of `parts`, each CONFIG/SPLIT, that are of the usual config and of `split`, where there are any."""
    flagged = [str(config.get("config_name")) for config in card.get("configs") or [] if config.get("default")]
    for configs in (flagged, ["default"], ["main"]):
        if found := [part for part in parts if part.split("/")[0] in configs]:
            parts = found
            break
    return [part for part in parts if part.split("/")[1] == split] or parts


def _card(file: Path) -> Mapping[str, Any]:
    """Return the metadata at the top of a card; {} if there is no card, or none in it."""
    from huggingface_hub import metadata_load

    return (metadata_load(file) or {}) if file.is_file() else {}

