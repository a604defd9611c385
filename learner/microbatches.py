"""From rollouts to padded rows, micro-batches and ranks: a deterministic plan, the same on every rank.

A row is a prompt followed by k answers to it, so that a group's shared prompt is computed once:

    prompt | answer 1 | answer 2 | ... | answer k | padding

An answer attends to the prompt and to itself, and its positions continue those of the prompt: exactly the k
sequences prompt + answer, without k - 1 copies of the prompt. The last token of an answer predicts nothing
that is trained, so it isn't fed. Rows of one answer are plain causal sequences and need no attention mask:
padding is on the right, where nothing trained looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.types import Batch, FloatArray, Rollout, RolloutGroup

PADDING = -1
"""Segment of padding; 0 is the prompt, 1..k are the answers."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with `answers`, the indices of some rollouts of `groups[group]`."""

    group: int
    answers: tuple[int, ...]
    length: int


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass. N counts response tokens, answer after answer.

    One without rows keeps a rank in step with the others' collectives: a single token that isn't trained.
    """

    tokens: Tensor  # [B, S] int64
    segments: Tensor | None  # [B, S] int64; None: all rows are plain causal
    positions: Tensor | None  # [B, S] int64; None with segments
    where: Tensor  # [N] index into B * S of the token whose output predicts the response token
    targets: Tensor  # [N] int64 response tokens
    temperature: Tensor  # [N] float32 logged temperature
    behaviour: Tensor  # [N] float32 behaviour logprobs, 0 where not trained
    trained: Tensor  # [N] bool
    comparable: Tensor  # [N] bool: sampled by version `batch.version` and from KV of the same version
    staleness: Tensor  # [N] int64, batch.version - token version
    rewards: Tensor  # [k] float32, one for each answer
    advantages: Tensor  # [N] float32; zeros with a critic, whose advantages follow from its values
    lengths: tuple[int, ...]
    """T of each answer; they add up to N."""
    proximal: Tensor | None = None  # [N] set when it must outlive the first optimizer step
    values: Tensor | None = None  # [N] of the critic at step start, likewise
    reference: Tensor | None = None  # [N] logprobs of the frozen reference; set where a KL term asks for them


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of what one optimizer step sees."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    """Trained tokens of all ranks: the critic's loss is a sum over tokens divided by this."""
    normaliser: float
    """What the policy's summed loss is divided by, the same on all ranks."""


