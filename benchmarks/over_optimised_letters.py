"""Trains small policies that over-optimise a reward model within a second each: the runs of guard.py.

A prompt is one of two classes, each with four good and four bad of twelve letters; an answer has up to 16 letters. The
gold reward counts each good letter, at most twice and 0.5 less for each beyond that, takes 1 for each bad one and 0.3
for each letter beyond eight. The reward model learns 300 or fewer comparisons of answers of the supervised policy, and
extrapolates: more of the good letters, longer. Policy gradient on group-normalised rewards; the metrics of its steps
have the names that a run's have.

Policies and reward models have one hidden layer. All runs of a setting are trained at once, each with its own numbers:
R runs, B answers, T tokens of an answer, L letters, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LETTERS, END, PADDING, VOCABULARY = 12, 12, 13, 13
CLASSES, TOKENS = 2, 16
HIDDEN, REWARD_HIDDEN = 64, 32
PROMPTS, GROUP, EVERY, LABELS, HELD_OUT = 8, 12, 4, 64, 256
"""Prompts and answers of a step; steps between two evaluations; answers with a gold label for the guard, and those of
which the true mean is taken."""
Networks = list[Tensor]
"""The weights of a network for each run: [R, I, H], [R, 1, H], [R, H, O], [R, 1, O]."""
Score = Callable[[Tensor, Tensor], Tensor]
"""Rewards of answers by their class and letters. [R, B], [R, B, L] -> [R, B]"""
Record = dict[str, float]


@dataclass(frozen=True, slots=True)
class LettersRun:
    """The settings of a run: its reward, the comparisons of the reward model, the learning rate and the penalty."""

    name: str
    seed: int
    is_gold: bool = False
    """The reward is the gold reward itself."""
    comparisons: int = 300
    lr: float = 3e-3
    beta: float = 0.0
    """The coefficient of the KL penalty on an answer's reward."""
    steps: int = 120

    @property
    def kind(self) -> str:
        """The way in which it is trained."""
        return "gold as the reward" if self.is_gold else "KL penalty" if self.beta else "no penalty"


def train(first: LettersRun, runs: int) -> list[list[Record]]:
    """Train runs that differ in their random numbers alone; return the metrics of the steps and evaluations of each.

    `true/gold` is the mean gold reward of HELD_OUT answers, and `true/kl` the KL to the supervised policy in nats an
    answer; the guard sees neither.
    """
    rng = torch.Generator().manual_seed(first.seed)
    start = [weights.expand(runs, -1, -1).contiguous() for weights in supervised()]
    reward = gold_reward if first.is_gold else reward_models(start, first.comparisons, rng)
    policies = [weights.clone().requires_grad_() for weights in start]
    optimizer = torch.optim.Adam(policies, lr=first.lr, betas=(0.9, 0.99))
    records = [_evaluate(policies, start, reward, 0, rng)]
    for step in range(1, first.steps + 1):
        kinds = torch.randint(CLASSES, (runs, PROMPTS), generator=rng).repeat_interleave(GROUP, 1)
        answers = sample(policies, kinds, rng)
        records.append({"step": step, **_learn(policies, start, optimizer, kinds, answers, reward, first.beta)})
        if step % EVERY == 0:
            records.append(_evaluate(policies, start, reward, step, rng))
    return [
        [{key: float(value[run]) if isinstance(value, Tensor) else value for key, value in record.items()}
         for record in records] for run in range(runs)
    ]  # fmt: skip


def _learn(
    policies: Networks, start: Networks, optimizer: torch.optim.Optimizer, kinds: Tensor, answers: Tensor,
    reward: Score, beta: float,
) -> dict[str, Tensor | float]:  # fmt: skip
    """Move the policies by one step; return the metrics of each run as [R]."""
    mask, letters = mask_of(answers), letters_of(answers)
    rewards, logprobs = reward(kinds, letters), token_logprobs(policies, kinds, answers)
    with torch.no_grad():
        log_ratios = (token_logprobs(start, kinds, answers) - logprobs) * mask
    grouped = (rewards + beta * log_ratios.sum(2)).view(len(kinds), PROMPTS, GROUP)
    advantages = (grouped - grouped.mean(2, keepdim=True)) / (grouped.std(2, keepdim=True) + 1e-4)
    tokens, lengths = mask.sum((1, 2)), mask.sum(2)
    losses = -(advantages.view_as(rewards)[..., None] * logprobs * mask).sum((1, 2)) / tokens
    optimizer.zero_grad()
    losses.sum().backward()
    gradients = [weights.grad for weights in policies if weights.grad is not None]
    norm = sum(gradient.square().sum((1, 2)) for gradient in gradients).sqrt().clamp(min=1)  # type: ignore[union-attr]
    for gradient in gradients:
        gradient /= norm[:, None, None]
    optimizer.step()
    is_cut = (answers != END).all(2) & (lengths == TOKENS)
    distinct = ((letters > 0).sum(2) + ~is_cut) / lengths
    return {
        "batch/episodes": float(PROMPTS * GROUP), "response/length_mean": lengths.mean(1),
        "response/truncated_fraction": is_cut.float().mean(1), "response/distinct_fraction": distinct.mean(1),
        "kl/reference": ((log_ratios.exp() - 1 - log_ratios) * mask).sum((1, 2)) / tokens,
        "reward/mean": rewards.mean(1), "reward/std": rewards.std(1, correction=0),
    }  # fmt: skip


