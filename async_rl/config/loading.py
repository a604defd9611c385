"""YAML files and `key.sub=value` overrides to the frozen dataclasses of config.py, and back.

Generic over nested dataclasses with fields of str, int, float, bool, Literal, tuple, dict and Any. Every
error names the full dotted key, what was got and from where, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from async_rl.config import AlgorithmConfig, Config
from async_rl.config.presets import PRESETS
from async_rl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """A value as the user wrote it, with where."""

    value: Any
    source: str


_Tree = dict[str, "_Tree | _Given"]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file, if one is given, with `key.sub=value` overrides on top, parsed as YAML.

    Paths in it stay as written: relative to the working directory, not to the file. Raises ConfigError.
    """
    tree = _read_file(Path(path)) if path else {}
    for override in overrides:
        _override(tree, override)
    _apply_preset(tree)
    config: Config = _build(Config, tree, "")
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` of it gives an equal Config."""
    plain = _plain(dataclasses.asdict(config))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=110)


def _read_file(path: Path) -> _Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error}") from None
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold `section: ...` lines, got {_describe(content)}")
    return _tag(Config, content, str(path))


def _override(tree: _Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    source = "command line"
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r} must have the form key.sub=value, e.g. staleness.max=2")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of override {override!r} is not valid YAML: {error}") from None
    *sections, last = key.split(".")
    node: _Tree = tree
    kind: type = Config
    for depth, name in enumerate(sections):
        field_type = _field_type(kind, name, ".".join(sections[:depth]), source)
        if typing.get_origin(field_type) is dict:
            _override_in_dict(node, name, [*sections[depth + 1 :], last], value)
            return
        if not dataclasses.is_dataclass(field_type):
            single = ".".join(sections[: depth + 1])
            raise ConfigError(f"override {override!r}: {single} is a single value, not a section")
        below = node.setdefault(name, {})
        if isinstance(below, _Given):  # a section given as something else: replaced, like any other value
            below = node[name] = {}
        node, kind = below, typing.cast(type, field_type)
    field_type = _field_type(kind, last, ".".join(sections), source)
    node[last] = _tag(field_type, value, source)


def _apply_preset(tree: _Tree) -> None:
    """The keys of `algorithm.preset` that were not given; an unknown name is left to the section's own check."""
    section = tree.setdefault("algorithm", {})
    given = section.get("preset") if isinstance(section, dict) else None
    name = given.value if isinstance(given, _Given) else AlgorithmConfig.preset
    if isinstance(section, dict) and isinstance(name, str) and name in PRESETS:
        _fill(section, _tag(AlgorithmConfig, PRESETS[name], f"preset {name}"))


def _fill(tree: _Tree, defaults: _Tree) -> None:
    for key, default in defaults.items():
        present = tree.setdefault(key, default)
        if isinstance(present, dict) and isinstance(default, dict):
            _fill(present, default)


def _override_in_dict(node: _Tree, name: str, keys: list[str], value: Any) -> None:
    """`task.params.min_word_len=5` sets one entry of a free-form dict and keeps the others."""
    given = node.get(name)
    entries = dict(given.value) if isinstance(given, _Given) and isinstance(given.value, dict) else {}
    place = entries
    for key in keys[:-1]:
        deeper = place.get(key)
        place[key] = dict(deeper) if isinstance(deeper, dict) else {}
        place = place[key]
    place[keys[-1]] = value
    node[name] = _Given(entries, "command line")


def _tag(kind: Any, value: Any, source: str) -> Any:
    """The user's nested dicts, every leaf marked by its source. A dict that fills no dataclass is a leaf."""
    if not (dataclasses.is_dataclass(kind) and isinstance(value, dict)):
        return _Given(value, source)
    types = typing.get_type_hints(kind)
    return {str(key): _tag(types.get(str(key)), item, source) for key, item in value.items()}


def _build(kind: type, tree: _Tree, key: str) -> Any:
    """An instance of the dataclass `kind`, whose own checks may raise ConfigError too."""
    types = typing.get_type_hints(kind)
    arguments = {}
    for name, node in tree.items():
        full = f"{key}.{name}" if key else name
        source = node.source if isinstance(node, _Given) else ""
        field_type = _field_type(kind, name, key, source)
        if not dataclasses.is_dataclass(field_type):
            assert isinstance(node, _Given)
            arguments[name] = _convert(types[name], node.value, full, node.source)
        elif isinstance(node, dict):
            arguments[name] = _build(typing.cast(type, field_type), node, full)
        elif node.value is not None:  # an empty section (`run:`) keeps its defaults
            names = ", ".join(typing.get_type_hints(field_type))
            raise ConfigError(
                f"{full} must be a section with some of {names}, got {_describe(node.value)} ({node.source})"
            )
    _check_required(kind, arguments, key)
    return kind(**arguments)


def _check_required(kind: type, arguments: dict[str, Any], key: str) -> None:
    """A required section that was left out is built from nothing: its own error names what it needs."""
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in arguments or not missing:
            continue
        full = f"{key}.{field.name}" if key else field.name
        if dataclasses.is_dataclass(types[field.name]):
            arguments[field.name] = _build(typing.cast(type, types[field.name]), {}, full)
        else:
            raise ConfigError(
                f"{full} is required and was not given. "
                f"Add it to the config file or as {full}=... on the command line"
            )


def _field_type(kind: type, name: str, key: str, source: str) -> Any:
    """The type of a field of `kind`; a name it lacks raises ConfigError with the nearest one that exists."""
    types = typing.get_type_hints(kind)
    if name in types:
        return types[name]
    full = f"{key}.{name}" if key else name
    leaves = _leaves(Config)
    if near := difflib.get_close_matches(name, types, n=1, cutoff=0.7):
        hint = f"did you mean {key}.{near[0]}?" if key else f"did you mean {near[0]}?"
    elif near := difflib.get_close_matches(name, leaves, n=1, cutoff=0.7):
        hint = f"did you mean {' or '.join(leaves[near[0]])}?"
    else:
        hint = f"allowed {'in ' + key if key else 'at the top'}: {', '.join(types)}"
    raise ConfigError(f"unknown key {full} ({source}); {hint}")


def _leaves(kind: type, key: str = "") -> dict[str, list[str]]:
    """Field names anywhere in the tree, each with its full keys."""
    found: dict[str, list[str]] = {}
    for name, field_type in typing.get_type_hints(kind).items():
        full = f"{key}.{name}" if key else name
        if not dataclasses.is_dataclass(field_type):
            found.setdefault(name, []).append(full)
            continue
        for leaf, keys in _leaves(typing.cast(type, field_type), full).items():
            found.setdefault(leaf, []).extend(keys)
    return found


def _convert(kind: Any, value: Any, key: str, source: str) -> Any:
    """`value` as the type of the field, or ConfigError. Nothing is guessed: only an int passes as a float."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis and isinstance(value, (list, tuple)):
        return tuple(_convert(arguments[0], item, f"{key}[{i}]", source) for i, item in enumerate(value))
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(
            _convert(item_kind, item, f"{key}[{i}]", source)
            for i, (item_kind, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is dict and value is None:
        return {}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = (
        kind is Any
        or (origin is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value))
        or (origin is Literal and value in arguments)
        or (kind is bool and isinstance(value, bool))
        or (kind is int and isinstance(value, int) and not isinstance(value, bool))
        or (kind is float and is_number)
        or (kind is str and isinstance(value, str))
    )
    if not fits:
        raise ConfigError(f"{key} must be {_allowed(kind)}, got {_describe(value)} ({source})")
    return float(value) if kind is float else value


def _allowed(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return "a list, e.g. [a, b]"
    if origin is tuple:
        return f"a list of {len(arguments)} values, e.g. [0.9, 0.95]"
    if origin is dict:
        return "a section of names and values"
    text = "text (in quotes if it looks like a number)"
    return {bool: "true or false", int: "a whole number", float: "a number", str: text}[kind]


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{value!r} ({type(value).__name__})"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`1e-4` is a number, `off` is text), and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                problem = f"key {key_node.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would not read as text."""


_TAG = "tag:yaml.org,2002:"
_REPLACED = ("bool", "float", "timestamp")
_BOOL = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.\d+|\d+\.\d*)(?:[eE][-+]?\d+)?$"
    r"|^[-+]?\d+[eE][-+]?\d+$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [resolver for resolver in resolvers if resolver[0].removeprefix(_TAG) not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(_TAG + "bool", _BOOL, list("tTfF"))
    _class.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))
