"""The command `async-rl reward-model`; tests/test_cli.py has those of `async-rl sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForSequenceClassification

from async_rl.base.config.loading import load_config
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.cli import main
from learner.loop.ranks import Ranks
from learner.models.reward_model import RewardModel
from learner.models.tiny_model import character_tokenizer
from learner.stages import reward_training
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.models import save_bare_reward_model, save_tiny_model, save_tool_model

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Answers that spell the word backward are better, in 20 comparisons."""
    save_tiny_model("tiny-qwen2", tmp_path / "policy", seed=0)
    words = ["abc", "bcd", "cde", "def", "efg"]
    rows = [{"prompt": f"{word} {n}", "chosen": word[::-1], "rejected": word} for word in words for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({
        "model": {"path": str(tmp_path / "policy")},
        "task": {"name": "reasoning_gym/spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}},
        "reward_model": {"path": str(tmp_path / "rm")},
        "reward_training": {"path": str(tmp_path / "pairs.jsonl"), "batch_size": 8},
    }))  # fmt: skip
    return file


def test_a_reward_model_is_made_and_may_be_made_again_with_another_mean_reward(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file), "--dry-run"]) == 2
    assert f"reward_model.path {tmp_path}/rm " in capsys.readouterr().err
    assert main(["reward-model", str(config_file), "task.size=1"]) == 0
    said = capsys.readouterr().out
    assert "20 comparisons" in said and f"{tmp_path}/rm" in said
    assert main(["train", str(config_file), "--dry-run"]) == 0

    def mean(texts: list[str]) -> float:
        lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
        tokenizer = load_tokenizer(tmp_path / "rm")
        outputs = [lm(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]
        return sum(outputs) / len(outputs) - lm.config.reward_offset

    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    compared = [f"{row['prompt']}<sep>{row[name]}<eos>" for row in rows for name in ("chosen", "rejected")]
    assert mean(compared) != pytest.approx(0, abs=1e-3), "the one demonstration has 0"
    options = ["reward_training.zero_at=comparisons", "reward_training.held_out=0.0"]
    assert main(["reward-model", str(config_file), *options]) == 0
    assert mean(compared) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("has_own_vocabulary", [False, True])
def test_the_command_trains_on_the_rows_that_a_run_scores(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, has_own_vocabulary: bool
) -> None:
    save_tool_model(tmp_path / "policy")  # with the chat template of Qwen2.5
    base = str(tmp_path / "base") if has_own_vocabulary else ""
    if has_own_vocabulary:
        own = character_tokenizer()
        own.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }};{% endfor %}"
        save_bare_reward_model(tmp_path / "base", vocab=len(own), pad_token_id=0)
        own.save_pretrained(tmp_path / "base")
    asked, said = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "abba"}]
    row = {"prompt": asked, "chosen": said, "rejected": [{"role": "assistant", "content": "no"}]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "model": {"path": str(tmp_path / "policy")}, "reward_model": {"path": str(tmp_path / "rm")},
        "task": {"name": "reasoning_gym/spell_backward"}, "reward_training": {
            "path": str(tmp_path / "pairs.jsonl"), "base": base, "held_out": 0.0, "zero_at": "none", "epochs": 1,
        },
    }))  # fmt: skip
    trained: list[Any] = []
    train = reward_training.train_reward_model
    monkeypatch.setattr(reward_training, "train_reward_model", lambda config, data, folder: (
        trained.extend(data.train[0].rows), train(config, data, folder))[1])
    assert main(["reward-model", str(tmp_path / "config.yaml")]) == 0

    # a run: the template's prompt, and an answer that the model ends with <|im_end|>
    policy = load_tokenizer(tmp_path / "policy")
    prompt = policy.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    answer = policy("abba<|im_end|>")["input_ids"]
    config = load_config(tmp_path / "config.yaml", [])
    scorer = RewardModel(config, torch.device("cpu"), torch.float32, Ranks(init_device_mesh("cpu", (1,))))
    scored: list[Any] = []
    monkeypatch.setattr(scorer, "_score_rows", lambda rows: scored.extend(rows) or torch.zeros(len(rows)))
    rows = [make_row(answer, [-1.0] * len(answer), 0.0)]
    scorer.score(batch_of(make_group(0, prompt, rows, messages=tuple(asked))))
    assert scored == [trained[0]] and trained[0] != trained[1]
    text = "[user] hi;[assistant] abba;" if has_own_vocabulary else policy.decode([*prompt, *answer])
    assert load_tokenizer(tmp_path / "rm").decode(trained[0].tokens) == text and text.count("hi") == 1


def test_what_is_missing_is_named(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("reward_model.path", "reward_training.path"):
        assert main(["reward-model", str(config_file), f"{key}="]) == 2
        assert f"{key} must be " in capsys.readouterr().err
    for key in ("path", "eval_path"):
        assert main(["reward-model", str(config_file), f"reward_training.{key}={tmp_path}/none.jsonl"]) == 2
        assert f"reward_training.{key} {tmp_path}/none.jsonl" in capsys.readouterr().err
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": ["a"]}}
    (tmp_path / "task.jsonl").write_text(json.dumps(row))
    task = f"task={{path: {tmp_path}/task.jsonl, reward: 'tests.extensions.reward:answer_length'}}"
    assert main(["reward-model", str(config_file), task]) == 2
    assert "reward_training.zero_at must be " in capsys.readouterr().err
    assert not (tmp_path / "rm").exists()


def test_another_model_is_not_overwritten(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reward-model", str(config_file), f"reward_model.path={tmp_path}/policy"]) == 2
    assert f"reward_model.path {tmp_path}/policy " in capsys.readouterr().err
