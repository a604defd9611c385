"""Models and data sets of the Hugging Face hub: finds them in this host's cache, or downloads them.

A run that uses nothing from the hub does not load this module (hub_names.py). huggingface_hub does the work; its
settings are HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import DATA_SUFFIXES, SCHEME, HubRepo, find_model, recorded_name
from async_rl.base.run_dir.checkpoints import find_checkpoint, run_dir_of
from async_rl.base.run_dir.resuming import config_file

PROGRESS_INTERVAL_S = 10.0
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")
"""The files of a model's repository that are downloaded; those in its subfolders are not."""
_NOT_OF_MODELS = ("*/*", "consolidated*")
"""Files of a model's repository that contain the same weights in other formats."""
_CARD = "README.md"


class NotInCacheError(ConfigError):
    """A repository of the hub is missing or incomplete in this host's cache, and could not be downloaded."""


def model_folder(repo: HubRepo, *, cached_only: bool = False, check: Callable[[], None] = lambda: None) -> Path:
    """Return the folder of a model in this host's cache. Downloads it first if it is not there, unless `cached_only`.

    Raises:
        ConfigError: the model can't be downloaded, or transformers can't load one from safetensors in the repository.
    """
    folder = fetch(repo, MODEL_FILES, _NOT_OF_MODELS, cached_only=cached_only, check=check)
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise ConfigError(
                f"{repo.key} {repo.name}: the repository holds no {needed}, so it is no model in the form of "
                "transformers"
            )
    return folder


def data_files(repo: HubRepo, *, cached_only: bool = False) -> list[Path]:
    """Return the files of the data set `repo.name` in this host's cache. Downloads them first if they are not there.

    Configs and splits have the names of `datasets.load_dataset`. Only the files of the split are downloaded.

    Raises:
        ConfigError: there is no such config or split, several could be meant, or a file can't be read or downloaded.
    """
    if repo.file:
        folder = fetch(repo, [repo.file], cached_only=cached_only)
        files = sorted(folder.glob(repo.file))
    else:
        files = _files_of_split(repo, cached_only)
    if not files or any(file.suffix not in DATA_SUFFIXES for file in files):
        found = f"got {files[0].name}" if files else "found none"
        raise ConfigError(
            f"{repo.key} {repo.name} must name files that end in {', '.join(DATA_SUFFIXES)}, {found}. Most data sets "
            f"of the hub have Parquet files at a revision of their own: {SCHEME}{repo.id}@refs/convert/parquet/PATH"
        )
    return files


