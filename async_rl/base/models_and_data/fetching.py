"""Pins the models and data of a configuration to commits of the hub, and finds them on this host or downloads them.

The driver of a run adds the commit to each name, and config.yaml records it. Each host then finds that commit in its
own cache, or downloads it. hub.py does the work; a run that uses nothing from the hub does not load it.
"""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.config.resolve import Decided, renamed, resolve
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import DATA_KEYS, MODEL_KEYS, SCHEME, hub_repo, hub_repos, names_in


def commits(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> Decided:
    """Add a commit to each name of the hub, so that every host, and a resume, loads the same files.

    Returns the configuration keys with the new names. For a name without a revision, a resume takes the commit of its
    run. If the hub does not answer, the commit in this host's cache is taken.

    Raises:
        ConfigError: there is no such repository or revision, or nothing is cached and the hub does not answer.
    """
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for repo in hub_repos(config, keys):
        if not repo.is_pinned:
            from async_rl.base.models_and_data.hub import with_commit

            names[repo.key][repo.name] = with_commit(config, repo)
    return {key: renamed(config, key, of_key) for key, of_key in names.items()}


def pinned(config: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS)) -> Config:
    """Return the configuration with commits added to names of the hub, for commands that start no run. See `commits`.
    """
    return resolve(config, commits(config, keys))


def located(
    config: Config, keys: Sequence[str] = MODEL_KEYS, check: Callable[[], None] = lambda: None
) -> Config:
    """Return the configuration with names of models on the hub replaced by this host's folders.

    Downloads what is missing.

    Args:
        check: called regularly during a download, by any thread. If it raises, the download ends.

    Raises:
        ConfigError: a model is not in this host's cache, and can't be downloaded.
    """
    folders: dict[str, str] = {}
    for repo in hub_repos(config, keys):
        from async_rl.base.models_and_data.hub import model_folder

        folders[repo.key] = str(model_folder(repo, check=check))
    return resolve(config, folders)


def find_files(config: Config, keys: Sequence[str]) -> None:
    """Check that this host has the files named by the settings `keys`. Files on the hub are downloaded.

    Raises:
        ConfigError: a path is not on this host, or a download failed.
    """
    for key, name in names_in(config, keys):
        if repo := hub_repo(name, key):
            from async_rl.base.models_and_data.hub import data_files, model_folder

            data_files(repo) if repo.kind == "dataset" else model_folder(repo)
        elif not Path(name).exists() and not glob.glob(name, recursive=True):
            raise ConfigError(
                f"{config.network.host} has no {os.path.abspath(name)}, which {key} names: put it at the same path on "
                f"every host, as on a shared disk, or name what is on the hub ({SCHEME}OWNER/NAME)"
            )
