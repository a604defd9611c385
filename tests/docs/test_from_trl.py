"""docs/from-trl.md names what TRL and this package have, and its two configurations say the same."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from rollout_server.question import Question
from tests.kit.documents import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-trl.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]


def source_of(package: str, file: str) -> ast.Module:
    """A source file, which is read and not imported, because importing TRL takes half a minute."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def settings_in(package: str, file: str) -> set[str]:
    found = [each.target for each in ast.walk(source_of(package, file)) if isinstance(each, ast.AnnAssign)]
    return {target.id for target in found if isinstance(target, ast.Name)}


def own_names_of_trl() -> set[str]:
    """The settings that GRPOConfig itself declares, and the arguments of GRPOTrainer but for the config."""
    (trainer,) = (
        each for each in ast.walk(source_of("trl", "trainer/grpo_trainer.py"))
        if isinstance(each, ast.ClassDef) and each.name == "GRPOTrainer"
    )
    (start,) = (each for each in trainer.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    arguments = {each.arg for each in start.args.args} - {"self", "args"}
    return {name for name in settings_in("trl", "trainer/grpo_config.py") if not name.startswith("_")} | arguments


def names_of_trl() -> set[str]:
    return own_names_of_trl().union(
        settings_in("trl", "trainer/base_config.py"), settings_in("transformers", "training_args.py")
    )


def told_names() -> set[str]:
    return {name for cells in ROWS for name in re.findall(r"`(\w+)`", cells[1])}


def settings_of_trl() -> dict[str, Any]:
    """The arguments of the GRPOConfig on the page."""
    (call,) = [each for each in ast.walk(ast.parse(blocks(PAGE, "python")[0])) if isinstance(each, ast.Call)]
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def test_every_name_of_trl_on_the_page_is_a_setting_of_a_grpo_config() -> None:
    assert len(told_names()) > 100
    assert (told_names() | settings_of_trl().keys()) - names_of_trl() == set()


def test_every_setting_of_a_grpo_config_and_argument_of_its_trainer_is_on_the_page() -> None:
    assert own_names_of_trl() - told_names() == set()


def test_every_key_of_ours_on_the_page_for_trls_users_exists() -> None:
    ours = [key for cells in ROWS for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", "|".join(cells[2:]))]
    assert len(ours) > 40
    for key in {key for key in ours if not key.startswith("rollout_server")}:
        with pytest.raises(ConfigError) as caught:
            load_config(ROOT / "configs" / "quickstart.yaml", [f"{key}=[[]]"])  # fits no key, so unknown ones differ
        assert "unknown key" not in str(caught.value), key


def test_the_two_configurations_on_the_page_are_the_same(tmp_path: Path) -> None:
    trl = settings_of_trl()
    (tmp_path / "config.yaml").write_text(blocks(PAGE, "yaml")[0])
    config = load_config(tmp_path / "config.yaml")
    answers = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    assert config.episodes_per_step == answers and config.rollout.group_size == trl["num_generations"]
    assert str(config.run_dir) == trl["output_dir"]
    algorithm, learner = config.algorithm, config.learner
    same = {
        "max_steps": config.run.steps, "seed": config.run.seed, "save_steps": config.checkpoint.every_steps,
        "eval_steps": config.eval.every_steps, "learning_rate": learner.lr, "warmup_steps": learner.warmup_steps,
        "weight_decay": learner.weight_decay, "max_grad_norm": learner.grad_clip,
        "max_completion_length": config.rollout.max_response_tokens, "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p, "beta": algorithm.kl.coef, "epsilon": algorithm.clip.low,
        "epsilon_high": algorithm.clip.high, "num_iterations": algorithm.epochs,
        "vllm_gpu_memory_utilization": config.rollout.mem_fraction,
        "vllm_importance_sampling_clip_max": algorithm.correction.cap,
        "gradient_checkpointing": learner.gradient_checkpointing,
    }
    assert same == {name: trl[name] for name in same}
    assert (trl["use_bias_correction_kl"], algorithm.kl.kind) == (False, "k3_loss")
    assert (trl["lr_scheduler_type"], learner.decay_fraction) == ("constant_with_warmup", 0)
    assert (trl["loss_type"], algorithm.aggregation, algorithm.loss) == ("dapo", "token_mean", "ppo_clip")
    assert (trl["scale_rewards"], algorithm.advantage, algorithm.minibatches) == ("group", "grpo", 1)
    assert (trl["vllm_importance_sampling_mode"], algorithm.correction.kind) == ("token_truncate", "token_tis")
    assert config.staleness.max == 0 and trl["vllm_mode"] == "colocate" and config.shares_gpus


def test_the_reward_on_the_page_is_that_of_trls_function() -> None:
    functions: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[1], functions)
    texts, right = ["It is 72", "It is 7"], "72"
    of_trl = functions["rewards_of_trl"](texts, [right, right], prompts=["?", "?"])
    question = Question(messages=(), ground_truth=right)
    assert [functions["is_right"](question, text) for text in texts] == of_trl == [1.0, 0.0]
