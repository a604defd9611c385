"""A config file with overrides becomes a Config, or one error: which key, what is allowed, from where."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import Config, CorrectionConfig
from async_rl.config.keys_elsewhere import KEYS_ELSEWHERE, OF_SECTION
from async_rl.config.loading import dump_config, load_config
from async_rl.config.presets import PRESETS
from async_rl.config.schema import RENAMED, _leaves
from async_rl.config.yaml_text import read_yaml, write_yaml
from async_rl.errors import ConfigError

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
    assert (config.task.path, config.task.reward, config.run.name) == ("", "", "run")


PATHS = [key for key in _leaves(Config) if key.endswith((".path", "_path", ".dir", ".base", ".keys", ".resume"))]


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


def test_a_list_of_any_length_is_read_and_written(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "model.lora.target_modules=[q_proj, k_proj, v_proj]")
    assert config.model.lora.target_modules == ("q_proj", "k_proj", "v_proj")
    assert "target_modules:\n    - q_proj\n" in dump_config(config)


def test_an_empty_section_keeps_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "run:\n").run.steps == 100


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stalenes.max=2", ["unknown key stalenes ", "command line", "did you mean staleness?"]),
        ("algorithm.clip.hgh=1", ["unknown key algorithm.clip.hgh ", "did you mean algorithm.clip.high?"]),
        ("learner.group_size=4", ["unknown key learner.group_size ", "did you mean rollout.group_size?"]),
        ("lr=1e-3", ["unknown key lr ", "critic.lr or learner.lr or sft.lr or reward_training.lr?"]),
        ("rollout.zzz=1", ["unknown key rollout.zzz ", "allowed in rollout: engine, python, group_size"]),
        ("staleness.max.x=2", ["staleness.max must be a whole number, got {'x': 2} (dict) (command line)"]),
        ("staleness=2", ["staleness must be a section with some of max", "got 2 (int)"]),
        ("staleness.max=two", ["staleness.max must be a whole number, got 'two' (str) (command line)"]),
        ("staleness.max=true", ["staleness.max must be a whole number, got True (bool)"]),
        ("run.steps=1.5", ["run.steps must be a whole number, got 1.5 (float)"]),
        ("rollout.engine=trt", ["rollout.engine must be one of sglang, vllm, hf, or module:name, got 'trt' (comm"]),
        ("learner.betas=[0.9]", ["learner.betas must be a list of 2 values"]),
        ("learner.betas=[0.9, x]", ["learner.betas[1] must be a number, got 'x'"]),
        ("model.lora.target_modules=q_proj", ["model.lora.target_modules must be a list, e.g. [a, b], got 'q_proj'"]),
        ("model.lora.target_modules=[q_proj, 1]", ["model.lora.target_modules[1] must be text", "got 1 (int)"]),
        ("run.name=7", ["run.name must be text", "got 7 (int)"]),
        ("run.name=", ["run.name must be the name of a folder, without '/', got ''"]),
        ("run.name=..", ["run.name must be the name of a folder, without '/', got '..' (command line)"]),
        ("run.name=null", ["run.name must be text", "got nothing"]),
        ("run.steps=", ["run.steps must be a whole number, got nothing (command line)"]),
        ("weight_sync.verify=1", ["weight_sync.verify must be true or false, got 1 (int)"]),
        ("task.params={1: 2}", ["task.params must be a section of names and values"]),
        ("staleness.max=-1", ["staleness.max must be greater than or equal to 0, got -1"]),
        ("run.seed=-1", ["run.seed must be greater than or equal to 0, got -1", "Engines take no others"]),
        ("run.seed=4294967296", ["run.seed must be less than 4294967296, got 4294967296"]),
        ("critic.lr=.inf", ["critic.lr must be a finite number, got inf (command line). Only algo", "give"]),
        ("learner.lr=fast", ["learner.lr must be a number or 'auto', got 'fast' (str) (command line). The policy's"]),
        ("eval.temperature=-1", ["eval.temperature must be greater than or equal to 0 or 'rollout', got -1"]),
        ("critic.value_clip=.inf", ["critic.value_clip must be a finite number, got inf"]),
        ("run.seconds=.inf", ["run.seconds must be a finite number, got inf"]),
        ("model.lora.alpha=.inf", ["model.lora.alpha must be a finite number, got inf"]),
        ("timeouts.push_s=.inf", ["timeouts.push_s must be a finite number, got inf"]),
        ("timeouts.wire_s=1e7", ["timeouts.wire_s must be less than or equal to 1000000, got 10000000.0"]),
        ("rollout.server_args={tp_size: 2, x: 1}", ["rollout.server_args must be without model-path", "tp_size out"]),
        ("staleness.max", ["must have the form key.sub=value"]),
        ("=3", ["must have the form key.sub=value"]),
        ("run.name=[", ["'run.name=[' is not valid YAML"]),
    ],
)
def test_a_bad_override_is_named_with_what_is_allowed(
    tmp_path: Path, override: str, parts: list[str]
) -> None:
    message = error_of(tmp_path, MINIMAL, override)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("rollout.top_k=5", "there is none, because the logged logprobs"), ("model.revision=x", "OWNER/NAME@REVISION"),
        ("run.epochs=3", "the length is run.steps batches"), ("learner.tp=2", "split over all ranks by FSDP2"),
        ("learner.epochs=3", "Passes over one batch are algorithm.epochs"),
        ("learner.beta=0.9", "did you mean learner.betas"),
        ("num_generations=8", "it is rollout.group_size"), ("algorithm.beta=0.1", "is algorithm.kl.coef"),
        ("model.trust_remote_code=true", "code that comes with a model is never run"),
    ],
)
def test_a_name_of_another_package_is_answered_with_what_there_is_here(key: str, says: str, tmp_path: Path) -> None:
    message = error_of(tmp_path, MINIMAL, key)
    assert f"unknown key {key.partition('=')[0]} (command line); " in message and says in message


def test_what_is_said_of_names_of_other_packages_names_keys_that_there_are() -> None:
    leaves = {*_leaves(Config)}
    names = {key.rpartition(".")[2] for key in leaves}
    sections = {key.partition(".")[0] for key in leaves}
    assert len(KEYS_ELSEWHERE) > 40 and not {*OF_SECTION} & leaves
    for said in {*KEYS_ELSEWHERE.values(), *OF_SECTION.values()}:
        told = re.findall(rf"(?<![\w.])(?:{'|'.join(sections)})\.\w[\w.]*\w", said)
        assert {key for key in told if key not in leaves} == set(), said
    assert names & {*KEYS_ELSEWHERE} == {"batch_size"}  # that of sft, which means something else than a learner's


@pytest.mark.parametrize("key", RENAMED)
def test_the_error_for_an_old_key_names_the_new_one(tmp_path: Path, key: str) -> None:
    assert f"unknown key {key} (command line); it is {RENAMED[key]} now" in error_of(tmp_path, MINIMAL, f"{key}=1")


MAY_BE_INFINITE = (
    "algorithm.clip.high", "algorithm.correction.cap", "algorithm.correction.masks.token",
    "algorithm.correction.masks.sequence", "algorithm.correction.masks.geometric", "learner.grad_clip",
)


@pytest.mark.parametrize("key", MAY_BE_INFINITE)
def test_a_limit_may_be_infinite_but_not_nan(tmp_path: Path, key: str) -> None:
    bound = "[0.5, {}]" if ".masks." in key else "{}"
    assert "inf" in dump_config(load(tmp_path, MINIMAL, f"{key}={bound.format('.inf')}"))
    assert f"{key} must be" in error_of(tmp_path, MINIMAL, f"{key}={bound.format('.nan')}")


def test_an_unknown_key_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    message = error_of(tmp_path, MINIMAL + "placement: {learner: {rank: 2}}\n")
    assert message == (
        f"unknown key placement.learner.rank ({tmp_path}/config.yaml:3); did you mean placement.learner.ranks?"
    )


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path, "task: {name: reasoning_gym/x}").startswith("model.path is required")
    assert error_of(tmp_path, "").startswith("model.path is required")
    assert "one of task.name and task.path" in error_of(tmp_path, "model: {path: x}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "must hold `section: ...` lines"),
        ("a: [", "is not valid YAML"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "key 'run' stands twice"),
        ("a: !!python/object:os.system x", "is not valid YAML"),
        ("critic: &rate {lr: 1e-3}\nsft: *rate\n", "the alias *rate is not allowed: write out what it stands for"),
        ("a: &a {b: *a}\n", "the alias *a is not allowed"),  # it holds itself
        ("a: " + "[" * 2_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in error_of(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml can't be read: No such file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_words_that_yaml_1_1_takes_for_booleans_and_dates_stay_text(tmp_path: Path) -> None:
    for word in ("off", "no", "y", "2026-01-31", "1e", "e5", "."):
        assert load(tmp_path, MINIMAL, f"logging.project={word}").logging.project == word


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_loads_and_survives_a_dump(tmp_path: Path, file: Path) -> None:
    config = load_config(file)
    assert load(tmp_path, dump_config(config)) == config


@settings(deadline=None, max_examples=25)
@given(
    name=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1).filter(
        lambda s: "/" not in s and s not in (".", "..")
    ),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    params=st.dictionaries(st.text(max_size=8), st.one_of(st.booleans(), st.integers(), st.text(max_size=8))),
)
def test_what_is_dumped_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, params: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    config = load(folder, MINIMAL)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=name),
        learner=dataclasses.replace(config.learner, lr=lr),
        task=dataclasses.replace(config.task, params=params),
        algorithm=dataclasses.replace(config.algorithm, correction=CorrectionConfig(cap=math.inf)),
    )
    assert load(folder, dump_config(config)) == config
    assert yaml.safe_load(dump_config(load(folder, MINIMAL)))["placement"]["learner"]["ranks"] == 1


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
    assert message.startswith(f"{key} must be ") and f" ({tmp_path}/{place})" in message, message


def test_an_error_names_the_override_or_the_preset_and_no_place_for_a_default(tmp_path: Path) -> None:
    text = MINIMAL + "weight_sync:\n  every_steps: 1\n"
    assert "got 0 (command line). " in error_of(tmp_path, text, "weight_sync.every_steps=0")
    assert "staleness.mode exact, got 'in_place'. An" in error_of(tmp_path, text, "staleness.mode=exact")
    message = error_of(tmp_path, text, "algorithm.preset=gspo", "algorithm.advantage=gae")
    assert message.startswith("algorithm.loss must be one of ppo_clip, cispo, dppo_tv with algorithm.advantage gae ")
    assert "got 'gspo' (preset gspo). gspo has one ratio a row" in message


def test_all_errors_of_a_configuration_are_listed_at_once(tmp_path: Path) -> None:
    lines = error_of(tmp_path, MINIMAL, "run.steps=0", "learner.lr=-1", "eval.sizes=3").splitlines()
    assert [line.split(" (command")[0] for line in lines] == [
        "run.steps must be greater than 0, got 0", "learner.lr must be greater than 0 or 'auto', got -1",
        "unknown key eval.sizes",
    ]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm.aggregation=tokenmean", "token_mean, sequence_mean, constant, got 'tokenmean' (command line). Did"),
        ("algorithm.loss=ppo_klip", "got 'ppo_klip'. Did you mean ppo_clip?"),
        ("algorithm.advantage=gro", "got 'gro'. Did you mean grpo?"),
        ("algorithm.correction.kind=tokentis", "topr, auto, or module:name, got 'tokentis'. Did you mean token_tis?"),
        ("weight_sync.transport=dsk", "disk, auto, or module:name, got 'dsk'. Did you mean disk?"),
        ("algorithm.preset=icepop2", "Did you mean icepop?"),
        ("algorithm.loss=no_such_module:loss", "algorithm.loss 'no_such_module:loss' can't be imported from"),
        ("rollout.engine=async_rl.types:Slot", "must be an instance of async_rl.seams.engines.EngineEntry"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, override: str, hint: str) -> None:
    assert hint in error_of(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("007", 7), ("-08", -8), ("+5", 5), ("100_000", 100_000), ("0", 0), ("0x1F", 31), ("0o17", 15),
    ("12:30", "12:30"), ("1:30:00", "1:30:00"), ("0b11", "0b11"), ("1_a", "1_a"),
])
def test_whole_numbers_are_read_as_in_yaml_1_2(text: str, value: object) -> None:
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
    for old in PRESETS:
        resolved = dump_config(load(tmp_path, MINIMAL, f"algorithm.preset={old}"))
        for new in PRESETS:
            wanted = load(tmp_path, MINIMAL, f"algorithm.preset={new}")
            assert load(tmp_path, resolved, f"algorithm.preset={new}") == wanted, (old, new)


def test_what_was_changed_in_a_resolved_configuration_outlasts_another_preset(tmp_path: Path) -> None:
    resolved = dump_config(load(tmp_path, MINIMAL, "algorithm.clip.low=0.1", "algorithm.epochs=2"))
    given = "algorithm.proximal=recompute", "algorithm.preset=ppo", "algorithm.clip.high=0.28"
    found = load(tmp_path, resolved, *given).algorithm
    assert (found.preset, found.advantage, found.params["dual"]) == ("ppo", "gae", 0.0)
    assert (found.clip.low, found.clip.high, found.epochs, found.proximal) == (0.1, 0.28, 2, "recompute")
