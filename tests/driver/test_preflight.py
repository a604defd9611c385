"""Models, tasks, rewards and hardware are checked before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from async_rl import pipeline
from async_rl.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    EvalConfig,
    KlConfig,
    LearnerPlacement,
    LoggingConfig,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutConfig,
    StalenessConfig,
    TaskConfig,
)
from async_rl.config.loading import load_config
from async_rl.config.system import TimeoutsConfig
from async_rl.config.task_parts import SandboxConfig
from async_rl.driver.dry_run import dry_run
from async_rl.driver.preflight import _check_loading, check_inputs, check_names
from async_rl.driver.signals import StopSignals
from async_rl.errors import ConfigError
from async_rl.pipeline import run
from rollout_server.question import Question
from rollout_server.tasks.base import Task
from tests.kit.configs import make_config
from tests.kit.models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("inputs") / "model"
    save_tiny_model("tiny-qwen2", folder, seed=0)
    return ModelConfig(path=str(folder))


def config_of(model: ModelConfig, task: TaskConfig, tmp_path: Path) -> Config:
    return make_config(model=model, task=task, run={"dir": tmp_path / "runs"})


def test_a_parquet_file_without_a_needed_column_is_refused_with_the_columns_it_has(
    model: ModelConfig, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"problem": ["1 + 1?"], "solution": ["2"]}), tmp_path / "rows.parquet")
    config = config_of(model, TaskConfig(path=str(tmp_path / "rows.parquet")), tmp_path)
    with pytest.raises(ConfigError, match=r"needs a column prompt or question.*; found: problem, solution"):
        run(config)
    assert not (tmp_path / "runs").exists()


def test_a_task_that_does_not_exist_is_refused_with_its_neighbours(model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean chain_sum"):
        dry_run(config_of(model, TaskConfig(name="reasoning_gym/chain_sumz"), tmp_path))


def test_a_prompt_without_tokens_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    shutil.copytree(model.path, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    for name, content in (("empty", ""), ("blank", " \n")):
        row = {
            "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": content}],
            "reward_model": {"ground_truth": "1"},
        }
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        config = config_of(
            ModelConfig(path=str(tmp_path / "model")), TaskConfig(path=str(tmp_path / f"{name}.jsonl")), tmp_path
        )
        with pytest.raises(ConfigError, match=rf"{name}\.jsonl, row 0: prompt must hold some text, got \["):
            dry_run(dataclasses.replace(config, eval=EvalConfig(size=0)))
    silent = config_of(
        ModelConfig(path=str(tmp_path / "model")), TaskConfig(name=f"{__name__}:SilentTask"), tmp_path
    )
    with pytest.raises(ConfigError, match="task: a prompt of silence has no tokens: its text is ''"):
        dry_run(silent)


class SilentTask(Task):
    """A task whose questions are empty."""

    num_prompts = 1

    def train_question(self, position: int) -> Question:
        return Question(messages=({"role": "user", "content": ""},), ground_truth="", source="silence")

    def eval_questions(self) -> list[Question]:
        return []

    def verify(self, question: Question, response: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "def reward(prompt, response, answer, extra): ...",
            "must be a `def reward(question, response)`, got reward(prompt, response, answer, extra): missing",
        ),
        ("def reward(a): ...", "got reward(a): too many positional arguments"),
        ("def reward(*, question, response): ...", "too many positional arguments"),
        ("async def reward(question, response): ...", ""),
        ("class reward:\n    def __init__(self, a, b): ...", "is not a function but a class"),
        ("def reward(a, b, c=1): ...", ""),
        ("reward = lambda *a: 1.0", ""),
        ("class Judge:\n    def __call__(self, a, b): ...\nreward = Judge()", ""),
    ],
)
def test_a_reward_that_takes_other_arguments_is_refused(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    module = f"reward_{hashlib.sha256(function.encode()).hexdigest()[:8]}"
    (tmp_path / f"{module}.py").write_text(function)
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskConfig(name="reasoning_gym/chain_sum", reward=f"{module}:reward")
    with pytest.raises(ConfigError, match=re.escape(message)) if message else contextlib.nullcontext():
        check_inputs(config_of(model, task, tmp_path))


def test_a_model_without_a_chat_template_is_a_caution(model: ModelConfig, tmp_path: Path) -> None:
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum"), tmp_path)
    assert check_inputs(config) == []
    shutil.copytree(model.path, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    text = dry_run(dataclasses.replace(config, model=ModelConfig(path=str(tmp_path / "model"))))
    assert f"# the tokenizer in {tmp_path}/model has no chat template: prompts are plain text" in text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_images_is_a_caution(model: ModelConfig, tmp_path: Path, suffix: str) -> None:
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What is it?"}],
        "reward_model": {"ground_truth": "1"}, "images": ["a.png"],
    }
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        file.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), file)
    config = dataclasses.replace(config_of(model, TaskConfig(path=str(file)), tmp_path), eval=EvalConfig(size=0))
    assert check_inputs(config) == [f"{file} has the column images, which no model sees: they read only text."]


def test_more_processes_than_cores_are_a_caution(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum"), tmp_path)
    assert check_inputs(config) == []
    crowded = dataclasses.replace(config, placement=PlacementConfig(learner=LearnerPlacement(ranks=8)))
    (caution,) = check_inputs(crowded)
    assert caution.startswith("placement: 9 learner ranks and servers share 2 cores, so they take turns")


def test_a_reward_that_can_not_be_imported_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    task = TaskConfig(name="reasoning_gym/chain_sum", reward="no_such_module:fn")
    with pytest.raises(ConfigError, match="no_such_module"):
        check_inputs(config_of(model, task, tmp_path))
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum"), tmp_path)
    with pytest.raises(ConfigError, match=r"eval\.gold_reward 'no_such_module:fn'"):
        check_inputs(dataclasses.replace(config, eval=EvalConfig(every_steps=5, gold_reward="no_such_module:fn")))


def test_programs_that_are_not_contained_are_a_caution(model: ModelConfig, tmp_path: Path) -> None:
    sandbox = SandboxConfig(kind="none")
    programs = TaskConfig(name="rollout_server.tasks.programs:Programs", reward="code", sandbox=sandbox)
    answers = TaskConfig(name="reasoning_gym/countdown", sandbox=sandbox)
    cautions = [each for task in (programs, answers) for each in check_inputs(config_of(model, task, tmp_path))]
    assert "task.sandbox: the reward code: programs are not contained (task.sandbox.kind: none)." in cautions
    assert "the reward task: answers that its scorer runs as Python are not contained" in cautions[-1]


def test_a_chat_template_that_raises_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    shutil.copytree(model.path, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('only tools may speak') }}")
    config = config_of(ModelConfig(path=str(tmp_path / "model")), TaskConfig(name="reasoning_gym/gcd"), tmp_path)
    with pytest.raises(ConfigError, match=r"gcd with the roles user: TemplateError: only tools may speak\. Change"):
        check_inputs(dataclasses.replace(config, eval=EvalConfig(size=0)))


def test_a_held_out_set_larger_than_a_task_can_give_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum", params=params), tmp_path)
    with pytest.raises(ConfigError, match=r"only 200 different questions.*eval\.size = 256"):
        dry_run(config)
    check_inputs(dataclasses.replace(config, eval=EvalConfig(size=50)))


def test_a_network_host_that_is_not_of_this_machine_is_refused_with_those_that_are(
    model: ModelConfig, tmp_path: Path
) -> None:
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum"), tmp_path)
    elsewhere = dataclasses.replace(config, network=NetworkConfig(host="203.0.113.9", insecure=True))
    with pytest.raises(ConfigError, match=r"network\.host must be an address of this host, got 203\.0\.113\.9; .*lo"):
        check_inputs(elsewhere)


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        (0, ["weight_sync.transport=nccl"], "weight_sync.transport must be auto, gloo or disk on a host without GPUs"),
        (1, ["weight_sync.transport=nccl"], "weight_sync.transport must be auto, cuda_ipc or disk where learner"),
        (2, ["weight_sync.transport=cuda_ipc"], "weight_sync.transport must be auto, nccl or disk where servers are"),
        (0, ["placement.rollout.tp=2"], "placement.rollout.tp must be 1 on a host with 0 GPUs, fewer than learner"),
        (2, ["placement.rollout.tp=2"], "placement.rollout.tp must be 1 on a host with 2 GPUs, fewer than learner"),
        (0, ["placement.learner.gpus_per_node=1"], "placement does not fit: 2 GPUs wanted, 0 there"),
        (0, ["network.keys=none"], "network.keys must be a folder with keys, got none: there is no such folder"),
    ],
)
def test_missing_hardware_is_refused_unless_ray_may_use_another_host(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr("async_rl.driver.placement.gpus_here", lambda: float(gpus))
    monkeypatch.setattr("async_rl.driver.preflight.gpus_here", lambda: float(gpus))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    names = [f"model.path={model.path}", "task.name=reasoning_gym/chain_sum", f"run.dir={tmp_path / 'runs'}"]
    check_inputs(load_config(None, names))
    config = load_config(None, [*names, *overrides])
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(config)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_inputs(config)


def test_a_host_with_gpus_enough_takes_what_needs_them(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.driver.placement.gpus_here", lambda: 3.0)
    monkeypatch.setattr("async_rl.driver.preflight.gpus_here", lambda: 3.0)
    check_inputs(load_config(None, [
        f"model.path={model.path}", "task.name=reasoning_gym/chain_sum", "placement.rollout.tp=2",
        "weight_sync.transport=nccl",
    ]))


def test_a_dry_run_prints_the_sizes_that_follow_from_the_config(model: ModelConfig, tmp_path: Path) -> None:
    text = dry_run(config_of(model, TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=100), tmp_path))
    derived = dict(re.findall(r"^# (.*?)  +(\S+)$", text, re.MULTILINE))
    assert derived["episodes per step"] == "128"  # 16 prompts * 8 answers
    assert derived["episodes at the engines, at most"] == "128"  # staleness 0: no more than a step's
    assert derived["longest sequence, tokens"] == "356"
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_how_many_groups_a_depth_has(model: ModelConfig, tmp_path: Path) -> None:
    config = config_of(model, TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=100), tmp_path)
    lines = " ".join(dry_run(dataclasses.replace(config, staleness=StalenessConfig(max=8, depth=1.5))).split())
    assert "groups in flight or waiting, at most 40 #" in lines
    assert "episodes at the engines, at most 320 " in lines  # 40 groups of 8


def test_a_narrowed_sampling_distribution_is_a_caution_of_train_and_dry_run(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: Config, signals: StopSignals) -> None:
        raise ConfigError("no further")

    monkeypatch.setattr(pipeline, "open_ray", contextlib.nullcontext)
    monkeypatch.setattr(pipeline, "reserve", refuse)
    config = config_of(model, TaskConfig(name="reasoning_gym/gcd"), tmp_path)
    for top_p, times in ((0.9, 1), (1.0, 0)):
        narrowed = dataclasses.replace(
            config, rollout=RolloutConfig(top_p=top_p), logging=LoggingConfig(wandb="disabled")
        )
        assert dry_run(narrowed).count("importance ratios are biased") == times
        with pytest.raises(ConfigError, match="no further"):
            run(narrowed)
        assert capsys.readouterr().out.count("caution: rollout.top_p = 0.9 samples from a narrowed") == times
    assert not list((tmp_path / "runs").iterdir())  # nothing began: no run directory is left


def test_the_folders_of_all_roles_are_opened_and_a_wrong_one_is_named_with_its_key(
    model: ModelConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        config_of(model, TaskConfig(name="reasoning_gym/chain_sum"), tmp_path),
        algorithm=AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k2_loss")),
    )
    reference = ReferenceConfig(path=model.path)
    check_inputs(dataclasses.replace(config, critic=CriticConfig(path=model.path), reference=reference))
    with pytest.raises(ConfigError, match=r"reference.path .*nowhere is not a folder"):
        check_inputs(dataclasses.replace(config, reference=ReferenceConfig(path=str(tmp_path / "nowhere"))))
    with pytest.raises(ConfigError, match="must describe a model ForSequenceClassification, got Qwen2ForCausalLM"):
        check_inputs(dataclasses.replace(config, reward_model=RewardModelConfig(path=model.path)))


def test_sliding_windows_are_refused_before_the_start_if_rows_are_split(
    model: ModelConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(model.path, tmp_path / "windows")
    described = json.loads((folder / "config.json").read_text())
    described |= {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(described))
    split = {"learner": {"sequence_parallel": 2}, "placement": {"learner": {"ranks": 2}}}
    task = {"name": "reasoning_gym/chain_sum"}
    check_inputs(make_config(model.path, task=task, run={"dir": tmp_path / "runs"}, **split))
    check_inputs(make_config(folder, task=task, run={"dir": tmp_path / "runs"}))
    with pytest.raises(ConfigError, match=r"sequence_parallel must be 1 with model.path .*\(sliding_window = 64\)"):
        check_inputs(make_config(folder, task=task, run={"dir": tmp_path / "runs"}, **split))


@pytest.mark.parametrize("key", ["model.path", "reference.path", "critic.path"])
def test_quantised_weights_are_refused_for_whatever_the_learner_computes(
    key: str, model: ModelConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(model.path, tmp_path / "quantised")
    described = json.loads((folder / "config.json").read_text())
    described |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=rf"{key} {folder} must have weights in float32.* quantised \(fp8\)\..*Take"):
        _check_loading(key, str(folder), make_config(model.path))


def test_a_vocabulary_that_ranks_of_split_rows_would_miscount_is_refused(
    model: ModelConfig, tmp_path: Path
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model.path)
    rows = next(rows for rows in range(lm.config.vocab_size, 10**6) if rows % 8 == 1)
    lm.resize_token_embeddings(rows)
    folder = shutil.copytree(model.path, tmp_path / "odd")
    lm.save_pretrained(folder)
    task = {"name": "reasoning_gym/chain_sum"}
    split = {"learner": {"sequence_parallel": 2}, "placement": {"learner": {"ranks": 8}}}
    check_inputs(make_config(model.path, task=task, run={"dir": tmp_path / "runs"}, **split))
    with pytest.raises(ConfigError, match=rf"sequence_parallel must be 1 with {rows} rows of embeddings on 8 "):
        check_inputs(make_config(folder, task=task, run={"dir": tmp_path / "runs"}, **split))


@pytest.mark.parametrize("body", ["json.loads(response)", "float('nan')", "'1.0'"])
def test_a_reward_that_fails_for_the_right_answer_is_refused_with_the_users_line(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    module = f"tried_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
    (tmp_path / f"{module}.py").write_text(f"import json\n\n\ndef reward(question, response):\n    return {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskConfig(name="reasoning_gym/spell_backward", reward=f"{module}:reward")
    with pytest.raises(ConfigError, match=f"{module}:reward") as caught:
        check_inputs(config_of(model, task, tmp_path))
    assert "json.loads" not in body or f"{tmp_path}/{module}.py:5" in str(caught.value)


def test_a_reward_that_hangs_in_its_trial_call_is_refused_with_its_time_limit(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading\n\n\ndef reward(question, response):\n    threading.Event().wait()\n"
    (tmp_path / "hanging_reward.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskConfig(name="reasoning_gym/spell_backward", reward="hanging_reward:reward")
    config = dataclasses.replace(config_of(model, task, tmp_path), timeouts=TimeoutsConfig(reward_s=0.2))
    with pytest.raises(ConfigError, match=r"hanging_reward:reward .* timeouts\.reward_s = 0\.2 s"):
        check_inputs(config)


@pytest.mark.parametrize(
    "override", ["model.path=./none", "task.eval_path=none.jsonl", "task.reward=none:f", "eval.gold_reward=none:f"]
)
def test_a_missing_file_or_function_is_named_with_its_key(tmp_path: Path, override: str) -> None:
    settings = {"model": {"path": str(tmp_path)}, "task": {"name": "reasoning_gym/x"}}
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        check_names(load_config(settings, [override]))
    check_names(load_config(settings))
