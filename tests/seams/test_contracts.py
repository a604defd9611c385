"""What the code may rely on in every built-in part of a seam, and in the examples from outside the packages."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from async_rl.base.config import Config
from learner.loop.optimizer import Optimizer
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.conversation.chat_messages import Message
from rollout_server.episodes.env import load_env
from rollout_server.question import Question
from rollout_server.rewards.rules import RULES
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import TASKS, Task, open_task
from tests.kit.configs import learner_config, make_config

TOKENIZER = character_tokenizer()
ENVIRONMENTS = "rollout_server.episodes.environments"
ROW = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "data_source": "gsm8k"}


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """Settings with which each class of task has training prompts and three held-out ones."""
    for part, answer in (("train", "2"), ("held_out", "3")):
        lines = [{**ROW, "reward_model": {"ground_truth": answer + "0" * number}} for number in range(5)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
    return {
        "reasoning_gym": {"name": "reasoning_gym/spell_backward"}, "files": {"name": "", **files},
        "": {"name": "", "env": f"{ENVIRONMENTS}.guess:Guess"},
    }.get(kind, {"name": kind})  # fmt: skip


def task_config(kind: str, folder: Path, seed: int = 0) -> Config:
    task = {"size": 20, "max_prompt_tokens": 64, **settings_of(kind, folder)}
    return make_config(task=task, eval={"num_prompts": 3}, run={"seed": seed})


@pytest.mark.parametrize("kind", [
    *TASKS, "rollout_server.tasks.examples:Letters", "rollout_server.tasks.examples:Programs",
    "tests.extensions.task:Additions",
])  # fmt: skip
def test_a_task_has_repeatable_prompts_of_epochs_and_held_out_ones(kind: str, tmp_path: Path) -> None:
    one, same, other = (open_task(task_config(kind, tmp_path, seed), TOKENIZER) for seed in (0, 0, 1))

    def asked(task: Task, index: int) -> tuple[int, list[int], Any]:
        prompt = task.prompt(index)
        assert prompt.index == index and not prompt.is_held_out and len(prompt.tokens) <= 64
        assert len(prompt.tokens) == 0 if kind == "" else TOKENIZER.decode(prompt.tokens) == prompt.text
        return prompt.data_row, list(prompt.tokens), prompt.question

    n = one.num_prompts
    epochs = [[asked(one, index) for index in range(first, first + n)] for first in (0, n)]
    assert [asked(same, index) for index in reversed(range(2 * n))][::-1] == epochs[0] + epochs[1]
    rows = [[row for row, *_ in epoch] for epoch in epochs]
    assert sorted(rows[0]) == sorted(rows[1]) and len(set(rows[0])) == n and rows[0] != rows[1]
    held_out = one.eval_prompts()
    assert [prompt.question for prompt in held_out] == [prompt.question for prompt in other.eval_prompts()]
    assert len(held_out) == 3 and all(prompt.is_held_out for prompt in held_out)


@pytest.mark.processes
@pytest.mark.parametrize("name", [*RULES, "tests.extensions.reward:answer_length"])
def test_a_reward_gives_any_answer_a_finite_number_the_same_in_each_thread(name: str) -> None:
    (found,) = open_rewards(make_config(task={"reward": name}), None)  # type: ignore[arg-type]
    messages = ({"role": "user", "content": "1 + 1 ="},)
    question = Question(messages=messages, ground_truth="2", source="additions")
    answers = ["#### 2", "\\boxed{2}", "2", "", "no", "\0", "9" * 999, "\\boxed{" * 99]
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda answer: found.reward.function(question, answer), answers * 2))
    assert all(math.isfinite(score) for score in scores) and scores[:8] == scores[8:]
    assert max(scores[:3]) > scores[3]


@pytest.mark.parametrize("name", ["guess:Guess", "chain:Chain"])
def test_an_environment_plays_the_same_episode_again_for_the_same_index(name: str) -> None:
    make = load_env(f"{ENVIRONMENTS}.{name}", {}, has_questions=False)

    async def play(index: int) -> list[tuple[list[Mapping[str, Any]], float, bool]]:
        env = make(None, index, 0)
        seen: list[tuple[list[Mapping[str, Any]], float, bool]] = [(list(await env.start()), 0.0, False)]
        while not seen[-1][2] and len(seen) < 100:
            step = await env.step(Message(role="assistant", content="nonsense"))
            seen.append((list(step.messages), step.reward, step.done))
        await env.close()
        return seen

    first, again = asyncio.run(play(3)), asyncio.run(play(3))
    assert first == again and first[-1][2]
    assert all(math.isfinite(reward) and (messages or done) for messages, reward, done in first)


OPTIMIZERS = sorted(
    name for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    and name not in ("LBFGS", "Muon", "Optimizer", "SparseAdam")
)  # fmt: skip


@pytest.mark.parametrize("name", [*OPTIMIZERS, "tests.extensions.optimizer:MuonWithAdamW"])
def test_an_optimizer_goes_downhill_and_goes_on_from_what_a_checkpoint_keeps(name: str, one_rank: None) -> None:
    config = learner_config(learner={"optimizer": name, "weight_decay": 0.0}).learner
    layers = [nn.Linear(8, 4) for _ in range(3)]
    start, whole, resumed = layers
    for layer in (whole, resumed):
        layer.load_state_dict(start.state_dict())

    def train(optimizer: Optimizer, steps: int) -> Optimizer:
        for _ in range(steps):
            loss = sum((weight**2).sum() for weight in optimizer.module.parameters())
            loss.backward()
            optimizer.step(loss)
        return optimizer

    optimizer = train(Optimizer("policy", whole, 1e-2, config), 2)
    successor = Optimizer("policy", resumed, 1e-2, config)
    successor.make_state()
    resumed.load_state_dict(whole.state_dict())
    for old, new in zip(whole.parameters(), resumed.parameters(), strict=True):
        kept, into = optimizer.state_of(old), successor.state_of(new)
        assert kept.keys() == into.keys()
        for key, tensor in kept.items():
            into[key].copy_(tensor)
        successor.set_numbers(new, kept)
    successor.set_counts(optimizer.counts())
    for each in (optimizer, successor):
        train(each, 2)
    for before, one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one, other) and one.norm() < before.norm()
