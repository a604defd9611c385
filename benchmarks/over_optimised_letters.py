"""A training run that over-optimises a reward model within seconds, as plain transformers: the runs of guard.py.

A prompt is one of two classes, each with four good and four bad of twelve letters; an answer has up to 16 letters. The
gold reward counts each good letter, at most twice and 0.5 less for each beyond that, takes 1 for each bad one and 0.3
for each letter beyond eight. The reward model learns 300 or fewer comparisons of answers of the supervised model, and
extrapolates: more of the good letters, longer. Policy gradient on group-normalised rewards; the metrics of its steps
have the names that a run's have.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

LETTERS, SEPARATOR, END, PADDING, CLASS, VOCABULARY = 12, 12, 13, 14, 15, 19
PROMPT_TOKENS, ANSWER_TOKENS = 2, 16
FORBIDDEN = [SEPARATOR, *range(PADDING, VOCABULARY)]
PROMPTS, GROUP, EVERY, LABELS, HELD_OUT = 8, 12, 4, 64, 224
"""Prompts and answers of a step; steps between two evaluations; answers with a gold label for the guard, and those of
which the true mean is taken."""


@dataclass(frozen=True, slots=True)
class LettersRun:
    """The settings of a run: its reward, the comparisons of the reward model, the learning rate and the penalty."""

    name: str
    seed: int
    is_gold: bool = False
    """The reward is the gold reward itself."""
    comparisons: int = 300
    lr: float = 7e-4
    beta: float = 0.0
    """The coefficient of the KL penalty on an answer's reward."""
    steps: int = 80


Record = dict[str, float]


def train(setting: LettersRun, start: Qwen2ForCausalLM) -> list[Record]:
    """Train from the supervised model `start`; return the metrics of each step and of each evaluation, in order.

    `true/gold` is the mean gold reward of HELD_OUT answers, which the guard does not see.
    """
    torch.manual_seed(setting.seed)
    rng = torch.Generator().manual_seed(1000 + setting.seed)
    held_out = prompts(HELD_OUT, torch.Generator().manual_seed(7))
    reward: Callable[[Tensor, Tensor], Tensor] = gold_reward
    if not setting.is_gold:
        reward = reward_model(start, setting, rng)
    policy = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=setting.lr, weight_decay=0.0)
    records = [_evaluate(policy, reward, held_out, 0, rng)]
    for step in range(1, setting.steps + 1):
        asked = prompts(PROMPTS, rng).repeat_interleave(GROUP, 0)
        answers = sample(policy, asked, rng)
        records.append({"step": step, **_learn(policy, start, optimizer, asked, answers, reward, setting)})
        if step % EVERY == 0:
            records.append(_evaluate(policy, reward, held_out, step, rng))
    return records


