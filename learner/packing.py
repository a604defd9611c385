"""Packs rows into micro-batches: finds the rows of episodes, plans packs, makes attention masks and tensors.

The plan is deterministic, so every rank makes the same. A piece is a prompt followed by k rows of its group, so that
the prompt is computed once for all of them. A pack is one or more pieces, so that little is padding:

    prompt a | row 1 | row 2 | prompt b | row 3 | padding

A row attends to its prompt and to itself, and its positions continue the prompt's. The last token of a row is not fed,
because it predicts no trained token. Packs of one row need no attention mask: padding is on the right. A row may begin
with tokens that are not trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from async_rl.base.types import Batch, FloatArray, Group, Row, Support
from learner.models.token_scores import TokenSupports


def rows_by_episode(group: Group) -> list[range]:
    """Return for each episode of the group, in order, the range of the indices of its rows in `group.rows`."""
    ends = itertools.accumulate(group.episode_rows)
    return [range(end - count, end) for end, count in zip(ends, group.episode_rows, strict=True)]


def tokens_by_episode(group: Group) -> list[int]:
    """Return for each episode the number of its sampled tokens: trained, or masked only because they are too old."""
    sampled = [int(row.sampled.sum()) for row in group.rows]
    return [sum(sampled[index] for index in indices) for indices in rows_by_episode(group)]


def reward_at_tokens(group: Group) -> list[npt.NDArray[np.float64]]:
    """Return for each row the reward given at each of its T tokens, [T].

    A turn's reward is given at the turn's last token. The last trained token of a row also gets the rewards of all
    turns in later rows of its episode, because it led to them. A turn whose tokens are all masked as too old gets no
    reward.
    """
    placed: list[npt.NDArray[np.float64]] = []
    for indices in rows_by_episode(group):
        of_turns = [group.rows[index].turn_rewards or (group.rows[index].reward,) for index in indices]
        later = [sum(sum(of_row, 0.0) for of_row in of_turns[place + 1 :]) for place in range(len(indices))]
        for index, of_row, of_later in zip(indices, of_turns, later, strict=True):
            row = group.rows[index]
            rewards = np.zeros(len(row.tokens))
            if (trained := np.flatnonzero(row.mask)).size:
                rewards[list(row.turn_ends or trained[-1:])] = of_row
                rewards[trained[-1]] += of_later
            placed.append(np.where(row.mask, rewards, 0.0))
    return placed


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt and some rows of its group that are computed together. `rows` are indices in `groups[group].rows`."""

    group: int
    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The kinds of packs that the attention of every network can compute. They decide how a batch is packed."""

    masked: bool
    """Attention takes a mask, so rows may share a prompt, and pieces may share a pack."""
    sparse: bool = False
    """Attention skips masked pairs of tokens, or cuts a pack where positions restart. Then a micro-batch is one pack
    without padding. Otherwise each token costs as much as its pack is wide, and packs are no wider than the longest
    piece."""
    pair_cost: float = 0.0
    """Cost of a pair of positions in attention, in tokens; 1 / (6 * hidden) for a common transformer."""


def split_minibatches(
    groups: Sequence[Group], count: int, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    """Return the (group, row) pairs of all rows, split into `count` minibatches. Groups are shuffled by `rng`.

    All rows of an episode are in one minibatch. Numbers of episodes differ by at most one. With fewer episodes than
    `count` there are fewer minibatches.
    """
    order = rng.permutation(len(groups))
    episodes = [[(int(g), pack) for pack in packs] for g in order for packs in rows_by_episode(groups[g])]
    count = min(count, len(episodes))
    edges = [len(episodes) * i // count for i in range(count + 1)]
    return [list(itertools.chain(*episodes[a:b])) for a, b in itertools.pairwise(edges)]


def make_pieces(
    groups: Sequence[Group], pairs: Sequence[tuple[int, int]], max_tokens: int, max_rows: int, layout: Layout
) -> list[Piece]:
    """Group rows into pieces: a prompt with rows of its group, at most `max_rows` rows and `max_tokens` tokens.

    A single row that is longer gets its own piece. Rows do not share a prompt if the engine computed it with different
    experts for them.

    With prompt length P and fed answer tokens that add up to R, k rows share a piece while R^2 <= k * P^2, and
    always where attention is sparse. Such a piece never costs more than k pieces: linear layers see P + R <= kP + R
    tokens, dense attention sees (P + R)^2 <= k * (P + R / k)^2 pairs (the difference is (k - 1) * (P^2 - R^2 / k)).

    Args:
        pairs: (group, row) indices of the rows.
    """
    by_group: dict[int, list[int]] = {}
    for group, row in pairs:
        by_group.setdefault(group, []).append(row)
    pieces = []
    for group, rows in by_group.items():
        prompt = len(groups[group].prompt_tokens)
        taken: list[int] = []
        fed = 0
        for row in rows:
            more = len(groups[group].rows[row].tokens) - 1
            k = len(taken) + 1
            fits = prompt + fed + more <= max_tokens and k <= max_rows and layout.masked
            fits = fits and (not taken or _same_prompt_routing(groups[group], taken[0], row))
            if taken and not (fits and (layout.sparse or (fed + more) ** 2 <= k * prompt**2)):
                pieces.append(Piece(group, tuple(taken), prompt + fed))
                taken, fed = [], 0
            taken.append(row)
            fed += more
        pieces.append(Piece(group, tuple(taken), prompt + fed))
    return pieces


def _same_prompt_routing(group: Group, a: int, b: int) -> bool:
    """Return whether rows `a` and `b` of the group recorded the same experts for their prompt."""
    routings = (group.rows[a].routing, group.rows[b].routing)
    first, second = (None if each is None else each[: len(group.prompt_tokens)] for each in routings)
    return first is second or (first is not None and second is not None and np.array_equal(first, second))


def plan_microbatches(
    pieces: Sequence[Piece], ranks: int, max_tokens: int, layout: Layout
) -> list[list[list[list[Piece]]]]:
    """Return the packs of every micro-batch of every rank, indexed [rank][micro-batch][pack].

    Each piece, longest first, goes to the rank with the fewest tokens so far. The pieces of a rank share packs, or get
    a pack each where that is cheaper. Ranks with fewer micro-batches get empty ones, because collectives need equal
    counts.

    Args:
        max_tokens: the most tokens of a micro-batch, including padding, unless one piece is longer.
        layout: the kinds of packs that attention can compute.
    """
    loads = [0] * ranks
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        rank = loads.index(min(loads))
        shares[rank].append(piece)
        loads[rank] += piece.length
    plan = []
    for share in shares:
        packings = [_pack(share, max_tokens, layout.sparse, may_share_packs=layout.sparse)]
        if layout.masked and not layout.sparse:
            packings.append(_pack(share, max_tokens, False, may_share_packs=True))
        plan.append(min(packings, key=lambda packing: sum(_cost(packs, layout.pair_cost) for packs in packing)))
    most = max(len(cuts) for cuts in plan)
    return [cuts + [[] for _ in range(most - len(cuts))] for cuts in plan]


def _pack(
    share: Sequence[Piece], max_tokens: int, is_sparse: bool, may_share_packs: bool
) -> list[list[list[Piece]]]:
    """Return the packs of one rank, [micro-batch][pack], by first-fit. `share` has the rank's pieces, longest first.

    Each piece goes into the first pack with room, else into a new pack, else into a new micro-batch.

    A pack is as wide as the first piece, or as the budget where attention is sparse; packs * width <= `max_tokens`.
    """
    cuts: list[list[list[Piece]]] = []
    width = 0
    room: list[tuple[int, list[Piece]]] = []  # (free tokens, pack) with room for the shortest piece
    for piece in share:
        if may_share_packs:
            found = next((i for i, (free, _) in enumerate(room) if piece.length <= free), None)
            if found is not None:
                free, pack = room[found]
                pack.append(piece)
                room[found] = (free - piece.length, pack)
                if room[found][0] < share[-1].length:
                    del room[found]
                continue
        if not cuts or (len(cuts[-1]) + 1) * width > max_tokens:
            width = max(max_tokens, piece.length) if is_sparse else piece.length
            cuts.append([])
        pack = [piece]
        cuts[-1].append(pack)
        room.append((width - piece.length, pack))
    return cuts


def _cost(packs: Sequence[Sequence[Piece]], pair_cost: float) -> float:
    """Return the cost of computing a micro-batch, including padding and attention. One token without attention costs 1.

    Causal attention without a mask computes only half of the pairs.
    """
    width = max(sum(piece.length for piece in pack) for pack in packs)
    return len(packs) * width * (1 + pair_cost * width * (1.0 if needs_mask(packs) else 0.5))


def needs_mask(packs: Sequence[Sequence[Piece]]) -> bool:
    """Return whether attention needs a mask, because some pack has more than one row."""
    return any(len(pack) > 1 or len(pack[0].rows) > 1 for pack in packs)


BLOCK = 128
"""Number of tokens along each side of a block."""
SLAB = 8 * BLOCK
"""Number of query tokens whose pairs are in memory simultaneously."""
WHOLE = slice(None)


def attention_mask(
    segments: Tensor,  # [2, B, S] segment of each token and of its prompt
    dtype: torch.dtype,
    queries: slice = WHOLE,
) -> Tensor:
    """Return the tensor to add to attention scores: 0 where a token may attend, else the lowest number. [B, 1, s, S]

    Args:
        queries: the range of the s query tokens, by default all S.
    """
    start, end, _ = queries.indices(segments.shape[2])
    allowed = may_attend(segments, start, end)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def may_attend(segments: Tensor, start: int, end: int) -> Tensor:
    """Return which tokens of their pack the tokens start..end - 1 may attend to, a bool [B, end - start, S].

    A token attends to itself and to earlier tokens of its segment and of its prompt.
    """
    own, root = segments[:, :, start:end, None]
    other = segments[0][:, None, :]
    place = torch.arange(segments.shape[2], device=segments.device)
    return ((other == own) | (other == root)) & (place <= place[start:end, None])


def block_mask(segments: Tensor, queries: slice = WHOLE) -> BlockMask:
    """Return the mask that torch's create_block_mask gives for the rule of `may_attend`, with less memory.

    create_block_mask makes all S * S pairs, as 64-bit integers and several times over: 2 GB each for a pack of
    16k tokens. `segments` and `queries` are as in `attention_mask`; the mask counts queries from 0.
    """
    own, root = segments
    size = own.shape[1]
    first, last, _ = queries.indices(size)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + first
        return (q >= k) & ((own[b, k] == own[b, q]) | (own[b, k] == root[b, q]))

    some, full = [], []
    for start in range(first, last, SLAB):
        slab = may_attend(segments, start, min(start + SLAB, last))
        slab = F.pad(slab, (0, -size % BLOCK, 0, -slab.shape[1] % BLOCK))
        blocks = slab.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [B, blocks, BLOCK, blocks, BLOCK]
        some.append(blocks.any(4).any(2))
        full.append(blocks.all(4).all(2))
    in_some, in_all = torch.cat(some, 1), torch.cat(full, 1)
    return BlockMask.from_kv_blocks(
        *_listed(in_some & ~in_all), *_listed(in_all), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(last - first, size)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of True blocks per line [B, 1, q], column numbers per line, True blocks first [B, 1, q, k])."""
    numbers = blocks.int().argsort(dim=2, descending=True, stable=True)
    return blocks.sum(2, dtype=torch.int32)[:, None], numbers.int()[:, None]