def split_minibatches(
    group_sizes: Sequence[int], count: int, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    """All (group, answer) pairs in `count` parts of equal size, give or take one; groups are shuffled."""
    order = rng.permutation(len(group_sizes))
    pairs = [(int(group), answer) for group in order for answer in range(group_sizes[group])]
    edges = [len(pairs) * i // count for i in range(count + 1)]
    return [pairs[a:b] for a, b in itertools.pairwise(edges)]


def make_rows(
    groups: Sequence[RolloutGroup],
    pairs: Sequence[tuple[int, int]],
    max_tokens: int,
    max_answers: int,
) -> list[Row]:
    """Rows of at most `max_answers` answers and `max_tokens` tokens; a longer single answer gets its row.

    With prompt length P and fed answer tokens that add up to R, k answers share a row while R^2 <= k * P^2.
    Such a row never costs more than k rows do: linear layers see P + R <= kP + R tokens, attention sees
    (P + R)^2 <= k * (P + R / k)^2 pairs (the difference is (k - 1) * (P^2 - R^2 / k)).
    """
    by_group: dict[int, list[int]] = {}
    for group, answer in pairs:
        by_group.setdefault(group, []).append(answer)
    rows = []
    for group, answers in by_group.items():
        prompt = len(groups[group].prompt_tokens)
        taken: list[int] = []
        fed = 0
        for answer in answers:
            more = len(groups[group].rollouts[answer].tokens) - 1
            k = len(taken) + 1
            fits = (
                prompt + fed + more <= max_tokens and k <= max_answers and (fed + more) ** 2 <= k * prompt**2
            )
            if taken and not fits:
                rows.append(Row(group, tuple(taken), prompt + fed))
                taken, fed = [], 0
            taken.append(answer)
            fed += more
        rows.append(Row(group, tuple(taken), prompt + fed))
    return rows


def plan_microbatches(rows: Sequence[Row], ranks: int, max_tokens: int) -> list[list[list[Row]]]:
    """Rows of every micro-batch of every rank, indexed [rank][micro-batch].

    Longest row first to the rank with the fewest tokens so far, then cut where rows * longest row would
    exceed `max_tokens`. Ranks with fewer micro-batches get empty ones: collectives need equal counts.
    """
    loads = [0] * ranks
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    for row in sorted(rows, key=lambda row: -row.length):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += row.length
    plan: list[list[list[Row]]] = []
    for share in shares:
        cuts: list[list[Row]] = []
        for row in share:
            if not cuts or (len(cuts[-1]) + 1) * cuts[-1][0].length > max_tokens:
                cuts.append([])
            cuts[-1].append(row)
        plan.append(cuts)
    most = max(len(cuts) for cuts in plan)
    return [cuts + [[] for _ in range(most - len(cuts))] for cuts in plan]


def collate(
    batch: Batch,
    rows: Sequence[Row],
    advantages: Sequence[Sequence[FloatArray]],  # [group][answer], [T] each
    device: torch.device,
) -> MicroBatch:
    """Tensors of the rows, on `device`."""
    if not rows:
        return _empty(device)
    width = max(row.length for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), PADDING, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    where: list[np.ndarray] = []
    answers: list[tuple[RolloutGroup, Rollout, FloatArray]] = []
    for b, row in enumerate(rows):
        group = batch.groups[row.group]
        start = prompt = len(group.prompt_tokens)
        tokens[b, :prompt] = group.prompt_tokens
        segments[b, :prompt] = 0
        positions[b, :prompt] = np.arange(prompt)
        for segment, answer in enumerate(row.answers, 1):
            rollout = group.rollouts[answer]
            fed = len(rollout.tokens) - 1
            tokens[b, start : start + fed] = rollout.tokens[:-1]
            segments[b, start : start + fed] = segment
            positions[b, start : start + fed] = np.arange(prompt, prompt + fed)
            where.append(b * width + np.concatenate([[prompt - 1], np.arange(start, start + fed)]))
            answers.append((group, rollout, advantages[row.group][answer]))
            start += fed
    shared = any(len(row.answers) > 1 for row in rows)
    lengths = tuple(len(rollout.tokens) for _, rollout, _ in answers)
    trained = np.concatenate([rollout.mask for _, rollout, _ in answers])
    behaviour = np.concatenate([rollout.logprobs for _, rollout, _ in answers])
    comparable = np.concatenate([rollout.versions == batch.version for _, rollout, _ in answers]) & np.repeat(
        [group.start_version == batch.version for group, _, _ in answers], lengths
    )

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device, dtype, non_blocking=True)

    return MicroBatch(
        tokens=tensor(tokens, torch.int64),
        segments=tensor(segments, torch.int64) if shared else None,
        positions=tensor(positions, torch.int64) if shared else None,
        where=tensor(np.concatenate(where), torch.int64),
        targets=tensor(np.concatenate([rollout.tokens for _, rollout, _ in answers]), torch.int64),
        temperature=tensor(np.repeat([group.temperature for group, _, _ in answers], lengths), torch.float32),
        behaviour=tensor(np.where(trained, behaviour, 0.0), torch.float32),
        trained=tensor(trained, torch.bool),
        comparable=tensor(comparable, torch.bool),
        staleness=tensor(batch.version - np.concatenate([r.versions for _, r, _ in answers]), torch.int64),
        rewards=tensor(np.array([rollout.reward for _, rollout, _ in answers]), torch.float32),
        advantages=tensor(np.concatenate([advantage for _, _, advantage in answers]), torch.float32),
        lengths=lengths,
    )


def attention_mask(
    segments: Tensor,  # [B, S]
    dtype: torch.dtype,
) -> Tensor:
    """Added to attention scores: 0 where a token may look, the lowest number elsewhere; [B, 1, S, S]."""
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    allowed = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~(allowed & causal), torch.finfo(dtype).min)[:, None]


def _empty(device: torch.device) -> MicroBatch:
    zeros = torch.zeros(1, device=device)
    return MicroBatch(
        tokens=zeros[None].long(),
        segments=None,
        positions=None,
        where=zeros.long(),
        targets=zeros.long(),
        temperature=torch.ones_like(zeros),
        behaviour=zeros,
        trained=zeros.bool(),
        comparable=zeros.bool(),
        staleness=zeros.long(),
        rewards=zeros,
        advantages=zeros,
        lengths=(1,),
    )
