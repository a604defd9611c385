"""From rollouts to packed rows, micro-batches and ranks: a deterministic plan, the same on every rank.

A piece is a prompt followed by k answers to it, so that a group's shared prompt is computed once; a row is one or
more pieces, so that little is padding:

    prompt a | answer 1 | answer 2 | prompt b | answer 3 | padding

An answer attends to its prompt and to itself, and its positions continue those of the prompt: exactly the
sequences prompt + answer, without copies of the prompt. The last token of an answer predicts nothing that is
trained, so it isn't fed. Rows of one answer are plain causal sequences and need no attention mask: padding is on
the right, where nothing trained looks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_rl.types import Batch, FloatArray, IntArray, RolloutGroup

PADDING = -1
"""Segment of padding; the prompts and answers of a row count from 0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt with `answers`, the indices of some rollouts of `groups[group]`."""

    group: int
    answers: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What the attention of all networks can do with a row."""

    masked: bool
    """It takes a mask, so answers may share a prompt and pieces a row."""
    sparse: bool = False
    """It skips what is masked, or cuts where positions restart: a micro-batch is one row without padding. Else each
    token pays for the width of its row, and pieces share rows no wider than the longest piece."""
    pair_cost: float = 0.0
    """Cost of a pair of positions in attention, in tokens; 1 / (6 * hidden) for a common transformer."""

    def for_both(self, other: Layout) -> Layout:
        """What two networks can do with the same rows."""
        return Layout(self.masked and other.masked, self.sparse and other.sparse, max(self.pair_cost, other.pair_cost))


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass. N counts response tokens, answer after answer.

    One without rows keeps a rank in step with the others' collectives: a single token that isn't trained.
    """

    tokens: Tensor  # [B, S] int64
    segments: Tensor | None  # [2, B, S] int64 of each token and of its prompt; None: all rows are plain causal
    positions: Tensor | None  # [B, S] int64; None with segments
    where: Tensor  # [N] index into B * S of the token whose output predicts the response token
    targets: Tensor  # [N] int64 response tokens
    temperature: Tensor  # [N] float32 logged temperature
    behaviour: Tensor  # [N] float32 behaviour logprobs, 0 where not trained
    trained: Tensor  # [N] bool
    comparable: Tensor  # [N] bool: sampled by version `batch.version` and from KV of the same version
    staleness: Tensor  # [N] int64, batch.version - token version
    old_kv: Tensor  # [N] bool: sampled by version `batch.version`, but maybe from KV of older ones
    rewards: Tensor  # [k] float32, one for each answer
    advantages: Tensor  # [N] float32; zeros with a critic, whose advantages follow from its values
    lengths: tuple[int, ...]
    """T of each answer; they add up to N."""
    answers: tuple[tuple[int, int], ...]
    """(group, answer) of each, in the batch."""
    too_old: Tensor | None = None  # [k] float32 tokens of each answer that only their age leaves out; None: none
    proximal: Tensor | None = None  # [N] set when it must outlive the first optimizer step
    learner: Tensor | None = None  # [N] learner logprobs of the latest forward pass, detached
    values: Tensor | None = None  # [N] of the critic at step start, likewise
    reference: Tensor | None = None  # [N] logprobs of the frozen reference; set where a KL term asks for them
    m2po_limit: float = math.inf
    """Largest (log rho)^2 that the M2PO mask leaves in the minibatch."""
    mean_weight: float = 1.0
    """What weights are divided by: their mean over the minibatch where they are batch-normalised."""


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


def make_pieces(
    groups: Sequence[RolloutGroup],
    pairs: Sequence[tuple[int, int]],
    max_tokens: int,
    max_answers: int,
    layout: Layout,
) -> list[Piece]:
    """Pieces of at most `max_answers` answers and `max_tokens` tokens; a longer single answer gets its piece.

    With prompt length P and fed answer tokens that add up to R, k answers share a piece while R^2 <= k * P^2, and
    always where attention is sparse. Such a piece never costs more than k do: linear layers see P + R <= kP + R
    tokens, dense attention sees (P + R)^2 <= k * (P + R / k)^2 pairs (the difference is (k - 1) * (P^2 - R^2 / k)).
    """
    by_group: dict[int, list[int]] = {}
    for group, answer in pairs:
        by_group.setdefault(group, []).append(answer)
    pieces = []
    for group, answers in by_group.items():
        prompt = len(groups[group].prompt_tokens)
        taken: list[int] = []
        fed = 0
        for answer in answers:
            more = len(groups[group].rollouts[answer].tokens) - 1
            k = len(taken) + 1
            fits = prompt + fed + more <= max_tokens and k <= max_answers and layout.masked
            if taken and not (fits and (layout.sparse or (fed + more) ** 2 <= k * prompt**2)):
                pieces.append(Piece(group, tuple(taken), prompt + fed))
                taken, fed = [], 0
            taken.append(answer)
            fed += more
        pieces.append(Piece(group, tuple(taken), prompt + fed))
    return pieces


def plan_microbatches(
    pieces: Sequence[Piece], ranks: int, max_tokens: int, layout: Layout
) -> list[list[list[list[Piece]]]]:
    """Rows of every micro-batch of every rank, indexed [rank][micro-batch][row].

    Longest piece first to the rank with the fewest tokens so far; each rank packs its own, or leaves one piece a
    row where that is cheaper. Ranks with fewer micro-batches get empty ones: collectives need equal counts.
    """
    loads = [0] * ranks
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        rank = loads.index(min(loads))
        shares[rank].append(piece)
        loads[rank] += piece.length
    plan = []
    for share in shares:
        packings = [_pack(share, max_tokens, layout.sparse, may_share_rows=layout.sparse)]
        if layout.masked and not layout.sparse:
            packings.append(_pack(share, max_tokens, False, may_share_rows=True))
        plan.append(min(packings, key=lambda packing: sum(_cost(rows, layout.pair_cost) for rows in packing)))
    most = max(len(cuts) for cuts in plan)
    return [cuts + [[] for _ in range(most - len(cuts))] for cuts in plan]


def _pack(
    share: Sequence[Piece], max_tokens: int, is_sparse: bool, may_share_rows: bool
) -> list[list[list[Piece]]]:
    """First-fit: each piece, longest first, goes into the first row with room, else into a new row of the last
    micro-batch, else into a new micro-batch.

    The first piece of a micro-batch sets the width of its rows (of one row as wide as the budget where attention is
    sparse), and rows * width stays within `max_tokens`.
    """
    cuts: list[list[list[Piece]]] = []
    width = 0
    room: list[tuple[int, list[Piece]]] = []  # of rows that the shortest piece would fit in
    for piece in share:
        if may_share_rows:
            found = next((i for i, (free, _) in enumerate(room) if piece.length <= free), None)
            if found is not None:
                free, row = room[found]
                row.append(piece)
                room[found] = (free - piece.length, row)
                if room[found][0] < share[-1].length:
                    del room[found]
                continue
        if not cuts or (len(cuts[-1]) + 1) * width > max_tokens:
            width = max(max_tokens, piece.length) if is_sparse else piece.length
            cuts.append([])
        row = [piece]
        cuts[-1].append(row)
        room.append((width - piece.length, row))
    return cuts


def _cost(rows: Sequence[Sequence[Piece]], pair_cost: float) -> float:
    """Of a micro-batch, in tokens; causal attention without a mask leaves half of the pairs out."""
    width = max(sum(piece.length for piece in row) for row in rows)
    return len(rows) * width * (1 + pair_cost * width * (1.0 if _needs_mask(rows) else 0.5))


def _needs_mask(rows: Sequence[Sequence[Piece]]) -> bool:
    return any(len(row) > 1 or len(row[0].answers) > 1 for row in rows)


def collate(
    batch: Batch,
    rows: Sequence[Sequence[Piece]],
    advantages: Sequence[Sequence[FloatArray]],  # [group][answer], [T] each
    device: torch.device,
) -> MicroBatch:
    """Tensors of the rows, on `device`."""
    if not rows:
        return _empty(device)
    width = max(sum(piece.length for piece in row) for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    segments = np.full((2, len(rows), width), PADDING, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    where: list[np.ndarray] = []
    answers: list[tuple[int, int]] = []
    for b, row in enumerate(rows):
        start = 0
        for segment, part in enumerate(_parts(batch.groups, row)):
            end = start + len(part.fed)
            tokens[b, start:end] = part.fed
            segments[:, b, start:end] = [[segment], [part.root]]
            positions[b, start:end] = np.arange(part.first_position, part.first_position + end - start)
            if part.answer is None:
                last_of_prompt = end - 1
            else:
                where.append(b * width + np.concatenate([[last_of_prompt], np.arange(start, end)]))
                answers.append(part.answer)
            start = end
    pairs = [(batch.groups[g], batch.groups[g].rollouts[i]) for g, i in answers]
    lengths = tuple(len(rollout.tokens) for _, rollout in pairs)
    trained = np.concatenate([rollout.mask for _, rollout in pairs])
    behaviour = np.concatenate([rollout.logprobs for _, rollout in pairs])
    staleness = batch.version - np.concatenate([rollout.versions for _, rollout in pairs])
    old_kv = np.concatenate([group.old_kv(rollout) for group, rollout in pairs])

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device, dtype, non_blocking=True)

    parted = _needs_mask(rows)
    return MicroBatch(
        tokens=tensor(tokens, torch.int64),
        segments=tensor(segments, torch.int64) if parted else None,
        positions=tensor(positions, torch.int64) if parted else None,
        where=tensor(np.concatenate(where), torch.int64),
        targets=tensor(np.concatenate([rollout.tokens for _, rollout in pairs]), torch.int64),
        temperature=tensor(np.repeat([group.temperature for group, _ in pairs], lengths), torch.float32),
        behaviour=tensor(np.where(trained, behaviour, 0.0), torch.float32),
        trained=tensor(trained, torch.bool),
        comparable=tensor((staleness == 0) & ~old_kv, torch.bool),
        old_kv=tensor((staleness == 0) & old_kv, torch.bool),
        staleness=tensor(staleness, torch.int64),
        rewards=tensor(np.array([rollout.reward for _, rollout in pairs]), torch.float32),
        advantages=tensor(np.concatenate([advantages[g][i] for g, i in answers]), torch.float32),
        lengths=lengths,
        answers=tuple(answers),
        too_old=tensor(np.array([rollout.num_too_old for _, rollout in pairs]), torch.float32),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A prompt or an answer as it is fed."""

    fed: IntArray
    first_position: int
    root: int
    """Segment of its prompt, in its row."""
    answer: tuple[int, int] | None
    """(group, answer); None for a prompt."""


