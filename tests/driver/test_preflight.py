"""Models, tasks, rewards and hardware are checked before any process starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import (
    AlgorithmConfig,
    Config,
    KlConfig,
    LearnerPlacement,
    TaskConfig,
)
from async_rl.base.config.loading import load_config
from async_rl.base.config.task_parts import SandboxConfig
from async_rl.base.errors import ConfigError
from async_rl.pipeline import run
from async_rl.run.before_start.preflight import check_inputs, check_loading, check_names
from tests.kit.configs import changed, make_config
from tests.kit.gpus import pretend_gpus

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run on a task without files, from the folder in which the modules of a user are."""
    monkeypatch.syspath_prepend(tmp_path)
    return make_config(tiny_model, run={"dir": tmp_path / "runs"}, eval={"num_prompts": 0})


def rewritten(model: Path, tmp_path: Path, **described: Any) -> Path:
    """A copy of the model whose config.json says something else."""
    folder = shutil.copytree(model, tmp_path / "rewritten")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | described))
    return folder


def config_with_reward(base: Config, tmp_path: Path, source: str) -> Config:
    module = f"reward_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    (tmp_path / f"{module}.py").write_text(source)
    return changed(base, task={"name": "reasoning_gym/spell_backward", "reward": f"{module}:reward"})


@pytest.mark.parametrize("source", [
    "async def reward(question, response): return 1.0", "def reward(a, b, c=1): return 1.0",
    "reward = lambda *a: 1.0", "class Judge:\n    def __call__(self, a, b): return 1.0\nreward = Judge()",
])  # fmt: skip
def test_anything_that_can_be_called_with_a_question_and_a_response_is_a_reward(
    base: Config, tmp_path: Path, source: str
) -> None:
    assert check_inputs(config_with_reward(base, tmp_path, source)) == []


@pytest.mark.parametrize("source", [
    "def reward(prompt, response, answer, extra): ...", "def reward(a): ...", "def reward(*, question, response): ...",
    "class reward:\n    def __init__(self, a, b): ...",
    # its trial call with the right answer fails
    "import json\ndef reward(question, response): return json.loads(response)",
    "def reward(question, response): return float('nan')", "def reward(question, response): return '1.0'",
    "import threading\ndef reward(question, response): threading.Event().wait()",
])  # fmt: skip
def test_a_reward_that_takes_other_arguments_or_fails_in_its_trial_call_is_refused(
    base: Config, tmp_path: Path, source: str
) -> None:
    config = changed(config_with_reward(base, tmp_path, source), timeouts={"reward_s": 0.2})
    with pytest.raises(ConfigError, match=config.task.reward) as caught:
        check_inputs(config)
    gold = {"gold_reward": config.task.reward, "num_prompts": 1, "every_steps": 1}
    with pytest.raises(ConfigError, match=config.task.reward):
        check_inputs(changed(config, task={"reward": ""}, eval=gold))
    assert "json.loads" not in source or f"{config.task.reward.partition(':')[0]}.py:2" in str(caught.value)
    assert "Event" not in source or "timeouts.reward_s = 0.2" in str(caught.value)


def test_what_may_not_be_meant_is_a_caution(base: Config, tiny_model: Path, tmp_path: Path) -> None:
    assert check_inputs(base) == check_inputs(changed(base, rollout={"min_p": 0.1})) == []
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    sandbox = SandboxConfig(kind="none")
    for named, cautious in (
        (str(folder), changed(base, model={"path": folder})),
        ("algorithm.support", changed(base, rollout={"min_p": 0.1}, algorithm={"support": "ignore"})),
        ("learner.lr", changed(base, learner={"lr": 0.1})),
        ("learner.prompts_per_step", changed(base, task={"size": 10}, learner={"prompts_per_step": 11})),
        ("placement.colocated", changed(base, placement={"colocated": True})),
        ("task.sandbox", changed(base, task=TaskConfig(name="reasoning_gym/countdown", sandbox=sandbox))),
        ("task.sandbox", changed(base, task=TaskConfig(
            name="rollout_server.tasks.examples:Programs", reward="code", sandbox=sandbox
        ))),
    ):
        assert any(named in caution for caution in check_inputs(cautious)), named


def test_a_held_out_set_larger_than_a_task_can_give_is_refused(base: Config) -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    small = changed(base, task={"params": params})
    with pytest.raises(ConfigError, match=r"200 .*eval\.num_prompts = 256"):
        check_inputs(changed(small, eval={"num_prompts": 256}))
    check_inputs(changed(small, eval={"num_prompts": 50}))


def test_a_network_host_that_is_not_of_this_machine_is_refused_with_those_that_are(base: Config) -> None:
    with pytest.raises(ConfigError, match=r"^network\.host .*203\.0\.113\.9; .*lo"):
        check_inputs(changed(base, network={"host": "203.0.113.9", "insecure": True}))


