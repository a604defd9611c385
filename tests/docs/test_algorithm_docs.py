"""Names, defaults and presets in docs/algorithms.md are those of the code."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from async_rl.config import AlgorithmConfig, Config, KlConfig
from async_rl.config.loading import dump_config, load_config
from async_rl.config.presets import PRESETS
from async_rl.errors import ConfigError
from async_rl.seams import ADVANTAGES, CORRECTIONS, LOSSES, Loss
from tests.kit.configs import learner_config

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


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


def test_the_table_of_defaults_holds_every_key_with_its_default() -> None:
    documented = {row[0].strip("` |"): value_of(row[1].strip("` ")) for row in rows("Defaults")}
    assert documented == leaves(AlgorithmConfig(), "algorithm")


def test_the_loss_that_the_page_shows_is_one_as_it_stands_there() -> None:
    (block,) = re.findall(r"^```python\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["POLICY_GRADIENT"], Loss)
    logprobs = torch.tensor([-0.5, -2.0])
    x = types.SimpleNamespace(advantages=torch.tensor([1.0, -3.0]), logprobs=logprobs, trained=torch.ones(2) > 0)
    output = names["policy_gradient"](x)
    assert output.loss.tolist() == [0.5, -6.0]
    assert not output.clipped.any()


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


def test_the_settings_of_each_loss_are_documented_with_their_defaults() -> None:
    settings = [[cell.strip("` |") for cell in row] for row in rows("Losses") if len(row) == 4]
    documented = {(loss, key): value_of(default) for loss, key, default, _ in settings}
    aggregations = {name: (entry.aggregations or ("token_mean",))[0] for name, entry in LOSSES.items()}
    of_losses = {name: AlgorithmConfig(loss=name, aggregation=aggregations[name]).params for name in LOSSES}
    assert documented == {(name, key): value for name, params in of_losses.items() for key, value in params.items()}


def test_every_other_choice_is_described() -> None:
    for field in ("proximal", "aggregation"):
        for kind in typing.get_args(typing.get_type_hints(AlgorithmConfig)[field]):
            assert f"`{kind}`" in PAGE


def test_every_config_key_on_the_page_exists() -> None:
    sections = "algorithm|critic|learner|rollout|staleness|model|reference"
    keys = set(re.findall(rf"`((?:{sections})\.[a-z0-9_.]*[a-z0-9_])", PAGE))
    assert len(keys) > 30
    for key in keys:
        with pytest.raises(ConfigError) as caught:
            load_config(QUICKSTART, [f"{key}=[[]]"])
        assert "unknown key" not in str(caught.value)


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
    with pytest.raises(ConfigError, match=r"algorithm.preset must be one of grpo, .*, got 'grop'"):
        load_config(QUICKSTART, ["algorithm.preset=grop"])


def test_the_two_sided_clip_is_one_line() -> None:
    config = load_config(QUICKSTART, ["algorithm.correction={floor: 0.5, cap: 2.0}"])
    correction = config.algorithm.correction
    assert (correction.kind, correction.floor, correction.cap) == ("auto", 0.5, 2.0)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["staleness.max=0"], "none"),
        (["staleness.max=1"], "token_tis"),
        (["staleness.max=1", "algorithm.proximal=behaviour"], "none"),
        (["staleness.max=1", "algorithm.advantage=vtrace"], "none"),
        (["staleness.max=0", "algorithm.correction.kind=sequence_tis"], "sequence_tis"),
    ],
)
def test_the_correction_follows_from_staleness_unless_it_is_named(overrides: list[str], kind: str) -> None:
    assert load_config(QUICKSTART, overrides).correction_kind == kind


REFUSED = [
    (["algorithm.proximal=interpolate"], "algorithm.proximal must be recompute or behaviour with one optimizer step"),
    (
        ["algorithm.proximal=interpolate", "algorithm.epochs=2", "algorithm.correction.masks.m2po=0.04"],
        "algorithm.correction.masks.m2po must be 0 with algorithm.proximal interpolate",
    ),
    *(
        (
            ["algorithm.proximal=interpolate", "algorithm.epochs=2", *whitened],
            "algorithm.proximal must be recompute or behaviour with whitened advantages of a critic or of",
        )
        for whitened in (
            ["algorithm.advantage=gae", "algorithm.whiten=true"],
            ["algorithm.advantage=reinforce_pp", "algorithm.kl.kind=k1_reward"],
            ["algorithm.whiten=true", "algorithm.kl.kind=k1_reward"],
        )
    ),
    (
        ["algorithm.proximal=behaviour", "algorithm.correction.kind=token_tis"],
        "auto or none with algorithm.proximal behaviour.*count it twice",
    ),
    (["algorithm.advantage=vtrace", "algorithm.correction.kind=token_tis"], "carry the truncated ratio already"),
    (["algorithm.advantage=vtrace", "algorithm.proximal=behaviour"], "carry the ratio to the behaviour policy already"),
    (["algorithm.preset=gspo", "algorithm.advantage=gae"], "one advantage a row"),
    (["algorithm.preset=gspo", "algorithm.aggregation=token_mean"], "algorithm.aggregation must be sequence_mean"),
    (["algorithm.preset=gspo", "algorithm.kl.kind=k1_reward"], "gives each token an advantage of its own"),
    (["algorithm.gamma=0.9"], "algorithm.gamma must be 1 with algorithm.advantage grpo"),
    (["algorithm.advantage=rloo", "rollout.group_size=1"], "at least 2 with algorithm.advantage rloo"),
    (["algorithm.advantage=remax", "reward_model.path=x"], "scored in the worker, on another scale"),
    (["reference.path=x"], "Nothing would use it"),
    (["algorithm.correction.floor=3.0"], "algorithm.correction.floor must be at least 0 and below the cap"),
    (["algorithm.correction.masks.token=[2.0, 0.5]"], r"masks.token must be \[low, high\]"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("advantage", ["remax", "reinforce_pp", "gae"])
def test_one_answer_to_a_prompt_is_enough_where_no_group_is_compared(advantage: Any, tmp_path: Path) -> None:
    rollout = dataclasses.replace(learner_config(tmp_path).rollout, group_size=1)
    config: Config = learner_config(tmp_path, rollout=rollout, algorithm=AlgorithmConfig(advantage=advantage))
    assert not config.drops_zero_variance