def _parts(groups: Sequence[RolloutGroup], row: Sequence[Piece]) -> Iterator[_Part]:
    root = 0
    for piece in row:
        group = groups[piece.group]
        yield _Part(group.prompt_tokens, 0, root, None)
        for answer in piece.answers:
            fed = group.rollouts[answer].tokens[:-1]
            yield _Part(fed, len(group.prompt_tokens), root, (piece.group, answer))
        root += 1 + len(piece.answers)


def attention_mask(
    segments: Tensor,  # [2, B, S] segment of each token and of its prompt
    dtype: torch.dtype,
) -> Tensor:
    """Added to attention scores: 0 where a token may look, the lowest number elsewhere; [B, 1, S, S]."""
    allowed = may_look(segments, 0, segments.shape[2])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def may_look(segments: Tensor, start: int, end: int) -> Tensor:
    """Of the tokens start..end: at their own segment and their prompt's, and not ahead; [B, end - start, S]."""
    own, root = segments[:, :, start:end, None]
    looked_at = segments[0][:, None, :]
    place = torch.arange(segments.shape[2], device=segments.device)
    return ((looked_at == own) | (looked_at == root)) & (place <= place[start:end, None])


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
        old_kv=zeros.bool(),
        rewards=zeros,
        advantages=zeros,
        lengths=(1,),
        answers=(),
    )