PADDING = -1
"""The segment number of padding. The prompts and rows of a pack are numbered from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The tokens of a forward pass in B packs of width S, and the N places where its hidden states are read."""

    tokens: Tensor  # [B, S] int64
    segments: Tensor | None  # [2, B, S] int64 of each token and of its prompt; None: all packs are plain causal
    positions: Tensor | None  # [B, S] int64; None where segments is
    where: Tensor  # [N] index into B * S of the token whose output predicts the response token
    fed: Tensor | None = None  # [B, S] bool, False for padding and in a filler
    routing: Tensor | None = None  # [B, S, layers, k] int16 experts to replay, -1 where routers choose; None: they do


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs(PackedTokens):
    """The tensors that a network needs for a forward pass. N is the number of response tokens, row after row."""

    targets: Tensor  # [N] int64 response tokens
    temperature: Tensor  # [N] float32 logged temperature
    supports: TokenSupports | None = None  # of the N tokens; None: all are over the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    """The N response tokens of k rows, as the loss needs them. Nothing here depends on a network."""

    behaviour: Tensor  # [N] float32 behaviour logprobs, 0 where not trained
    trained: Tensor  # [N] bool
    comparable: Tensor  # [N] bool: sampled by version `batch.version` and from KV of the same version
    old_kv: Tensor  # [N] bool: sampled by version `batch.version`, but maybe from KV of older ones
    staleness: Tensor  # [N] int64, batch.version - token version
    advantages: Tensor  # [N] float32; zeros with a critic, whose advantages follow from its values
    rows: Tensor  # [N] int64 index of each token's row, 0..k-1
    places: Tensor  # [N] int64: place of each token in the batch, the same however the batch is split
    rewards: Tensor  # [N] float32 reward that is given at the token, 0 where not trained
    counted: Tensor  # [k] float32 number of tokens by which a mean over each row's episode divides
    lengths: tuple[int, ...]
    """Number of response tokens T of each row; they add up to N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tokens of one forward pass on one rank. `proximal`, `entropy`, `values`, `reference`: computed at step start.

    They are None where the objective does not need them.
    """

    inputs: ForwardInputs
    response: ResponseTokens
    rows: tuple[tuple[int, int], ...]
    """Indices (group, row) of each row in the batch; empty for a filler that only keeps this rank's collectives in
    step.
    """
    proximal: Tensor | None = None  # [N] logprobs of the policy, 0 where not trained
    entropy: Tensor | None = None  # [N] entropies of the policy; not None with `proximal`
    values: Tensor | None = None  # [N] of the critic
    reference: Tensor | None = None  # [N] logprobs of the frozen reference, 0 where not trained


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's micro-batches of one optimizer step, and numbers that are the same on all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    """Number of trained tokens of all ranks, at least 1. The critic's summed loss is divided by it."""
    normaliser: float
    """The policy's summed loss is divided by this number."""
    whitening: tuple[float, float] = (0.0, 1.0)
    """(mean, scale) of the batch's advantages: a token's advantage is (A - mean) * scale."""
    balance: Tensor | None = None  # [E] the slopes of the routers' auxiliary loss, see balance.py; None: there is none
    m2po_limit: tuple[float, int] = (math.inf, 2**63 - 1)
    """(square, place) of the last token that the M2PO mask keeps, from corrections.m2po_limit; by default all are kept.
    """
    mean_weight: float = 1.0
    """Importance weights are divided by this number: their mean if correction.batch_normalised is set, else 1."""


