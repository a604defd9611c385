"""Reads and writes YAML 1.2: `1e-4` is a number, `010` is ten, and `no`, `on`, `12:30` and dates are text."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver


def read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Return the values in `text` (None if it is empty), and {dotted key: its line, counted from 1}.

    Raises:
        YAMLError: `text` is not valid YAML, repeats a key, or has an alias or the tag of a Python object.
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
    """Return `value` as YAML that read_yaml reads as an equal value, with lists for tuples."""
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
    """The rules of version 1.2, with dates and `=` as text."""

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
