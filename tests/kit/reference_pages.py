"""The pages of docs/reference that are made from the code: python -m tests.kit.reference_pages writes them."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import async_rl
from async_rl.base.config import Config
from async_rl.base.config.schema import json_schema
from async_rl.cli import main

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
CONFIGURATION = """# Configuration

A YAML file holds sections. On the command line a key is `section.key=value`, and `section.key=` clears a text. The
value is YAML, but a text without quotes is taken literally. A leading `~` in a path is the home directory. Other
relative paths start at the folder where the command runs.

This page is made from the classes in `async_rl/base/config`.
"""
ESSENTIAL = (
    "model.path", "task.path", "task.eval_path", "task.reward", "task.max_prompt_tokens", "run.name", "run.steps",
    "staleness.max", "staleness.depth", "rollout.engine", "rollout.group_size", "rollout.max_response_tokens",
    "rollout.temperature", "rollout.gpu_memory_utilization", "algorithm.preset", "learner.prompts_per_step",
    "learner.lr", "learner.max_tokens_per_microbatch", "model.lora.rank", "placement.learner.gpus_per_node",
    "placement.rollout.servers", "placement.colocated", "eval.every_steps", "checkpoint.every_steps", "watch.action",
)  # fmt: skip
COMMAND_LINE = """# Command line

`async-rl COMMAND --help` prints the same texts. Exit codes: 0 for success, 2 for a mistake in command, configuration
or files, 130 after Ctrl-C or SIGTERM, 1 for any other failure.
"""
PYTHON = """# Python API

These names are all of `import async_rl`. [From Python](../how-to/python.md) has programs that use them.
"""


def configuration() -> str:
    """The essential keys, then every key of every section."""
    schema = json_schema(Config)
    sections: list[str] = []
    for name, section in schema["properties"].items():
        sections += _section(name, section, schema["$defs"])
    rows = dict(_rows(sections))
    table = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key in ESSENTIAL:
        _, default, about = rows[key]
        anchor = key.rpartition(".")[0].replace(".", "")
        table.append(f"| [`{key}`](#{anchor}) | {default} | {_first_sentence(about)} |")
    return "\n".join([CONFIGURATION, "## The 25 essential keys", "", *table, "", *sections])


def _rows(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return (key, [type, default, meaning]) for each row of the tables."""
    found, name = [], ""
    for line in lines:
        if line.startswith("## "):
            name = line.removeprefix("## ")
        elif line.startswith("| `"):
            key, *cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.append((f"{name}.{key.strip('`')}", cells))
    return found


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:;]) ", text)[0].rstrip(".:;")


def _section(name: str, section: dict[str, Any], classes: dict[str, Any]) -> list[str]:
    """Return a heading and a table for the section, then the same for the sections within it."""
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
    words = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text", "array": "list"}
    words |= {"object": "mapping"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {value[key]}" for key, sign in signs.items() if key in value]
    return ", ".join([words.get(value.get("type", ""), "any value"), *limits])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else "empty" if value is None else str(value)


def command_line() -> str:
    """The --help of every command."""
    names = re.findall(r"^  ([a-z][a-z-]*) {2,}", _help(), re.MULTILINE)
    sections = [f"## {name}\n\n```text\n{_help(name)}```\n" for name in names]
    return "\n".join([COMMAND_LINE, *sections])


def _help(*command: str) -> str:
    text = StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "80"}), redirect_stdout(text), suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue()


def python_api() -> str:
    """Signature and docstring of every public name."""
    sections: list[str] = []
    for name in sorted(async_rl.__all__, key=str.lower):
        item = getattr(async_rl, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            sections += _described(name, item)
        if item is async_rl.TrainingRun:
            for key, value in vars(item).items():
                if inspect.isfunction(value) and not key.startswith("_"):
                    sections += _described(f"{name}.{key}", value)
    return "\n".join([PYTHON, *sections])


def _described(name: str, item: Any) -> list[str]:
    """Return a heading, the signature of a function, and the docstring."""
    level = "###" if "." in name else "##"
    lines = [f"{level} {name}", ""]
    if inspect.isfunction(item):
        signature = re.sub(r"(?<=: |> )'([^']*)'", r"\1", f"{name}{inspect.signature(item)}")
        lines += ["```python", signature, "```", ""]
    return [*lines, _markdown(inspect.getdoc(item) or "")]


def _markdown(docstring: str) -> str:
    """Turn a docstring of Google's style into Markdown: its sections become lists, its examples code."""
    lines = []
    for paragraph in docstring.split("\n\n"):
        if heading := re.match(r"(Args|Raises|Returns):\n", paragraph):
            entries = re.findall(r"^    (\S[^:\n]*): ((?:.+\n?)(?:      .+\n?)*)", paragraph, re.MULTILINE)
            items = [f"- `{names}`: {' '.join(about.split())}" for names, about in entries]
            lines += [f"**{heading[1]}**", "", *items, ""]
        elif paragraph.startswith("    "):
            lines += ["```python", textwrap.dedent(paragraph).rstrip(), "```", ""]
        else:
            lines += [paragraph, ""]
    return "\n".join(lines).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration, "command-line.md": command_line, "python-api.md": python_api,
}  # fmt: skip

if __name__ == "__main__":
    for file, page in PAGES.items():
        (FOLDER / file).write_text(page())