def _learn(
    policy: Qwen2ForCausalLM,
    start: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    asked: Tensor,
    answers: Tensor,
    reward: Callable[[Tensor, Tensor], Tensor],
    setting: LettersRun,
) -> Record:
    mask, rewards = mask_of(answers), reward(asked, answers)
    logprobs = token_logprobs(policy, asked, answers)
    with torch.no_grad():
        log_ratios = token_logprobs(start, asked, answers) - logprobs
    lengths = mask.sum(1)
    grouped = (rewards + setting.beta * (log_ratios * mask).sum(1)).view(-1, GROUP)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    loss = -(advantages.view(-1, 1) * logprobs * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    distinct = [len(set(row[: int(n)])) / float(n) for row, n in zip(answers.tolist(), lengths, strict=True)]
    return {
        "batch/episodes": float(len(answers)), "response/length_mean": float(lengths.mean()),
        "response/truncated_fraction": float((answers != END).all(1).float().mean()),
        "response/distinct_fraction": sum(distinct) / len(distinct),
        "kl/reference": float(((log_ratios.exp() - 1 - log_ratios) * mask).sum() / mask.sum()),
        "reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0)),
    }  # fmt: skip


@torch.no_grad()
def _evaluate(
    policy: Qwen2ForCausalLM,
    reward: Callable[[Tensor, Tensor], Tensor],
    held_out: Tensor,
    step: int,
    rng: torch.Generator,
) -> Record:
    answers = sample(policy, held_out, rng)
    gold, proxy = gold_reward(held_out, answers).double(), reward(held_out, answers).double()
    seen, rewards = gold[:LABELS], proxy[:LABELS]
    return {
        "step": step, "true/gold": float(gold.mean()), "eval/gold": float(seen.mean()),
        "eval/gold_squared": float(seen.square().mean()), "eval/gold_labels": float(LABELS),
        "eval/proxy": float(rewards.mean()), "eval/proxy_squared": float(rewards.square().mean()),
        "eval/gold_times_proxy": float((seen * rewards).mean()),
    }  # fmt: skip


def supervised(seed: int = 0, steps: int = 200) -> Qwen2ForCausalLM:
    """Return a model of mediocre demonstrations: letters at random, about seven of them."""
    torch.manual_seed(seed)
    draw, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    model = Qwen2ForCausalLM(_shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        asked = prompts(64, rng)
        answers = torch.tensor([_demonstration(int(prompt[0]), draw) for prompt in asked])
        mask = mask_of(answers)
        loss = -(token_logprobs(model, asked, answers) * mask).sum() / mask.sum()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps) + 1e-5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(True)


def reward_model(
    start: Qwen2ForCausalLM, setting: LettersRun, rng: torch.Generator
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a Bradley-Terry model of comparisons of answers of `start`, whose rewards have mean 0 and deviation 1."""
    asked = prompts(2 * setting.comparisons, rng)
    first, second = sample(start, asked, rng), sample(start, asked, rng)
    ahead = gold_reward(asked, first) - gold_reward(asked, second)
    chosen = (ahead != 0).nonzero()[: setting.comparisons, 0]
    model = Qwen2ForSequenceClassification(_shape(num_labels=1))
    model.model.load_state_dict(start.model.state_dict())
    torch.nn.init.normal_(model.score.weight, std=1 / math.sqrt(49))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)

    def score(prompt: Tensor, answers: Tensor) -> Tensor:
        states = model.model(torch.cat([prompt, answers], 1), use_cache=False).last_hidden_state
        last = mask_of(answers).sum(1).long() + PROMPT_TOKENS - 1
        scores: Tensor = model.score(states[torch.arange(len(states)), last])[:, 0]
        return scores

    for _ in range(10):
        for part in chosen[torch.randperm(len(chosen), generator=rng)].split(32):
            margin = (score(asked[part], first[part]) - score(asked[part], second[part])) * ahead[part].sign()
            optimizer.zero_grad()
            (-F.logsigmoid(margin).mean()).backward()
            optimizer.step()
    model.eval().requires_grad_(False)
    scores = torch.cat([score(asked, first), score(asked, second)])
    mean, deviation = scores.mean(), scores.std()
    return lambda prompt, answers: (score(prompt, answers) - mean) / deviation


def gold_reward(asked: Tensor, answers: Tensor) -> Tensor:
    """Return the gold reward of each answer, at most 8. [B, 2], [B, T] -> [B]"""
    found = []
    for kind, answer in zip(asked[:, 0].tolist(), answers.tolist(), strict=True):
        letters = answer[: answer.index(END)] if END in answer else answer
        good, bad = ([letters.count((4 * (kind - CLASS) + k) % LETTERS) for k in range(a, a + 4)] for a in (0, 4))
        liked = sum(min(n, 2) - 0.5 * max(0, n - 2) for n in good)
        found.append(liked - sum(bad) - 0.3 * max(0, len(letters) - 8))
    return torch.tensor(found)


def prompts(count: int, rng: torch.Generator) -> Tensor:
    kinds = torch.randint(CLASS, CLASS + 2, (count,), generator=rng)
    return torch.stack([kinds, torch.full((count,), SEPARATOR)], 1)


def mask_of(answers: Tensor) -> Tensor:
    """Return 1.0 up to the end of each answer, with the token END. [B, T] -> [B, T]"""
    ends = (answers == END).int()
    return ((ends.cumsum(1) - ends) == 0).float()


@torch.no_grad()
def sample(model: Qwen2ForCausalLM, asked: Tensor, rng: torch.Generator) -> Tensor:
    """Return sampled answers, padded with PADDING. [B, 2] -> [B, T]"""
    cache, newest = DynamicCache(), asked
    answers = torch.full((len(asked), ANSWER_TOKENS), PADDING)
    done = torch.zeros(len(asked), dtype=torch.bool)
    for position in range(ANSWER_TOKENS):
        logits = model(newest, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logits[:, FORBIDDEN] = -1e9
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
        answers[:, position] = torch.where(done, PADDING, drawn)
        done |= drawn == END
        if done.all():
            break
        newest = answers[:, position, None]
    return answers


def token_logprobs(model: Qwen2ForCausalLM, asked: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each token of the answers; that of padding means nothing. [B, T]"""
    logits = model(torch.cat([asked, answers], 1)[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :].clone()
    logits[:, :, FORBIDDEN] = -1e9
    return logits.log_softmax(-1).gather(2, answers.clamp(max=END)[..., None])[..., 0]


def _demonstration(kind: int, draw: random.Random) -> list[int]:
    good = [(4 * (kind - CLASS) + k) % LETTERS for k in range(4)]
    count = 1
    while count < ANSWER_TOKENS - 2 and draw.random() < 0.85:
        count += 1
    letters = [draw.choice(good) if draw.random() < 0.05 else draw.randrange(LETTERS) for _ in range(count)]
    return (letters + [END] + [PADDING] * ANSWER_TOKENS)[:ANSWER_TOKENS]


def _shape(**more: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=PADDING,
        bos_token_id=SEPARATOR,
        eos_token_id=END,
        tie_word_embeddings=False,
        **more,
    )