def collate(
    batch: Batch, packs: Sequence[Sequence[Piece]], advantages: Sequence[Sequence[FloatArray]], device: torch.device,
    is_trained: bool = True,
) -> MicroBatch:
    """Return the micro-batch of these packs, with its tensors on `device`.

    Args:
        packs: [pack][piece].
        advantages: [group][row], [T] each.
        is_trained: False: a filler without trained tokens, which only keeps this rank's collectives in step.
    """
    width = max(sum(piece.length for piece in pack) for pack in packs)
    tokens = np.zeros((len(packs), width), np.int64)
    segments = np.full((2, len(packs), width), PADDING, np.int64)
    positions = np.zeros((len(packs), width), np.int64)
    where: list[np.ndarray] = []
    rows: list[tuple[int, int]] = []
    for b, pack in enumerate(packs):
        start = segment = 0
        for piece in pack:
            group, root = batch.groups[piece.group], segment
            # After an empty prompt the first token is not trained, so any place will do for its prediction.
            prompt_last = max(start + len(group.prompt_tokens) - 1, start)
            for fed in (group.prompt_tokens, *(group.rows[i].tokens[:-1] for i in piece.rows)):
                end = start + len(fed)
                first_position = 0 if segment == root else len(group.prompt_tokens)
                tokens[b, start:end] = fed
                segments[:, b, start:end] = [[segment], [root]]
                positions[b, start:end] = np.arange(first_position, first_position + end - start)
                if segment > root:
                    where.append(b * width + np.concatenate([[prompt_last], np.arange(start, end)]))
                start, segment = end, segment + 1
            rows += [(piece.group, i) for i in piece.rows]
    targets = np.concatenate([batch.groups[g].rows[i].tokens for g, i in rows])
    lengths = [len(batch.groups[g].rows[i].tokens) for g, i in rows]
    temperatures = np.repeat([batch.groups[g].temperature for g, _ in rows], lengths)
    masked = needs_mask(packs)
    inputs = ForwardInputs(
        tokens=_tensor(tokens, torch.int64, device),
        segments=_tensor(segments, torch.int64, device) if masked else None,
        positions=_tensor(positions, torch.int64, device) if masked else None,
        where=_tensor(np.concatenate(where), torch.int64, device),
        targets=_tensor(targets, torch.int64, device),
        temperature=_tensor(temperatures, torch.float32, device),
        supports=_supports([batch.groups[g].rows[i] for g, i in rows], device),
        fed=_tensor((segments[0] != PADDING) & is_trained, torch.bool, device),
        routing=None if (experts := _routing(batch, packs, width)) is None else _tensor(experts, torch.int16, device),
    )
    response = _response_tokens(batch, rows, advantages, device, is_trained)
    return MicroBatch(inputs=inputs, response=response, rows=tuple(rows) if is_trained else ())