@torch.no_grad()
def _evaluate(
    policies: Networks, start: Networks, reward: Score, step: int, rng: torch.Generator
) -> dict[str, Tensor | float]:
    """Return the metrics of an evaluation of each run as [R]."""
    kinds = (torch.arange(HELD_OUT) % CLASSES).expand(len(policies[0]), -1)
    answers = sample(policies, kinds, rng)
    letters, mask = letters_of(answers), mask_of(answers)
    log_ratios = token_logprobs(policies, kinds, answers) - token_logprobs(start, kinds, answers)
    gold, proxy = gold_reward(kinds, letters).double(), reward(kinds, letters).double()
    seen, rewards = gold[:, :LABELS], proxy[:, :LABELS]
    return {
        "step": step, "true/gold": gold.mean(1), "true/kl": (log_ratios * mask).sum((1, 2)) / HELD_OUT,
        "eval/gold": seen.mean(1), "eval/gold_squared": seen.square().mean(1), "eval/gold_labels": float(LABELS),
        "eval/proxy": rewards.mean(1), "eval/proxy_squared": rewards.square().mean(1),
        "eval/gold_times_proxy": (seen * rewards).mean(1),
    }  # fmt: skip


def supervised(steps: int = 150) -> Networks:
    """Return a policy, R = 1, of mediocre demonstrations: letters at random, about seven of them."""
    rng = torch.Generator().manual_seed(0)
    inputs = 2 * LETTERS + CLASSES + 2
    policy = [weights.requires_grad_() for weights in new_networks(1, inputs, HIDDEN, VOCABULARY, rng, scale=0.1)]
    optimizer = torch.optim.Adam(policy, lr=5e-3, betas=(0.9, 0.99))
    for _ in range(steps):
        kinds = torch.randint(CLASSES, (1, 128), generator=rng)
        lengths = torch.empty(1, 128, 1).geometric_(0.15, generator=rng).clamp(max=TOKENS - 1)
        drawn, place = torch.randint(LETTERS, (1, 128, TOKENS), generator=rng), torch.arange(TOKENS)
        answers = torch.where(place < lengths, drawn, torch.where(place == lengths, END, PADDING))
        mask = mask_of(answers)
        loss = -(token_logprobs(policy, kinds, answers) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [weights.detach() for weights in policy]


def reward_models(start: Networks, comparisons: int, rng: torch.Generator, steps: int = 250) -> Score:
    """Return a Bradley-Terry model for each run, of comparisons of answers of its supervised policy.

    Its rewards of such answers have mean 0 and deviation 1.
    """
    runs = len(start[0])
    kinds = torch.randint(CLASSES, (runs, comparisons), generator=rng)
    first, second = (letters_of(sample(start, kinds, rng)) for _ in range(2))
    ahead = (gold_reward(kinds, first) - gold_reward(kinds, second)).sign()
    models = new_networks(runs, 2 * LETTERS + 1, REWARD_HIDDEN, 1, rng)
    optimizer = torch.optim.Adam([weights.requires_grad_() for weights in models], lr=5e-3, betas=(0.9, 0.99))

    def score(kinds: Tensor, letters: Tensor) -> Tensor:
        length = letters.sum(2, keepdim=True) / 4
        return outputs_of(models, torch.cat([_by_class(kinds, letters), length], 2) / 2)[..., 0]

    for _ in range(steps):
        picked = torch.randint(comparisons, (runs, 48), generator=rng)
        rows = picked[..., None].expand(-1, -1, LETTERS)
        asked = kinds.gather(1, picked)
        margin = score(asked, first.gather(1, rows)) - score(asked, second.gather(1, rows))
        sign = ahead.gather(1, picked)
        loss = -(F.logsigmoid(margin * sign) * sign.abs()).mean(1).sum()  # answers of equal gold are no comparison
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weights in models:
        weights.requires_grad_(False)
    scores = torch.cat([score(kinds, first), score(kinds, second)], 1)
    mean, deviation = scores.mean(1, keepdim=True), scores.std(1, keepdim=True)
    return lambda kinds, letters: (score(kinds, letters) - mean) / deviation


def gold_reward(kinds: Tensor, letters: Tensor) -> Tensor:
    """Return the gold reward of each answer, at most 8. [R, B], [R, B, L] -> [R, B]"""
    place = (torch.arange(LETTERS) - 4 * kinds[..., None]) % LETTERS  # 0..3 good, 4..7 bad
    liked = letters.clamp(max=2) - 0.5 * (letters - 2).clamp(min=0)
    value = torch.where(place < 4, liked, torch.where(place < 8, -letters, 0.0)).sum(2)
    return value - 0.3 * (letters.sum(2) - 8).clamp(min=0)


def mask_of(answers: Tensor) -> Tensor:
    """Return 1.0 for each token of an answer, END with it."""
    return (answers != PADDING).float()


def letters_of(answers: Tensor) -> Tensor:
    """Return how often an answer has each letter. [R, B, T] -> [R, B, L]"""
    return F.one_hot(answers, PADDING + 1)[..., :LETTERS].sum(2).float()


@torch.no_grad()
def sample(policies: Networks, kinds: Tensor, rng: torch.Generator) -> Tensor:
    """Return sampled answers, padded with PADDING. [R, B] -> [R, B, T]"""
    answers = torch.full((*kinds.shape, TOKENS), PADDING)
    letters = torch.zeros(*kinds.shape, LETTERS)
    is_done = torch.zeros(kinds.shape, dtype=torch.bool)
    for place in range(TOKENS):
        logits = _logits(policies, kinds, letters, torch.full((*kinds.shape, 1), float(place)))
        drawn = torch.multinomial(logits.softmax(2).flatten(0, 1), 1, generator=rng).view_as(kinds)
        answers[..., place] = torch.where(is_done, PADDING, drawn)
        is_done |= drawn == END
        letters = letters_of(answers)
    return answers


def token_logprobs(policies: Networks, kinds: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each token of the answers; that of padding means nothing. [R, B, T]"""
    runs, size, _ = answers.shape
    one_hot = F.one_hot(answers, PADDING + 1)[..., :LETTERS].float()
    before = (one_hot.cumsum(2) - one_hot).view(runs, size * TOKENS, LETTERS)
    places = torch.arange(TOKENS).float().repeat(runs, size)[..., None]
    logits = _logits(policies, kinds.repeat_interleave(TOKENS, 1), before, places).view(runs, size, TOKENS, VOCABULARY)
    return logits.log_softmax(3).gather(3, answers.clamp(max=END)[..., None])[..., 0]


def _logits(policies: Networks, kinds: Tensor, letters: Tensor, places: Tensor) -> Tensor:
    """Return the logits of the next token, given the class, the letters before it and its place; an answer has a letter
    at least. [R, N], [R, N, L], [R, N, 1] -> [R, N, V]
    """
    length = letters.sum(2, keepdim=True)
    classes = F.one_hot(kinds, CLASSES).float()
    inputs = torch.cat([_by_class(kinds, letters) / 2, classes, places / 8, length / 8], 2)
    logits = outputs_of(policies, inputs)
    is_first_end = F.pad(places == 0, (END, 0))
    return logits.masked_fill(is_first_end, -1e9)


def _by_class(kinds: Tensor, letters: Tensor) -> Tensor:
    """Return the letters in the places of their class, and 0 in those of the other. [R, N, L] -> [R, N, 2 L]"""
    return (F.one_hot(kinds, CLASSES)[..., None] * letters[..., None, :]).flatten(2)


def new_networks(
    runs: int, inputs: int, hidden: int, size: int, rng: torch.Generator, scale: float = 1.0
) -> Networks:
    """Return networks with random weights, whose outputs have about the deviation `scale`."""
    first = torch.randn(runs, inputs, hidden, generator=rng) / math.sqrt(inputs)
    second = torch.randn(runs, hidden, size, generator=rng) * scale / math.sqrt(hidden)
    return [first, torch.zeros(runs, 1, hidden), second, torch.zeros(runs, 1, size)]


def outputs_of(networks: Networks, x: Tensor) -> Tensor:
    """Return the outputs of the network of each run. [R, N, I] -> [R, N, O]"""
    first, first_bias, second, second_bias = networks
    return torch.baddbmm(second_bias, torch.relu(torch.baddbmm(first_bias, x, first)), second)
