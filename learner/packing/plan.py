"""Plans which rows share a pack, a micro-batch and a rank. The plan is deterministic, the same on every rank.

A piece is a prompt followed by k rows of its group, so that their shared prompt is computed once; a pack is one or
more pieces, so that little is padding:

    prompt a | row 1 | row 2 | prompt b | row 3 | padding

A row attends to its prompt and to itself, and its positions continue the prompt's. Its last token predicts
nothing that is trained, so it isn't fed. Packs of one row need no attention mask: padding is on the right. A row may
begin with tokens that are not trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.base.types import Group
from learner.loop.episodes import rows_by_episode


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt with `rows`, the indices of some rows of `groups[group]`; `length` is in tokens."""

    group: int
    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The kinds of packs that the attention of every network can compute; the plan of a batch depends on it."""

    masked: bool
    """Attention takes a mask, so rows may share a prompt, and pieces may share a pack."""
    sparse: bool = False
    """Attention skips masked pairs of tokens, or cuts a pack where positions restart: a micro-batch is one pack without
    padding. Else each token costs as much as its pack is wide, and packs are no wider than the longest piece."""
    pair_cost: float = 0.0
    """Cost of a pair of positions in attention, in tokens; 1 / (6 * hidden) for a common transformer."""


def split_minibatches(
    groups: Sequence[Group], count: int, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    """Return all (group, row) pairs in `count` parts, or in fewer if there are fewer episodes; groups are shuffled.

    All rows of an episode are in one part. The numbers of episodes of two parts differ by at most one.
    """
    order = rng.permutation(len(groups))
    episodes = [[(int(g), pack) for pack in packs] for g in order for packs in rows_by_episode(groups[g])]
    count = min(count, len(episodes))
    edges = [len(episodes) * i // count for i in range(count + 1)]
    return [list(itertools.chain(*episodes[a:b])) for a, b in itertools.pairwise(edges)]


def make_pieces(
    groups: Sequence[Group], pairs: Sequence[tuple[int, int]], max_tokens: int, max_rows: int, layout: Layout
) -> list[Piece]:
    """Return pieces of at most `max_rows` rows and `max_tokens` tokens; a longer single row gets its own.

    With prompt length P and fed answer tokens that add up to R, k rows share a piece while R^2 <= k * P^2, and
    always where attention is sparse. Such a piece never costs more than k do: linear layers see P + R <= kP + R
    tokens, dense attention sees (P + R)^2 <= k * (P + R / k)^2 pairs (the difference is (k - 1) * (P^2 - R^2 / k)).
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
            if taken and not (fits and (layout.sparse or (fed + more) ** 2 <= k * prompt**2)):
                pieces.append(Piece(group, tuple(taken), prompt + fed))
                taken, fed = [], 0
            taken.append(row)
            fed += more
        pieces.append(Piece(group, tuple(taken), prompt + fed))
    return pieces


def plan_microbatches(
    pieces: Sequence[Piece], ranks: int, max_tokens: int, layout: Layout
) -> list[list[list[list[Piece]]]]:
    """Return the packs of every micro-batch of every rank, indexed [rank][micro-batch][pack].

    Each piece, longest first, goes to the rank with the fewest tokens so far. The pieces of a rank share packs, or get
    a pack each where that is cheaper. Ranks with fewer micro-batches get empty ones: collectives need equal counts.
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
    """Return the packs of one rank's micro-batches by first-fit, [micro-batch][pack]. `share` holds its pieces.

    Each piece, longest first, goes into the first pack with room, else into a new pack, else into a new micro-batch.

    Packs are as wide as the first piece, or as the budget where attention is sparse; packs * width <= `max_tokens`.
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
    """Return the cost of computing a micro-batch, padding and attention included, in tokens without attention.

    Causal attention without a mask leaves half of the pairs out.
    """
    width = max(sum(piece.length for piece in pack) for pack in packs)
    return len(packs) * width * (1 + pair_cost * width * (1.0 if needs_mask(packs) else 0.5))


def needs_mask(packs: Sequence[Sequence[Piece]]) -> bool:
    """Return whether attention needs a mask: some pack holds more than one row."""
    return any(len(pack) > 1 or len(pack[0].rows) > 1 for pack in packs)