@pytest.mark.parametrize(
    ("gpus", "override", "key"),
    [
        (0, "weight_sync.transport=nccl", "weight_sync.transport"),
        (1, "weight_sync.transport=nccl", "weight_sync.transport"), (3, "weight_sync.transport=nccl", ""),
        (2, "weight_sync.transport=cuda_ipc", "weight_sync.transport"),
        (0, "placement.rollout.tp=2", "placement.rollout.tp"), (2, "placement.rollout.tp=2", "placement"),
        (3, "placement.rollout.tp=2", ""),
        (0, "placement.learner.gpus_per_node=1", "placement"), (0, "network.keys=none", "network.keys"),
    ],
)
def test_missing_hardware_is_refused_unless_ray_may_use_another_host(
    base: Config, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, override: str, key: str
) -> None:
    pretend_gpus(monkeypatch, gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    names = [f"model.path={tiny_model}", "task.name=reasoning_gym/chain_sum", f"run.dir={tmp_path / 'runs'}"]
    config = load_config(None, [*names, override])
    if key:
        with pytest.raises(ConfigError, match=f"^{re.escape(key)} "):
            run(config)
        assert not (tmp_path / "runs").exists()
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_inputs(config)


def test_the_folders_of_all_roles_are_opened_and_a_wrong_one_is_named_with_its_key(
    base: Config, tiny_model: Path, tmp_path: Path
) -> None:
    config = changed(base, algorithm=AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k2_loss")))
    check_inputs(changed(config, critic={"path": str(tiny_model)}, reference={"path": str(tiny_model)}))
    with pytest.raises(ConfigError, match=r"^reference\.path .*nowhere"):
        check_inputs(changed(config, reference={"path": str(tmp_path / "nowhere")}))
    with pytest.raises(ConfigError, match="got Qwen2ForCausalLM"):
        check_inputs(changed(config, reward_model={"path": str(tiny_model)}))


SPLIT: dict[str, Any] = {"learner": {"sequence_parallel": 2}, "placement": {"learner": LearnerPlacement(ranks=8)}}


def test_sliding_windows_are_refused_before_the_start_if_rows_are_split(
    base: Config, tiny_model: Path, tmp_path: Path
) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}
    config = changed(base, model={"path": rewritten(tiny_model, tmp_path, **windows)})
    check_inputs(config)
    check_inputs(changed(base, **SPLIT))
    with pytest.raises(ConfigError, match=r"sequence_parallel .*sliding_window = 64"):
        check_inputs(changed(config, **SPLIT))


@pytest.mark.parametrize("key", ["model.path", "reference.path", "critic.path"])
def test_quantised_weights_are_refused_for_whatever_the_learner_computes(
    key: str, base: Config, tiny_model: Path, tmp_path: Path
) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = rewritten(tiny_model, tmp_path, quantization_config=fp8)
    config = changed(base, algorithm=AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k2_loss")))
    config = changed(config, **{key.partition(".")[0]: {"path": str(folder)}})
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} {folder} .*fp8"):
        check_loading(key, str(folder), config, "sdpa")


@pytest.mark.parametrize(
    "override", ["model.path=./none", "task.eval_path=none.jsonl", "task.reward=none:f", "eval.gold_reward=none:f"]
)
def test_a_missing_file_or_function_is_named_with_its_key(tmp_path: Path, override: str) -> None:
    settings = {"model": {"path": str(tmp_path)}, "task": {"name": "reasoning_gym/x"}}
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        check_names(load_config(settings, [override]))
    check_names(load_config(settings))


@pytest.mark.parametrize(("servers", "urls", "fits"), [
    (1, 1, True), (2, 1, False), (2, 2, True), (2, 3, False), ({"min": 2, "max": 3}, 1, False),
    ({"min": 2, "max": 3}, 2, True), ({"min": 2, "max": 3}, 3, True), ({"min": 2, "max": 3}, 4, False),
])
def test_a_run_has_as_many_urls_as_servers(
    servers: int | dict[str, int], urls: int, fits: bool, tmp_path: Path
) -> None:
    rollout = {"server_urls": [f"http://10.0.0.{number}:3" for number in range(urls)]}
    config = make_config(tmp_path, rollout=rollout, placement={"rollout": {"servers": servers}})
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"^rollout\.server_urls "):
        check_names(config)


def test_a_url_of_two_servers_is_refused(tmp_path: Path) -> None:
    rollout = {"server_urls": ["http://10.0.0.1:3"] * 2}
    with pytest.raises(ConfigError, match=r"^rollout\.server_urls "):
        check_names(make_config(tmp_path, rollout=rollout, placement={"rollout": {"servers": 2}}))