def _supports(rows: Sequence[Row], device: torch.device) -> TokenSupports | None:
    """Return the supports of the tokens of these rows (the ids that each was drawn from); None if none is recorded."""
    supports = [row.support for row in rows if row.support is not None]
    if not supports:
        return None
    assert len(supports) == len(rows), "one run samples all of its groups in the same way"
    joined = Support.joined(supports)
    behaviour = None if joined.logprobs is None else _tensor(joined.logprobs, torch.float32, device)
    return TokenSupports(_tensor(joined.ids, torch.int64, device), torch.from_numpy(joined.offsets), behaviour)


def _routing(batch: Batch, packs: Sequence[Sequence[Piece]], width: int) -> npt.NDArray[np.int16] | None:
    """Return the experts to replay, [B, S, layers, k], -1 where none were recorded; None if no row has a record."""
    recorded = [batch.groups[piece.group].rows[i].routing for pack in packs for piece in pack for i in piece.rows]
    shape = next((of_row.shape[1:] for of_row in recorded if of_row is not None), None)
    if shape is None:
        return None
    experts = np.full((len(packs), width, *shape), -1, np.int16)
    for b, pack in enumerate(packs):
        end = 0
        for piece in pack:
            group = batch.groups[piece.group]
            for number, row in enumerate(group.rows[i] for i in piece.rows):
                shared = len(group.prompt_tokens) if number else 0  # the first row brings the prompt's
                start, end = end, end + len(group.prompt_tokens) + len(row.tokens) - 1 - shared
                if row.routing is not None:
                    experts[b, start:end] = row.routing[shared:]
    return experts


