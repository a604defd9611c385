"""The JSON schema that the shipped YAML files name describes the configuration as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from async_rl.cli import main

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.rglob("*.yaml"))


def errors_of(settings: Any) -> list[str]:
    """The errors that an editor would underline."""
    schema = json.loads((FOLDER / "config.schema.json").read_text())
    return [error.message for error in Draft202012Validator(schema).iter_errors(settings)]


def test_the_committed_schema_is_the_one_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert capsys.readouterr().out == (FOLDER / "config.schema.json").read_text(), (
        "run: async-rl config schema > configs/config.schema.json"
    )


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_names_the_schema_and_fits_it(file: Path) -> None:
    schema = "config.schema.json" if file.parent == FOLDER else "../config.schema.json"
    assert file.read_text().startswith(f"# yaml-language-server: $schema={schema}\n")
    assert errors_of(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"stalenes": {"max": 2}}, "stalenes"), ({"staleness": {"maximum": 2}}, "maximum"),
        ({"staleness": {"max": -1}}, -1), ({"algorithm": {"preset": "grop"}}, "grop"),
    ],
)
def test_the_schema_refuses_what_loading_refuses(change: dict[str, Any], value: object) -> None:
    settings = {"model": {"path": "x"}, "task": {"name": "reasoning_gym/y"}}
    assert errors_of(settings) == []
    assert errors_of(settings | {"algorithm": {"loss": "my_losses:mine"}}) == []
    assert repr(value) in " ".join(errors_of(settings | change))
