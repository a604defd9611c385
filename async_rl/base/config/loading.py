"""Reads a `Config` from YAML 1.2 and `key.sub=value` overrides, and writes it as YAML. Errors say where a key was set.

In YAML 1.2 `1e-4` is a number, `010` is ten, and `no`, `on`, `12:30` and dates are text.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

from async_rl.base.config import Config
from async_rl.base.config.algorithm import PRESETS, AlgorithmConfig
from async_rl.base.config.check import SettingsError
from async_rl.base.errors import ConfigError


def read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Return the values in `text` (None if it is empty), and the line of each dotted key, counted from 1.

    Raises:
        YAMLError: `text` is not valid YAML, repeats a key, or has an alias or a tag for a Python object.
    """
    return copy.deepcopy(_read(text))


@functools.lru_cache(maxsize=256)  # ruamel.yaml is slow, and a sweep reads the config of each cell several times
def _read(text: str) -> tuple[Any, dict[str, int]]:
    yaml = _yaml()
    try:
        node = yaml.compose(text)
        lines = dict(_lines(node, "", set()))
        return (yaml.constructor.construct_document(node) if node else None), lines
    except MarkedYAMLError as error:  # its own text adds advice on the library
        mark = error.problem_mark
        raise YAMLError(f"{error.problem}{f' in line {mark.line + 1}' if mark else ''}") from None


def write_yaml(value: Any) -> str:
    """Return `value` as YAML. read_yaml reads it as an equal value, except that tuples become lists."""
    stream = io.StringIO()
    _yaml().dump(value, stream)
    return stream.getvalue()