def _response_tokens(
    batch: Batch, rows: Sequence[tuple[int, int]], advantages: Sequence[Sequence[FloatArray]],
    device: torch.device, is_trained: bool,
) -> ResponseTokens:
    pairs = [(batch.groups[g], batch.groups[g].rows[i]) for g, i in rows]
    lengths = [len(row.tokens) for _, row in pairs]
    trained = np.concatenate([row.mask for _, row in pairs]) & is_trained
    behaviour = np.concatenate([row.logprobs for _, row in pairs])
    staleness = batch.version - np.concatenate([row.versions for _, row in pairs])
    old_kv = np.concatenate([group.old_kv(row) for group, row in pairs])
    groups = {g: batch.groups[g] for g, _ in rows}
    rewards = {g: reward_at_tokens(group) for g, group in groups.items()}
    counted = {g: np.repeat(tokens_by_episode(group), group.episode_rows) for g, group in groups.items()}
    places = [(g << 44) + (i << 28) + np.arange(length) for (g, i), length in zip(rows, lengths, strict=True)]
    return ResponseTokens(
        behaviour=_tensor(np.where(trained, behaviour, 0.0), torch.float32, device),
        trained=_tensor(trained, torch.bool, device),
        comparable=_tensor((staleness == 0) & ~old_kv, torch.bool, device),
        old_kv=_tensor((staleness == 0) & old_kv, torch.bool, device),
        staleness=_tensor(staleness, torch.int64, device),
        advantages=_tensor(np.concatenate([advantages[g][i] for g, i in rows]), torch.float32, device),
        rows=_tensor(np.repeat(np.arange(len(pairs)), lengths), torch.int64, device),
        places=_tensor(np.concatenate(places), torch.int64, device),
        rewards=_tensor(
            np.where(trained, np.concatenate([rewards[g][i] for g, i in rows]), 0.0), torch.float32, device
        ),
        counted=_tensor(np.array([counted[g][i] for g, i in rows]), torch.float32, device),
        lengths=tuple(lengths),
    )


def _tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, dtype, non_blocking=True)


SPLIT_PREFIX = "sequence_parallel_"
"""Prefix of the names of sequence-parallel attention in transformers' table; the name of a kernel follows."""
RECURRENT = ("mamba_", "ssm_", "linear_", "lru_", "conv_")
"""Prefixes of configuration keys of models with recurrent layers. No attention mask separates rows in such layers."""
WINDOWS = ("sliding_window", "attention_chunk_size", "keep_window_size", "window_size")


def kernel_of(lm: Any) -> str:
    """Return the name of the attention that the model was loaded with, such as sdpa."""
    name: str = lm.config._attn_implementation
    return name.removeprefix(SPLIT_PREFIX)
