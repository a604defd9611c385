"""Models and data sets of the Hugging Face hub in this host's cache: finds them there, or downloads them.

The driver of a run pins each name to a commit, which config.yaml records, and each host finds that commit in its own
cache or downloads it. The work is huggingface_hub's; its settings are HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import glob
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import find_checkpoint, run_dir_of
from async_rl.storage.hub_names import (
    DATA_KEYS,
    MODEL_KEYS,
    SCHEME,
    HubRepo,
    find_model,
    hub_repos,
    recorded_name,
    with_name,
)
from async_rl.storage.resuming import config_file

PROGRESS_INTERVAL_S = 10.0
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")
"""The files of a model's repository, or of its folder, that are of use; those below it are not."""
_CLIENT_CLOSED = (RuntimeError, AttributeError)
"""The errors in its other threads when one of huggingface_hub loses the connection, and closes the client of all."""
_NOT_OF_MODELS = ("*/*", "consolidated*")
"""Files of a repository that hold the same weights once more, in other formats."""


class NotInCacheError(ConfigError):
    """A repository of the hub is not, or not whole, in this host's cache, and could not be downloaded."""


def pinned(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> Config:
    """Return `config` with the commit in each name of the hub, so that every host, and a resume, loads the same files.

    A resume takes the commits of its run where a name gives no revision. If the hub does not answer, the commit that
    this host has in its cache is taken.

    Raises:
        ConfigError: there is no such repository or revision, or nothing is cached and the hub does not answer.
    """
    for repo in hub_repos(config, keys):
        if repo.is_pinned:
            continue
        earlier = _recorded(config, repo) if config.run.resume and not repo.revision else None
        config = with_name(config, repo.key, repo.name, earlier or repo.at(_commit(repo)))
    return config


def located(
    config: Config, keys: Sequence[str] = MODEL_KEYS, check: Callable[[], None] = lambda: None
) -> Config:
    """Return `config` with this host's folders in place of the models of the hub that it names.

    Args:
        check: called in the course of a download, by any thread; what it raises ends the download.

    Raises:
        ConfigError: a model is not in this host's cache, and can't be downloaded.
    """
    for repo in hub_repos(config, keys):
        config = with_name(config, repo.key, repo.name, str(model_folder(repo, check=check)))
    return config


def model_folder(repo: HubRepo, *, cached_only: bool = False, check: Callable[[], None] = lambda: None) -> Path:
    """Return the folder of a model in this host's cache; downloads it first, unless it is there or `cached_only`.

    Raises:
        ConfigError: it can't be downloaded, or the repository holds no model that transformers loads from safetensors.
    """
    folder = fetch(repo, MODEL_FILES, _NOT_OF_MODELS, cached_only=cached_only, check=check)
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise ConfigError(
                f"{repo.key} {repo.name}: the repository holds no {needed}, so it is no model in the form of "
                f"transformers. It has {some_of(repo_files(repo, folder))}"
            )
    return folder


def fetch(
    repo: HubRepo, patterns: Sequence[str], but: Sequence[str] = (), *, cached_only: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Return the folder in this host's cache with all files of `repo` that match `patterns` and none of `but`.

    Of several processes on a host one downloads a file, the others wait for it. What is there whole is not asked for.

    Raises:
        ConfigError: not all are there, and they can't be downloaded.
    """
    from httpx import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted: dict[str, Any] = {
        "repo_type": repo.kind, "revision": repo.revision or None, "allow_patterns": list(patterns),
        "ignore_patterns": list(but),
    }
    # Without a list of the files, which older versions did not keep, a snapshot that lacks some looks whole.
    is_known = repo.is_pinned and _listed(repo, repo.revision) is not None
    with _explained(repo):
        if cached_only or is_known:
            try:
                return Path(snapshot_download(repo.id, **wanted, local_files_only=True))
            except LocalEntryNotFoundError:
                if cached_only:
                    raise
        try:
            return Path(snapshot_download(repo.id, **wanted, tqdm_class=_progress_class(check)))
        except (HfHubHTTPError, TransportError, OfflineModeIsEnabled, *_CLIENT_CLOSED) as error:
            if is_known or (isinstance(error, HfHubHTTPError) and error.response.status_code < 500):
                raise
            failure = error
        try:
            return Path(snapshot_download(repo.id, **wanted, local_files_only=True))
        except LocalEntryNotFoundError:
            raise failure from None


def repo_files(repo: HubRepo, folder: Path) -> list[str]:
    """Return the names of all files of a repository of which `fetch` has returned `folder`, without network access."""
    there = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(_listed(repo, folder.name) or there)


def _listed(repo: HubRepo, commit: str) -> list[str] | None:
    """Return the names of the files at a commit, as this host's cache lists them, or None if it does not."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo.id, repo_type=repo.kind, revision=commit)]
    except CachedRepoTreeNotFoundError:
        return None


def some_of(names: Sequence[str]) -> str:
    """Return the first of these names as text, and how many others there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "") or "no files"


def exactly(names: Sequence[str]) -> list[str]:
    """Return the patterns for `fetch` that match these names alone."""
    return [glob.escape(name) for name in names]


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model `name` of the hub if this host's cache holds a part of it, else None."""
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


def _commit(repo: HubRepo) -> str:
    from huggingface_hub import HfApi

    with _explained(repo):
        return HfApi().resolve_revision(repo.id, repo_type=repo.kind, revision=repo.revision or None).resolved


def _recorded(config: Config, repo: HubRepo) -> str | None:
    """Return the name in the configuration of the run that is resumed, if it names a commit of the same repository."""
    of_run = _run_config(str(find_checkpoint(config.run.resume)))
    return recorded_name(of_run, repo) if of_run else None


@cache
def _run_config(checkpoint: str) -> Config | None:
    file = config_file(run_dir_of(Path(checkpoint)))
    return load_config(file) if file.is_file() else None


@contextmanager
def _explained(repo: HubRepo) -> Iterator[None]:
    """Turn an error of huggingface_hub in the `with` block into a ConfigError that says what the user may do."""
    from httpx import TransportError
    from huggingface_hub import constants, errors

    where, what = constants.ENDPOINT, "model" if repo.kind == "model" else "data set"
    plain = not repo.name.startswith(SCHEME)
    page = f"{where}/{'' if repo.kind == 'model' else 'datasets/'}{repo.id}"
    subject = f"{repo.key} {repo.name}: " + ("there is no such folder here, and " if plain else "")
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{subject}the {what} is gated: accept its terms at {page}, then log in with `hf auth login` or set "
            "HF_TOKEN, on every host of the run"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{subject}{where} has no {what} {repo.id}, or none that you may see. Check the spelling; for a private "
            "one log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{subject}{page} has no revision {repo.revision!r}. Name a branch, a tag or a commit of it"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = "log in with `hf auth login` or set HF_TOKEN" if status in (401, 403) else "try again later"
        raise ConfigError(f"{subject}{where} refused the {what} {repo.id} with status {status}: {advice}") from None
    except (
        errors.LocalEntryNotFoundError, errors.RevisionResolutionError, errors.OfflineModeIsEnabled, TransportError,
        *_CLIENT_CLOSED,
    ) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else _root(error)
        raise NotInCacheError(
            f"{subject}the {what} {repo.id} is not whole in this host's cache {constants.HF_HUB_CACHE}, and {where} "
            f"can't be reached ({reason}). Give this host a way there (HF_ENDPOINT: a mirror), or copy the cache of a "
            "host that has it (HF_HOME)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{subject}the {what} {repo.id} can't be written to {constants.HF_HUB_CACHE}: {error.strerror or error}. "
            "Set HF_HOME to a folder on a disk with room for it"
        ) from None


def _root(error: BaseException) -> str:
    """Return the kind and the first line of the error from which `error` came."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _progress_class(check: Callable[[], None]) -> Any:
    """Return the class of the bars of a download: those of huggingface_hub on a terminal, else lines of text.

    They call `check` for each piece that has come.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import tqdm as bar
    from tqdm import tqdm

    class CheckingBar(bar):  # type: ignore[misc]
        """A bar of huggingface_hub, or none where these are turned off."""

        def update(self, n: float | None = 1) -> bool | None:
            check()
            return bool(super().update(n))

    class ProgressLines(tqdm):  # type: ignore[type-arg]
        """A bar that is a line of text every PROGRESS_INTERVAL_S, while bytes are downloaded."""

        _told_s = time.monotonic()

        def update(self, n: float | None = 1) -> bool | None:
            check()
            return super().update(n)

        def display(self, *args: object, **kwargs: object) -> None:
            now_s = time.monotonic()
            if self.unit == "B" and self.total and now_s - ProgressLines._told_s >= PROGRESS_INTERVAL_S:
                ProgressLines._told_s = now_s
                print(f"downloaded {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB", file=sys.stderr, flush=True)

    return CheckingBar if sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS else ProgressLines
