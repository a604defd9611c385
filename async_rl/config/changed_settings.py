"""Finds the settings of a run that differ from the defaults, for the dry run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.config.loading import dump_config, load_config
from async_rl.config.yaml_text import read_yaml
from async_rl.errors import ConfigError


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the settings of a configuration that differ from the defaults of its preset, as (key, value, default).

    `...` stands for a missing default: the key is required, or another version of this program wrote it.
    """
    algorithm = config.get("algorithm")
    preset = algorithm.get("preset") if isinstance(algorithm, dict) else None
    fixed = ["model.path=none", "task.name=reasoning_gym/none"]
    try:
        text = dump_config(load_config(None, [*fixed, *([f"algorithm.preset={preset}"] if preset else [])]))
    except ConfigError:
        text = dump_config(load_config(None, fixed))
    defaults = dict(_leaves(read_yaml(text)[0]))
    required = {"model.path", "task.name"}
    found = [(key, value, ... if key in required else defaults.get(key, ...)) for key, value in _leaves(config)]
    is_set = [key not in required or value for key, value, _ in found]  # task.env and task.agent take no task.name
    return [each for each, counts in zip(found, is_set, strict=True) if counts and each[1] != each[2]]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, value) of each value in nested mappings."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found += _leaves(value, f"{prefix}{name}.") if is_section else [(f"{prefix}{name}", value)]
    return found
