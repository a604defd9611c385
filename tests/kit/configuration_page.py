"""The page docs/reference/configuration.md, made from the JSON schema: python -m tests.kit.configuration_page"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.schema import json_schema

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration

Every key with its type, its default and its meaning. A YAML file holds sections; on the command line a key is set as
`section.key=value`, and `section.key=` clears a text. The value is YAML, but a text without quotes is taken as it
stands, with ` #` and line breaks in it. A leading `~` in a path is the home directory; other relative paths start at
the folder in which the command runs, not at that of the file. This page is made from the classes in
`async_rl/base/config`: `python -m tests.kit.configuration_page`.
"""


def page() -> str:
    """The text of the page."""
    schema = json_schema(Config)
    lines = [HEAD]
    for name, section in schema["properties"].items():
        lines += _section(name, section, schema["$defs"])
    return "\n".join(lines)


def _section(name: str, section: dict[str, Any], classes: dict[str, Any]) -> list[str]:
    """A heading and a table for the section, then the same for the sections within it."""
    content = _resolved(section, classes)
    rows, inner = [], []
    for key, value in content["properties"].items():
        resolved = _resolved(value, classes)
        if "properties" in resolved:
            inner += _section(f"{name}.{key}", value, classes)
            continue
        if "$ref" in resolved.get("items", {}):  # a list of sections
            inner += _section(f"{name}.{key}[]", resolved["items"], classes)
        default = "required" if key in content.get("required", ()) else f"`{_plain(resolved.get('default'))}`"
        about = _description(resolved).replace("|", "\\|")
        rows.append(f"| `{key}` | {_kind(resolved)} | {default} | {about} |")
    table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""] if rows else []
    about = [_description(content), ""] if content.get("description") else []
    return [f"## {name}", "", *about, *table, *inner]


def _resolved(value: dict[str, Any], classes: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in value:
        return value
    found: dict[str, Any] = classes[value["$ref"].rpartition("/")[2]]
    return found | {key: item for key, item in value.items() if key != "$ref"}


def _description(value: dict[str, Any]) -> str:
    return " ".join(value.get("description", "").split())


def _kind(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{_plain(choice)}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in value["anyOf"]))
    words = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    words |= {"array": "list", "object": "names and values"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]}" for key, sign in signs.items() if key in value]
    return ", ".join([words.get(value.get("type", ""), "any value"), *limits])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else "empty" if value is None else str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