def _files_of_split(repo: HubRepo, cached_only: bool) -> list[Path]:
    """Return the files of one split of a data set. `datasets` finds them by the data set's card or by file names."""
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    card = fetch(repo, [_CARD], cached_only=cached_only) / _CARD
    patterns: dict[str, list[str]] = {}
    """For each split, named CONFIG/SPLIT: glob patterns of its files, relative to the repository."""
    try:
        configs: Any = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data) if card.is_file() else {}
        for name, settings in (configs or {"default": {}}).items():
            below = settings.get("data_dir", "").strip("/")
            if "data_files" in settings:
                splits = sanitize_patterns(settings["data_files"])
            else:
                all_files = [os.path.join(below, f"*{suffix}") for suffix in DATA_SUFFIXES]
                folder = fetch(repo, all_files, cached_only=cached_only)
                splits = get_data_patterns(str(folder / below))
            for split, paths in splits.items():
                patterns[f"{name}/{split}"] = [os.path.join(below, path) for path in paths]
        chosen = patterns[_usual_part(repo, list(patterns), configs.get_default_config_name() if configs else None)]
        # snapshot_download's * crosses folders, so it downloads these files, and maybe more.
        folder = fetch(repo, [re.sub(r"\*\*/?", "*", each) for each in chosen], cached_only=cached_only)
        found = DataFilesList.from_patterns(chosen, base_path=str(folder), allowed_extensions=[*DATA_SUFFIXES])
    except ConfigError:
        raise
    except (EmptyDatasetError, FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{repo.key} {repo.name}: `datasets` finds no files there: {_first_line(error)}") from None
    return sorted(map(Path, set(found)))


def _usual_part(repo: HubRepo, parts: Sequence[str], default: str | None) -> str:
    """Return the CONFIG/SPLIT in `parts` that the name in `repo` means.

    If the name leaves out the config, it is the card's default config, or `main`. If it leaves out the split, it is
    `test` for held-out data, else `train`.
    """
    meant = [part for part in parts if repo.part in ("", part, *part.split("/"))]
    usual = "test" if "eval_path" in repo.key else "train"
    for column, wanted in ((0, default), (0, "main"), (1, usual)):
        meant = [part for part in meant if part.split("/")[column] == wanted] or meant
    if len(meant) != 1:
        choices = ", ".join(f"{SCHEME}{repo.id}:{part}" for part in meant or parts)
        raise ConfigError(f"{repo.key} {repo.name} must name one split of the data set: {choices}")
    return meant[0]


def fetch(
    repo: HubRepo, patterns: Sequence[str], but: Sequence[str] = (), *, cached_only: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Return the folder in this host's cache with all files of `repo` that match `patterns` but none of `but`.

    If several processes of a host need a file, one downloads it and the others wait. For complete files the hub is not
    asked.

    Args:
        check: called regularly during a download, by any thread. If it raises, the download ends.

    Raises:
        ConfigError: files are missing and can't be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {
        "repo_type": repo.kind, "revision": repo.revision or None, "allow_patterns": list(patterns),
        "ignore_patterns": list(but),
    }
    with _explained(repo):
        if cached_only or _is_listed(repo):
            try:
                return Path(snapshot_download(repo.id, **wanted, local_files_only=True))
            except LocalEntryNotFoundError:
                if cached_only:
                    raise
        return Path(snapshot_download(repo.id, **wanted, tqdm_class=_progress_class(check)))


def _is_listed(repo: HubRepo) -> bool:
    """Whether this host's cache has a list of the repository's files. Without it an incomplete snapshot looks complete.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    if not repo.is_pinned:
        return False
    try:
        return bool(get_cached_repo_tree(repo.id, repo_type=repo.kind, revision=repo.revision))
    except CachedRepoTreeNotFoundError:
        return False


def cached_folder(name: str) -> Path | None:
    """Return the folder in this host's cache of model `name` of the hub, even if it is incomplete; None without one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo = find_model(name, "model.path")
    if repo is None:
        return None
    try:  # with no pattern, an incomplete snapshot is one too
        folder = snapshot_download(repo.id, revision=repo.revision or None, allow_patterns=[], local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def with_commit(config: Config, repo: HubRepo) -> str:
    """Return the name of `repo` with a commit: that of the resumed run, or the newest one of the hub or the cache.

    Raises:
        ConfigError: there is no such repository or revision, or nothing is cached and the hub does not answer.
    """
    from huggingface_hub import HfApi

    if config.run.resume and not repo.revision and (earlier := _recorded(config, repo)):
        return earlier
    with _explained(repo):
        found = HfApi().resolve_revision(repo.id, repo_type=repo.kind, revision=repo.revision or None)
    return repo.at(found.resolved)


def _recorded(config: Config, repo: HubRepo) -> str | None:
    """Return the name with commit in the resumed run's configuration, if it names the same repository; else None."""
    of_run = _run_config(str(find_checkpoint(config.run.resume)))
    return recorded_name(of_run, repo) if of_run else None


@cache
def _run_config(checkpoint: str) -> Config | None:
    file = config_file(run_dir_of(Path(checkpoint)))
    return load_config(file) if file.is_file() else None


@contextmanager
def _explained(repo: HubRepo) -> Iterator[None]:
    """A context that converts errors of huggingface_hub to ConfigErrors."""
    from httpx import TransportError
    from huggingface_hub import constants, errors

    subject = f"{repo.key} {repo.name}"
    if not repo.name.startswith(SCHEME):
        subject += ", of which there is no folder here"
    try:
        yield
    except (
        errors.LocalEntryNotFoundError, errors.RevisionResolutionError, errors.OfflineModeIsEnabled, TransportError,
        RuntimeError, AttributeError,
    ) as error:
        # A thread of huggingface_hub that loses the connection closes the client of all: it is closed there, or None.
        if isinstance(error, RuntimeError) and "closed" not in str(error):
            raise
        if isinstance(error, AttributeError) and error.obj is not None:
            raise
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else _first_line(error)
        raise NotInCacheError(
            f"{subject}: it is not whole in this host's cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} can't "
            f"be reached ({reason}). Set HF_ENDPOINT to a mirror, or copy the cache of a host that has it (HF_HOME)"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        access = isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403)
        advice = ". Check the name; log in with `hf auth login` or set HF_TOKEN, and accept its terms if it has some"
        answer = f"{constants.ENDPOINT} answers {type(error).__name__}, status {status}"
        raise ConfigError(f"{subject}: {answer}{advice * access}") from None
    except OSError as error:
        raise ConfigError(
            f"{subject} can't be written to {constants.HF_HUB_CACHE}: {error.strerror or error}. Set HF_HOME to a "
            "folder on a disk with room for it"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _progress_class(check: Callable[[], None]) -> Any:
    """Return a progress bar for huggingface_hub that calls `check` for each piece of a download.

    It writes few lines into a log file.
    """
    from huggingface_hub.utils import tqdm

    class CheckingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            rarely: Mapping[str, float] = {} if sys.stderr.isatty() else {"mininterval": PROGRESS_INTERVAL_S}
            super().__init__(*args, **{**settings, **rarely})

        def update(self, n: float | None = 1) -> bool | None:
            check()
            return bool(super().update(n))

    return CheckingBar


def check_login(name: str) -> None:
    """Raise ConfigError if this host has no hub token for uploads to `name`, the value of checkpoint.push_to_hub."""
    from huggingface_hub import get_token

    if not get_token():
        raise ConfigError(
            f"checkpoint.push_to_hub {name} needs a token of the hub that may write: log in "
            "with `hf auth login`, or set HF_TOKEN"
        )


def upload_model(config: Config, folder: Path, note: Callable[[str], None]) -> None:
    """Upload `folder` to the repository checkpoint.push_to_hub. If the repository is new, it is private.

    The run has ended by then. So a failure is no error: `note` gets a message with what to do.
    """
    name = config.checkpoint.push_to_hub
    if not folder.is_dir():
        note(f"nothing is uploaded to {name}: there is no {folder} here")
        return
    limit = config.timeouts.limit("batch_s")
    failures = [f"no answer after {limit}"]

    def upload() -> None:
        from huggingface_hub import HfApi

        try:
            api = HfApi()
            api.create_repo(name, private=True, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Model of the run {config.run.name}")
        except Exception as error:  # whatever the hub and its client do, the run has its model
            failures.append(f"{type(error).__name__}: {_first_line(error)}")
        else:
            failures.clear()

    # A thread that ends with the process: huggingface_hub has no time limit for an upload as a whole.
    uploading = threading.Thread(target=upload, daemon=True)
    uploading.start()
    uploading.join(limit.seconds)
    if failures:
        note(f"{folder} could not be uploaded to {name}: {failures[-1]}. Try again with: hf upload {name} {folder}")
    else:
        note(f"{folder} is on the hub as {name}")