def _lines(node: Node | None, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if node is None or isinstance(node, ScalarNode):
        return
    if id(node) in seen:  # a few lines with aliases can stand for any amount of data
        raise MarkedYAMLError(problem="an alias is not allowed: write out its value", problem_mark=node.start_mark)
    seen.add(id(node))
    is_mapping = isinstance(node, MappingNode)
    for name, value in node.value if is_mapping else ((node, each) for each in node.value):
        key = f"{prefix}{name.value}" if is_mapping else ""
        if key:
            yield key, name.start_mark.line + 1
        yield from _lines(value, f"{key}.", seen)


class _Resolver(VersionedResolver):
    """The YAML 1.2 rules for types, but dates and `=` are text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if str(tag).endswith((":timestamp", ":value")) else tag


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml() -> Any:
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = False, 110, False
    return yaml


OVERRIDE = "override"
_MARKS_OF_YAML = ('"', "'", "|", ">", "!", "&")
"""If an override's value begins with one of these, YAML determines its type: quotes, a block, a tag or an anchor."""


def load_config(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a YAML file or in a mapping of the same form, with `overrides` applied.

    Relative paths in the configuration are relative to the working directory, not to the file.

    Args:
        source: None: all settings are defaults or overrides.
        overrides: texts `key.sub=value` whose values are YAML. An override of algorithm.preset also replaces what the
            source's own preset has set.

    Raises:
        ConfigError: the file or an override can't be read, or settings can't work.
    """
    settings: dict[str, Any] = {"model": {}, "task": {}}
    places: dict[str, str] = {}
    if isinstance(source, Mapping):
        settings.update(copy.deepcopy(dict(source)))
    elif source:
        _read_file(Path(source), settings, places)
    for override in overrides:
        _override(settings, places, override)
    _apply_preset(settings, places)
    try:
        return Config(**{str(name): value for name, value in settings.items()})
    except SettingsError as error:
        raise SettingsError(error.problems, places) from None


def text_override(key: str, value: object) -> str:
    """Return an override that sets a key to a text such as a path, quoted so that YAML reads it as that text."""
    return f"{key}={json.dumps(str(value), ensure_ascii=False)}"


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML, from which `load_config` creates an equal Config."""
    return write_yaml(dataclasses.asdict(config))


def _read_file(path: Path, settings: dict[str, Any], places: dict[str, str]) -> None:
    """Read a file: add its settings to `settings`, and `FILE:LINE` of each key to `places`."""
    try:
        content, lines = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "" if path.exists() else ". `async-rl init` writes one to begin with"
        raise ConfigError(f"config file {path} can't be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error}") from None
    except YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        from async_rl.base.config.schema import describe

        raise ConfigError(f"config file {path} must hold `section: ...` lines, got {describe(content)}")
    settings.update(content or {})
    places.update({key: f"{path}:{line}" for key, line in lines.items()})


def _override(settings: dict[str, Any], places: dict[str, str], override: str) -> None:
    """Apply an override such as `staleness.max=2` to `settings`; `task.reward=` sets a text to "".

    A text without quotes is taken literally: YAML would end it at ` #` and join its lines.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"override {override!r} must have the form key.sub=value, e.g. staleness.max=2")
    try:
        value, lines = read_yaml(text)
    except YAMLError as error:
        raise ConfigError(f"the value of override {override!r} is not valid YAML: {error}") from None
    is_plain = not text.lstrip().startswith(_MARKS_OF_YAML)
    if is_plain and isinstance(value, str):
        value = text.strip()
    elif text.strip()[:1] in ("", "#"):
        from async_rl.base.config.schema import takes_text

        value = text.strip() if takes_text(Config, key) else value
    if key == "algorithm.preset" and places.get(key) != OVERRIDE:
        _leave_preset(settings.get("algorithm"), value, places)
    node = settings
    for depth, name in enumerate(names[:-1], 1):
        if not isinstance(node.get(name), dict):
            node[name] = {}
            places[".".join(names[:depth])] = OVERRIDE
        node = node[name]
    node[names[-1]] = value
    for below in [each for each in places if each.startswith(f"{key}.")]:
        del places[below]
    places.update(dict.fromkeys([key, *(f"{key}.{below}" for below in lines)], OVERRIDE))


def _apply_preset(settings: dict[str, Any], places: dict[str, str]) -> None:
    """Set all keys of `algorithm.preset` that were not given. An unknown preset is refused later, by AlgorithmConfig.
    """
    if settings.get("algorithm") is None:
        settings["algorithm"] = {}
    section = settings["algorithm"]
    name = section.get("preset", AlgorithmConfig.preset) if isinstance(section, dict) else None
    if isinstance(name, str) and name in PRESETS:
        _fill(section, PRESETS[name], "algorithm", f"preset {name}", places)


def _leave_preset(section: Any, wanted: Any, places: dict[str, str]) -> None:
    """If another preset is wanted, remove the settings of the section `algorithm` that came from its present preset.

    A resolved configuration, such as the config.yaml of a run, gives every key, so another preset could set none of
    them. Keys that earlier overrides have set stay.
    """
    name = section.get("preset") if isinstance(section, dict) else None
    if not isinstance(name, str) or name not in PRESETS or name == wanted:
        return
    resolved: dict[str, Any] = {"algorithm": {"preset": name}}
    _apply_preset(resolved, {})
    _remove_equal(section, dataclasses.asdict(AlgorithmConfig(**resolved["algorithm"])), "algorithm", places)


def _remove_equal(section: dict[str, Any], values: Mapping[str, Any], key: str, places: dict[str, str]) -> None:
    for name, value in values.items():
        found, below = section.get(name, ...), f"{key}.{name}"
        if isinstance(found, dict) and isinstance(value, dict):
            _remove_equal(found, value, below, places)
        elif _listed(found) == _listed(value) and places.get(below) != OVERRIDE:
            section.pop(name)
            places.pop(below, None)


def _listed(value: Any) -> Any:
    """Return a tuple as a list, as YAML has it, and any other value unchanged."""
    return list(value) if isinstance(value, tuple) else value


def _fill(section: dict[str, Any], defaults: dict[str, Any], key: str, place: str, places: dict[str, str]) -> None:
    for name, default in defaults.items():
        if isinstance(default, dict):
            below = section.setdefault(name, {}) or {}
            if isinstance(below, dict):
                section[name] = below
                _fill(below, default, f"{key}.{name}", place, places)
        elif name not in section:
            section[name] = default
            places[f"{key}.{name}"] = place


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value} of the values in nested mappings. An empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        found |= leaves(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return found
