"""A config file with overrides becomes a Config, or one error: which key, what is allowed, from where."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.config import Config
from async_rl.base.config.check import SettingsError
from async_rl.base.config.loading import dump_config, load_config, read_yaml, write_yaml
from async_rl.base.config.schema import OTHER_NAMES, leaf_schemas
from async_rl.base.errors import ConfigError

MINIMAL = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def error_of(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_a_minimal_file_takes_every_default(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.model.path == "models/x"
    assert dataclasses.replace(config, model=config.model) == config
    assert config.run_dir == Path("runs/run")  # relative to the working directory, not to the file


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    config = load(
        tmp_path, MINIMAL + "staleness: {max: 1}\n", "staleness.max=2", "staleness.max=3", "learner.lr=1e-4"
    )
    assert config.staleness.max == 3
    assert config.learner.lr == 1e-4


def test_an_override_of_one_task_parameter_keeps_the_others(tmp_path: Path) -> None:
    text = "model: {path: x}\ntask: {name: reasoning_gym/y, params: {min: 1, deep: {a: 1, b: 2}}}\n"
    config = load(tmp_path, text, "task.params.max=[1, two]", "task.params.deep.b=3")
    assert config.task.params == {"min": 1, "max": [1, "two"], "deep": {"a": 1, "b": 3}}


def test_a_key_without_a_value_clears_a_text_and_an_empty_section_keeps_its_defaults(tmp_path: Path) -> None:
    text = "model: {path: x}\ntask: {path: x.jsonl, reward: gsm8k}\n"
    config = load(tmp_path, text, "task.path=", "task.reward=", "task.name=reasoning_gym/y", "run=")
    assert load(tmp_path, MINIMAL + "run:\n").run == config.run
    assert (config.task.path, config.task.reward, config.run.name) == ("", "", "run")


PATHS = [key for key in leaf_schemas(Config) if key.endswith((".path", "_path", ".dir", ".base", ".keys", ".resume"))]


@pytest.mark.parametrize("key", PATHS)
def test_a_leading_tilde_in_a_path_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    section, _, name = key.partition(".")
    needed = {
        "task.path": ["task.name="], "task.pretrain_path": ["algorithm.ptx_coef=1.0"],
        "judge.path": ["placement.judge.servers=1"], "critic.path": ["algorithm.advantage=gae"],
    }
    fitting = ["algorithm.kl.kind=k2_loss", *needed.get(key, [])]
    config = load(tmp_path, MINIMAL, *fitting, f"{key}=~/x")
    assert getattr(getattr(config, section), name) == "/home/somebody/x"
    assert f"{name}: /home/somebody/x\n" in dump_config(config)


def test_a_section_given_on_the_command_line_is_taken_as_a_whole(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "rollout: {group_size: 3}\n", "rollout={engine: hf}")
    assert (config.rollout.engine, config.rollout.group_size) == ("hf", 8)


def test_a_number_of_servers_or_its_range_is_read_and_written(tmp_path: Path) -> None:
    for servers in ({"min": 1, "max": 3}, 3):
        config = load(tmp_path, MINIMAL + f"placement: {{rollout: {{servers: {json.dumps(servers)}}}}}\n")
        assert config.placement.rollout.servers == servers and load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("stalenes.max=2", "staleness"), ("algorithm.clip.hgh=1", "algorithm.clip.high"),
        ("learner.group_size=4", "rollout.group_size"), ("lr=1e-3", "learner.lr"), ("rollout.zzz=1", "group_size"),
        ("num_generations=8", "rollout.group_size"), ("clip={dual: 3.0}", "algorithm.clip.dual"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(tmp_path: Path, override: str, nearest: str) -> None:
    message = error_of(tmp_path, MINIMAL, override)
    assert re.search(rf"\b{nearest}\b", message.partition(";")[2]), message


def test_names_of_other_frameworks_lead_to_keys_that_there_are() -> None:
    keys = {*leaf_schemas(Config)}
    sections = "|".join({key.partition(".")[0] for key in keys})
    for name, said in OTHER_NAMES.items():
        told = {*re.findall(rf"(?<![\w.])(?:{sections})\.\w[\w.]*\w", said)}
        assert told <= keys and name not in keys, said


@pytest.mark.parametrize(
    ("override", "got"),
    [
        ("staleness.max.x=2", "{'x': 2} (dict)"), ("staleness=2", "2 (int)"), ("staleness.max=two", "'two' (str)"),
        ("staleness.max=true", "True (bool)"), ("staleness.max=-1", "-1"), ("run.steps=1.5", "1.5 (float)"),
        ("run.steps=", "nothing"), ("run.name=7", "7 (int)"), ("run.name=..", "'..'"), ("run.seed=-1", "-1"),
        ("learner.betas=[0.9]", "[0.9] (list)"), ("critic.lr=.inf", "inf"), ("task.params={1: 2}", "1 (int)"),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_the_place(tmp_path: Path, override: str, got: str) -> None:
    key = override.partition("=")[0].removesuffix(".x")
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, MINIMAL, override)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert f", got {got} (override)" in str(caught.value)


@pytest.mark.parametrize("override", ["staleness.max", "=3", "run.name=["])
def test_what_is_no_override_is_refused_with_its_text(tmp_path: Path, override: str) -> None:
    assert repr(override) in error_of(tmp_path, MINIMAL, override)


@pytest.mark.parametrize("key", ["algorithm.clip.high", "algorithm.correction.masks.token", "learner.grad_clip"])
def test_a_limit_may_be_infinite_but_not_nan(tmp_path: Path, key: str) -> None:
    bound = "[0.5, {}]" if ".masks." in key else "{}"
    assert "inf" in dump_config(load(tmp_path, MINIMAL, f"{key}={bound.format('.inf')}"))
    assert f"{key} " in error_of(tmp_path, MINIMAL, f"{key}={bound.format('.nan')}")


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path, "task: {name: reasoning_gym/x}").startswith("model.path ")
    assert error_of(tmp_path, "").startswith("model.path ")
    assert "task.name" in error_of(tmp_path, "model: {path: x}")


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n", "a: [", "run: {steps: 1}\nrun: {steps: 2}\n", "a: !!python/object:os.system x",
        "critic: &rate {lr: 1e-3}\nsft: *rate\n", "a: &a {b: *a}\n",
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    assert str(tmp_path / "config.yaml") in error_of(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load_config(tmp_path)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_loads_and_survives_a_dump(tmp_path: Path, file: Path) -> None:
    config = load_config(file)
    assert load(tmp_path, dump_config(config)) == config


TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("\nä日"), max_size=12)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.lists(TEXT))


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_what_is_written_is_read_back_equal(values: dict[str, Any]) -> None:
    assert read_yaml(write_yaml({"a": values}))[0] == {"a": values}


def test_what_is_dumped_is_read_back_equal_and_other_readers_read_it(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "run.name='a: #1'", "learner.lr=1e-300", "algorithm.correction.cap=.inf")
    assert load(tmp_path, dump_config(config)) == config
    assert yaml.safe_load(dump_config(config))["placement"]["learner"]["ranks"] == 1


@pytest.mark.parametrize(
    ("text", "place", "key"),
    [
        ("run:\n  seed: 3\n  steps: 0\n", "config.yaml:5", "run.steps"),
        ("algorithm:\n  gamma: 0.9\n", "config.yaml:4", "algorithm.gamma"),
        ("weight_sync:\n\n  bucket_bytes: 9\n", "config.yaml:5", "weight_sync.bucket_bytes"),
        ("learner:\n  betas:\n    - 0.9\n    - 2\n", "config.yaml:4", "learner.betas[1]"),
    ],
)
def test_an_error_names_the_line_of_the_file(tmp_path: Path, text: str, place: str, key: str) -> None:
    message = error_of(tmp_path, MINIMAL + text)
    assert message.startswith(f"{key} ") and f" ({tmp_path}/{place})" in message, message


def test_all_errors_of_a_configuration_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, MINIMAL, "run.steps=0", "learner.lr=-1", "eval.sizes=3")
    assert [problem.key for problem in caught.value.problems] == ["run.steps", "learner.lr", "eval.sizes"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.aggregation=tokenmean", "token_mean"), ("algorithm.advantage=gro", "grpo"),
        ("weight_sync.transport=dsk", "disk"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, override: str, named: str) -> None:
    message = error_of(tmp_path, MINIMAL, override)
    assert message.startswith(override.partition("=")[0]) and f" {named}?" in message


@pytest.mark.parametrize("override", ["algorithm.loss=no_such_module:loss", "rollout.engine=async_rl.base.types:Slot"])
def test_a_part_from_outside_that_is_not_there_or_no_entry_is_refused_at_its_key(
    tmp_path: Path, override: str
) -> None:
    assert override.partition("=")[0] in error_of(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("007", 7), ("-08", -8), ("+5", 5), ("100_000", 100_000), ("0", 0), ("0x1F", 31), ("0o17", 15),
    ("12:30", "12:30"), ("1_a", "1_a"), ("2026-01-31", "2026-01-31"), ("no", "no"), ("off", "off"), ("e5", "e5"),
])
def test_values_are_read_as_in_yaml_1_2(text: str, value: object) -> None:
    found = read_yaml(f"a: {text}")[0]["a"]
    assert found == value and type(found) is type(value)
    for each in (value, text):
        assert read_yaml(write_yaml({"a": each}))[0] == {"a": each}


@pytest.mark.parametrize(("override", "prompt"), [
    ("End with #### number", "End with #### number"), ("#### first", "#### first"), ("one\n\n  two ", "one\n\n  two"),
    ('"one # two"  # said in quotes', "one # two"), ("|\n  one\n  two # three\n", "one\ntwo # three\n"),
    ("!!str 5", "5"),
])
def test_a_text_without_quotes_on_the_command_line_is_taken_as_it_stands(
    tmp_path: Path, override: str, prompt: str
) -> None:
    assert load(tmp_path, MINIMAL, f"task.system_prompt={override}").task.system_prompt == prompt
    assert load(tmp_path, MINIMAL, "learner.lr=1e-4 # higher").learner.lr == 1e-4  # no text


def test_another_preset_replaces_the_old_one_in_a_resolved_configuration(tmp_path: Path) -> None:
    for old in ("grpo", "ppo", "cispo", "icepop"):
        resolved = read_yaml(dump_config(load(tmp_path, MINIMAL, f"algorithm.preset={old}")))[0]
        for new in ("dr_grpo", "ppo", "gspo", "m2po"):
            wanted = load(tmp_path, MINIMAL, f"algorithm.preset={new}")
            assert load_config(resolved, [f"algorithm.preset={new}"]) == wanted, (old, new)


def test_what_was_changed_in_a_resolved_configuration_outlasts_another_preset(tmp_path: Path) -> None:
    resolved = dump_config(load(tmp_path, MINIMAL, "algorithm.clip.low=0.1", "algorithm.epochs=2"))
    given = "algorithm.old_logprobs=recompute", "algorithm.preset=ppo", "algorithm.clip.high=0.28"
    found = load(tmp_path, resolved, *given).algorithm
    assert (found.preset, found.advantage, found.clip.dual) == ("ppo", "gae", 0.0)
    assert (found.clip.low, found.clip.high, found.epochs, found.old_logprobs) == (0.1, 0.28, 2, "recompute")
