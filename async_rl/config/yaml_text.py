"""Reads and writes YAML by the rules of version 1.2: `1e-4` is a number, `010` is ten, and `off`, `12:30` and dates are
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml


def read_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """Return the values in `text`, None if it is empty, and a dict from every dotted key to its line, counted from 1.

    Raises:
        yaml.YAMLError: `text` is not valid YAML, is nested too deeply, has a tag that stands for a Python object or an
            alias, or repeats a key.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (loader.construct_document(node), dict(_lines(node))) if node else (None, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


def write_yaml(value: Any) -> str:
    """Return `value` as YAML that read_yaml reads as an equal value, with lists for tuples."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)


def _lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            continue
        if name.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {name.value!r} stands twice", name.start_mark)
        seen.add(name.value)
        yield prefix + name.value, name.start_mark.line + 1
        yield from _lines(value, f"{prefix}{name.value}.")


class _Loader(yaml.SafeLoader):
    """Reads YAML by the rules of version 1.2, but without aliases: few lines of them can stand for any amount of data.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"the alias *{event.anchor} is not allowed: write out what it stands for", event.start_mark
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes YAML with quotes around text that _Loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)

_TAG = "tag:yaml.org,2002:"
_REPLACED = ("bool", "int", "float", "timestamp")
_BOOL = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+)$")
"""Beyond version 1.2 digits may be parted, as in 100_000."""
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
    _class.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.add_constructor(_TAG + "int", _whole_number)
