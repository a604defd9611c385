"""Names, defaults and presets in docs/reference/algorithms.md are those of the code."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.base.config import AlgorithmConfig, KlConfig
from async_rl.base.config.algorithm import PRESETS
from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.errors import ConfigError
from async_rl.base.seams import ADVANTAGES, CORRECTIONS, LOSSES

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PAGE = (ROOT / "docs" / "reference" / "algorithms.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading, without their head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\|.*\|\n\| ---.*\n((?:\|.*\n)+)", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def value_of(text: str) -> Any:
    value = yaml.safe_load(text)
    return tuple(value) if isinstance(value, list) else value


def leaves(value: Any, key: str) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {key: value}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        found |= leaves(getattr(value, field.name), f"{key}.{field.name}")
    return found


def test_the_table_of_presets_holds_every_preset_with_what_it_sets() -> None:
    documented = {}
    for row in rows("Presets"):
        pairs = re.findall(r"`([a-z0-9_.]+): ([^`]+)`", row[1])
        documented[row[0].strip("` |")] = {f"algorithm.{key}": value_of(value) for key, value in pairs}
    assert documented == {name: flat(sets) for name, sets in PRESETS.items()}


def flat(sets: dict[str, Any], key: str = "algorithm") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sets.items():
        inner = flat(value, f"{key}.{name}") if isinstance(value, dict) else {f"{key}.{name}": value}
        found |= {k: tuple(v) if isinstance(v, list) else v for k, v in inner.items()}
    return found


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Advantages", ADVANTAGES),
        ("Losses", LOSSES),
        ("Corrections", CORRECTIONS),
        ("KL to a reference", typing.get_args(typing.get_type_hints(KlConfig)["kind"])),
    ],
)
def test_every_kind_has_a_row_and_no_other(heading: str, kinds: Collection[str]) -> None:
    masks = {f.name for f in dataclasses.fields(AlgorithmConfig().correction.masks)}
    documented = {row[0].strip("` |") for row in rows(heading)}
    assert documented == {*kinds, *(masks if heading == "Corrections" else ())}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_its_keys_and_an_explicit_key_wins(
    preset: str, tmp_path: Path
) -> None:
    config = load_config(QUICKSTART, [f"algorithm.preset={preset}"])
    own = {key: value for key, value in PRESETS[preset].items() if key != "params"}
    expected = leaves(AlgorithmConfig(), "algorithm") | flat(own) | {"algorithm.preset": preset}
    defaults = AlgorithmConfig(loss=config.algorithm.loss, aggregation=config.algorithm.aggregation).params
    expected |= {"algorithm.params": {**defaults, **PRESETS[preset].get("params", {})}}
    expected |= {"algorithm.filter_zero_variance": False}  # the file's own key wins over a preset
    assert leaves(config.algorithm, "algorithm") == expected
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    own_keys = ["algorithm.loss=cispo", "algorithm.clip.high=0.123"]
    won = load_config(QUICKSTART, [f"algorithm.preset={preset}", *own_keys])
    assert (won.algorithm.loss, won.algorithm.clip.high) == ("cispo", 0.123)
    assert won.algorithm.advantage == config.algorithm.advantage


def test_a_preset_on_the_command_line_wins_and_an_unknown_one_is_refused() -> None:
    config = load_config(QUICKSTART, ["algorithm.preset=gspo", "algorithm.preset=rloo"])
    assert config.algorithm.advantage == "rloo" and config.algorithm.loss == "ppo_clip"
    with pytest.raises(ConfigError, match=r"^algorithm\.preset"):
        load_config(QUICKSTART, ["algorithm.preset=grop"])


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["staleness.max=0"], "none"),
        (["staleness.max=1"], "token_tis"),
        (["staleness.max=1", "algorithm.old_logprobs=rollout"], "none"),
        (["staleness.max=1", "algorithm.advantage=vtrace"], "none"),
        (["staleness.max=0", "algorithm.correction.kind=sequence_tis"], "sequence_tis"),
    ],
)
def test_the_correction_follows_from_staleness_unless_it_is_named(overrides: list[str], kind: str) -> None:
    assert load_config(QUICKSTART, overrides).correction_kind == kind
