"""The JSON schema of the configuration, and errors in its words: what is allowed, and which name was perhaps meant."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from async_rl.config.check import Problem, SettingsError
from async_rl.errors import AsyncRLError

Schema = dict[str, Any]
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, default: Any) -> Any:
        if isinstance(default, tuple):
            return [self.encode_default(item) for item in default]
        return ".inf" if default == math.inf else super().encode_default(default)


@cache
def json_schema(kind: type) -> Schema:
    """The JSON schema of a section, or of the whole configuration. Only for reading."""
    return {"$schema": GenerateJsonSchema.schema_dialect, **TypeAdapter(kind).json_schema(schema_generator=_Generator)}


def format_schema(kind: type) -> str:
    """`json_schema` as text for a file."""
    return json.dumps(json_schema(kind), indent=2) + "\n"


def find_schema(kind: type, path: Iterable[str | int]) -> Schema:
    """The schema of one key below `kind`; empty: there is no such key, or it is inside free values."""
    root = json_schema(kind)
    node = root
    for name in path:
        if isinstance(name, int):
            node = node["prefixItems"][name] if "prefixItems" in node else node.get("items", {})
        else:
            node = node.get("properties", {}).get(name, {})
        if "$ref" in node:
            node = root["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def explain(error: ValidationError, kind: type, prefix: str = "") -> SettingsError:
    """The errors that pydantic found in a `kind` whose keys begin with `prefix`, each with key, value and remedy."""
    return SettingsError([problem for each in error.errors() for problem in _problems(each, kind, prefix)])


def unknown_key(path: Sequence[str | int], kind: type, prefix: str = "") -> Problem:
    """The problem of a name that a section does not have, with the nearest one that there is."""
    name, section = str(path[-1]), dotted(path[:-1], prefix)
    names = list(find_schema(kind, path[:-1])["properties"])
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        hint = f"did you mean {dotted(near, section)}?"
    elif near := difflib.get_close_matches(name, [key.rpartition(".")[2] for key in _leaves(kind)], n=1, cutoff=0.7):
        keys = [dotted([key], prefix) for key in _leaves(kind) if key.rpartition(".")[2] == near[0]]
        hint = f"did you mean {' or '.join(keys)}?"
    else:
        hint = f"allowed {'in ' + section if section else 'at the top'}: {', '.join(names)}"
    key = dotted([name], section)
    return Problem(key, f"unknown key {key}", f"; {hint}")


def dotted(path: Iterable[str | int], prefix: str = "") -> str:
    """`["learner", "betas", 1]` as learner.betas[1]."""
    for name in path:
        prefix += f"[{name}]" if isinstance(name, int) else f".{name}" if prefix else name
    return prefix


def describe(value: Any) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def _problems(error: ErrorDetails, kind: type, prefix: str) -> Sequence[Problem]:
    cause = error.get("ctx", {}).get("error")
    path = error["loc"]
    if path[-1:] == ("[key]",):  # a name that is no text, in free values
        path = path[:-2]
    elif error["type"] == "missing" and isinstance(path[-1], int):  # a list that is too short
        path = path[:-1]
    key, value = dotted(path, prefix), error["input"]
    if isinstance(cause, SettingsError):
        return cause.problems
    if error["type"] == "unexpected_keyword_argument":
        return [unknown_key(path, kind, prefix)]
    if error["type"] == "missing" and path == error["loc"]:
        remedy = f"Add it to the config file or as {key}=... on the command line"
        return [Problem(key, f"{key} is required and was not given. {remedy}")]
    if isinstance(cause, ValueError):
        is_whole = isinstance(cause, AsyncRLError)
        return [Problem(key, str(cause) if is_whole else f"{key} must be {cause}, got {value!r}")]
    schema = find_schema(kind, path)
    if error["type"] == "finite_number":
        may = ", ".join(dotted([name], prefix) for name, leaf in _leaves(kind).items() if "mayBeInfinite" in str(leaf))
        hint = f". Only {may} may be .inf: give a number." if may else ". Give a number."
        return [Problem(key, f"{key} must be finite, got {value!r}", hint)]
    if error["type"] in _OUT_OF_RANGE:
        meaning = " ".join(schema.get("description", "").split())
        return [Problem(key, f"{key} must be {_range(schema)}, got {value!r}", f". {meaning}")]
    names = _names(schema)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    text = f"{key} must be {_kind(schema)}, got {repr(value) if names and isinstance(value, str) else describe(value)}"
    return [Problem(key, text, f". Did you mean {near[0]}?" if near else "")]


def _leaves(kind: type, path: tuple[str, ...] = ()) -> dict[str, Schema]:
    """Every key that holds a value rather than a section, with its schema."""
    node = find_schema(kind, path)
    if "properties" not in node:
        return {".".join(path): node}
    return {key: leaf for name in node["properties"] for key, leaf in _leaves(kind, (*path, name)).items()}


def _names(schema: Schema) -> list[str]:
    return schema.get("enum") or [name for part in schema.get("anyOf", ()) for name in part.get("enum", ())]


def _kind(schema: Schema) -> str:
    """What kind of value is allowed."""
    if names := _names(schema):
        return f"one of {', '.join(names)}" + (", or module:name" if "anyOf" in schema else "")
    if "properties" in schema:
        return f"a section with some of {', '.join(schema['properties'])}"
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])} values, e.g. [0.9, 0.95]"
    return {
        "boolean": "true or false", "integer": "a whole number", "number": "a number", "array": "a list, e.g. [a, b]",
        "object": "a section of names and values", "string": "text (in quotes if it looks like a number)",
    }[schema["type"]]


def _range(schema: Schema) -> str:
    """Which numbers are allowed."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer":
        low, above = (low if above is None else above + 1), None
        high, below = (high if below is None else below - 1), None
    if high is None and below is None:
        return f"above {above}" if low is None else "0 or more" if low == 0 else f"at least {low}"
    start = f"({above}" if low is None else f"[{low}"
    return f"in {start}, {below})" if high is None else f"in {start}, {high}]"
