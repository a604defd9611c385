"""The settings of a run: the user's configuration, with the values that the run decides.

The user's configuration is never changed. Each of these functions returns keys with the values decided for them:

    watch.rollbacks, run.resume       rollbacks_of, from the watcher's events
    model.path, task.path, ...        commits, absolute_paths: names of the hub with their commits, and full paths
    run.dir, run.name, run.resume     open_run_dir
    network.keys                      own_keys
    weight_sync.transport, ...        decide_placement, from the GPUs that Ray has reserved
    rollout.engine, ...               engine_of, in the process of a server
    network.host, port, ports         enter, in each process
    model.path, judge.path, ...       located, in the process that loads it: the folder on its host
    judge.urls                        connect, in a worker: where the judge's servers are

The driver sends the configuration and the decisions to its processes. Each combines the two with `resolve`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.base.config import Config

Decided = Mapping[str, Any]
"""Decided values by configuration key, such as {"run.name": "first-2"}."""


def resolve(config: Config, decided: Decided) -> Config:
    """Return a copy of the configuration with the decided values; `config` itself if nothing is decided."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in decided.items():
        section, name = key.split(".")
        sections[section][name] = value
    changed = {section: replace(getattr(config, section), **values) for section, values in sections.items()}
    return replace(config, **changed) if changed else config


def renamed(config: Config, key: str, names: Mapping[str, str]) -> Any:
    """Return the value of `key`, a model or a tuple of data sets, with the names in `names` replaced."""
    section, name = key.split(".")
    value: Any = getattr(getattr(config, section), name)
    if isinstance(value, tuple):
        return tuple(replace(each, path=names.get(each.path, each.path)) for each in value)
    return names.get(value, value)


def engine_of(config: Config, server: str) -> Decided:
    """Decide the settings of one server's process: its own engine becomes rollout.engine.

    Args:
        server: a name in `config.server_names`.
    """
    placement, rollout = config.placement, config.rollout
    if not placement.rollout.engines:
        return {}
    name = config.engines[config.server_names.index(server)]
    is_main = name == rollout.engine
    return {
        "placement.rollout": replace(placement.rollout, engines=()), "rollout.engine": name,
        "rollout.python": rollout.python if config.engine_entries[name].python else "",
        "rollout.server_args": rollout.server_args if is_main else {},
        "rollout.params": rollout.params if is_main else {},
    }
