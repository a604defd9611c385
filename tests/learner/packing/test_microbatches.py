from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import Layout, Piece, attention_mask, collate, make_pieces, plan_microbatches, split_minibatches
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_batch, make_episodes, make_turns_row


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 6), st.integers(0, 99),
)  # fmt: skip
def test_the_rows_of_an_episode_are_in_one_minibatch(group_rows: list[list[int]], count: int, seed: int) -> None:
    groups = [
        dataclasses.replace(
            make_group(g, [3], [make_row([5], [-1.0], 1.0)] * sum(packs)), episodes=make_episodes(packs)
        )
        for g, packs in enumerate(group_rows)
    ]
    parts = split_minibatches(groups, count, np.random.default_rng(seed))
    episode_of = {
        (g, pack): (g, number)
        for g, packs in enumerate(group_rows)
        for pack, number in enumerate(np.repeat(np.arange(len(packs)), packs).tolist())
    }
    assert sorted(pair for part in parts for pair in part) == sorted(episode_of)
    episodes = [{episode_of[pair] for pair in part} for part in parts]
    assert sum(map(len, episodes)) == len(set(episode_of.values())) and all(episodes)
    assert max(map(len, episodes)) - min(map(len, episodes)) <= 1


DENSE, SPARSE, PLAIN = Layout(masked=True, pair_cost=1e-3), Layout(masked=True, sparse=True), Layout(masked=False)
LAYOUTS = st.sampled_from([DENSE, SPARSE, PLAIN, Layout(masked=False, sparse=True)])


@given(st.integers(0, 999), st.integers(20, 60), st.integers(1, 5), LAYOUTS)
def test_pieces_hold_every_rollout_once_and_never_cost_more_than_separate_ones(
    seed: int, max_tokens: int, max_rows: int, layout: Layout
) -> None:
    groups = make_batch(seed).groups
    pairs = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rows))]
    pieces = make_pieces(groups, pairs, max_tokens, max_rows, layout)
    assert sorted((piece.group, i) for piece in pieces for i in piece.rows) == pairs
    for piece in pieces:
        prompt = len(groups[piece.group].prompt_tokens)
        fed = [len(groups[piece.group].rows[i].tokens) - 1 for i in piece.rows]
        assert piece.length == prompt + sum(fed)
        assert len(piece.rows) == 1 or (piece.length <= max_tokens and len(piece.rows) <= max_rows)
        assert layout.masked or len(piece.rows) == 1
        assert piece.length <= sum(prompt + t for t in fed)
        assert layout.sparse or piece.length**2 <= sum((prompt + t) ** 2 for t in fed)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5), st.integers(50, 200), LAYOUTS)
def test_a_plan_holds_every_piece_once_within_budget_with_equal_counts_on_all_ranks(
    lengths: list[int], ranks: int, max_tokens: int, layout: Layout
) -> None:
    pieces = [Piece(g, (0,), length) for g, length in enumerate(lengths)]
    plan = plan_microbatches(pieces, ranks, max_tokens, layout)
    assert len(plan) == ranks and len({len(share) for share in plan}) == 1
    assert sorted(p.group for share in plan for cut in share for pack in cut for p in pack) == list(range(len(lengths)))
    for share in plan:
        for cut in share:
            widths = [sum(piece.length for piece in pack) for pack in cut]
            assert not cut or len(cut) * max(widths) <= max_tokens
            assert not layout.sparse or len(cut) <= 1
            assert layout.sparse or not cut or max(widths) == max(piece.length for pack in cut for piece in pack)
            assert layout.sparse or layout.masked or all(len(pack) == 1 for pack in cut)
    loads = [sum(piece.length for cut in share for pack in cut for piece in pack) for share in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_short_pieces_fill_the_rows_of_long_ones_only_where_that_is_cheaper() -> None:
    pieces = [Piece(g, (0,), length) for g, length in enumerate([10, 6, 4, 3])]

    def widths(layout: Layout) -> list[list[list[int]]]:
        (cuts,) = plan_microbatches(pieces, 1, 40, layout)
        return [[[piece.length for piece in pack] for pack in cut] for cut in cuts]

    assert widths(Layout(masked=True)) == [[[10], [6, 4], [3]]]
    assert widths(Layout(masked=False)) == [[[10], [6], [4], [3]]]
    assert widths(Layout(masked=False, sparse=True)) == [[[10, 6, 4, 3]]]
    # 3 packs of 10 cost 30 + 300 c with a mask, 4 packs 40 + 400 c / 2 without one: more only while c < 0.1
    assert widths(Layout(masked=True, pair_cost=0.09)) == [[[10], [6, 4], [3]]]
    assert widths(Layout(masked=True, pair_cost=0.11)) == [[[10], [6], [4], [3]]]


def test_a_row_of_two_pieces_by_hand() -> None:
    groups = tuple(
        make_group(g, prompt, [make_row(row, [-1.0] * len(row), 1.0)])
        for g, (prompt, row) in enumerate([([5, 6], [11, 12, 13]), ([7, 8, 9], [21, 22])])
    )
    batch = batch_of(*groups)
    pack = [Piece(0, (0,), 4), Piece(1, (0,), 4)]
    advantages = [[np.full(3, 0.5, np.float32)], [np.full(2, -0.5, np.float32)]]
    micro = collate(batch, [pack], advantages, torch.device("cpu"))
    assert micro.inputs.tokens.tolist() == [[5, 6, 11, 12, 7, 8, 9, 21]]
    assert micro.inputs.segments is not None
    assert micro.inputs.segments.tolist() == [[[0, 0, 1, 1, 2, 2, 2, 3]], [[0, 0, 0, 0, 2, 2, 2, 2]]]
    assert micro.inputs.positions is not None and micro.inputs.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert micro.inputs.where.tolist() == [1, 2, 3, 6, 7]
    assert micro.inputs.targets.tolist() == [11, 12, 13, 21, 22]
    assert micro.rows == ((0, 0), (1, 0))


def test_a_token_of_this_version_is_comparable_unless_its_group_kept_older_kv() -> None:
    rows = [make_row([1, 2, 3], [-1.0, -2.0, -3.0], 1.0), make_row([4, 5], [-4.0, -1.0], 0.0)]
    rows[0].versions[:] = [6, 7, 8]
    rows[1].versions[:] = [8, 8]  # its prompt's KV may be of version 6, as its group started then
    groups = [
        dataclasses.replace(make_group(i, [5, 6], rows, version=6), keeps_kv=keeps_kv)
        for i, keeps_kv in enumerate((False, True))
    ]
    batch = batch_of(*groups, version=8)
    pieces = make_pieces(batch.groups, [(g, a) for g in (0, 1) for a in (0, 1)], 100, 1, DENSE)
    advantages = [[np.zeros(3, np.float32), np.zeros(2, np.float32)]] * 2
    micro = collate(batch, [[piece] for piece in pieces], advantages, torch.device("cpu"))
    assert micro.response.comparable.tolist() == [False, False, True, True, True] + [False] * 5
    assert micro.response.old_kv.tolist() == [False] * 5 + [False, False, True, True, True]


def test_a_shared_row_by_hand() -> None:
    first, second = make_row([11, 12, 13], [-1.0, -2.0, -3.0], 1.0), make_row([21], [-4.0], 0.0)
    second.versions[:] = 1
    first.mask[1] = False
    group = make_group(0, [5, 6, 7], [first, second], version=1)
    batch = batch_of(group, version=1)
    pieces = make_pieces(batch.groups, [(0, 0), (0, 1)], 100, 16, DENSE)
    advantages = [[np.array([0.5, 0.6, 0.7], np.float32), np.array([-0.5], np.float32)]]
    micro = collate(batch, [pieces], advantages, torch.device("cpu"))
    assert micro.inputs.tokens.tolist() == [[5, 6, 7, 11, 12]]
    assert micro.inputs.segments is not None
    assert micro.inputs.segments.tolist() == [[[0, 0, 0, 1, 1]], [[0, 0, 0, 0, 0]]]
    assert micro.inputs.positions is not None and micro.inputs.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert micro.inputs.where.tolist() == [2, 3, 4, 2]
    assert micro.inputs.targets.tolist() == [11, 12, 13, 21]
    assert micro.response.behaviour.tolist() == [-1.0, 0.0, -3.0, -4.0]
    assert micro.response.trained.tolist() == [True, False, True, True]
    assert micro.response.comparable.tolist() == [False, False, False, True]
    assert micro.response.advantages.tolist() == pytest.approx([0.5, 0.6, 0.7, -0.5])
    assert micro.response.staleness.tolist() == [1, 1, 1, 0]
    assert micro.response.lengths == (3, 1)


@pytest.mark.parametrize("layout", [DENSE, SPARSE, PLAIN])
def test_rows_without_a_shared_prompt_are_packed_too(layout: Layout) -> None:
    """The token before the first one of a pack is any token of the micro-batch: the first one is not trained."""
    rows = [make_turns_row("..R", [1.0], 1.0), make_turns_row(".R", [0.0], 0.0)]
    group = dataclasses.replace(make_group(0, [], rows), episodes=make_episodes([1, 1]))
    batch = batch_of(group)
    pieces = make_pieces(batch.groups, [(0, 0), (0, 1)], 100, 16, layout)
    assert [piece.length for piece in pieces] == ([3] if layout.sparse and layout.masked else [2, 1])
    advantages = [[np.zeros(3, np.float32), np.zeros(2, np.float32)]]
    micro = collate(batch, [pieces], advantages, torch.device("cpu"))
    assert micro.inputs.tokens.tolist() == [[3, 4, 3]]
    assert micro.inputs.positions is not None and micro.inputs.positions.tolist() == [[0, 1, 0]]
    assert micro.inputs.where[micro.response.trained].tolist() == [1, 2]
    assert set(micro.inputs.where.tolist()) <= {0, 1, 2}
    assert micro.inputs.targets.tolist() == [3, 4, 5, 3, 4]
    assert micro.response.trained.tolist() == [False, False, True, False, True]


def test_an_answer_sees_its_prompt_and_itself_but_nothing_else_of_the_row() -> None:
    #                         prompt  rows  prompt, answer, padding
    segments = torch.tensor([[[0, 0, 1, 1, 2, 3, 4, -1]], [[0, 0, 0, 0, 0, 3, 3, -1]]])
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    mask = attention_mask(segments, torch.float32)
    assert mask.shape == (1, 1, 8, 8)
    assert (mask[0, 0] == 0).int().tolist() == expected


def test_rows_of_single_answers_need_no_mask_and_a_filler_trains_nothing() -> None:
    batch = make_batch()
    pieces = make_pieces(batch.groups, [(0, 0), (1, 0)], 100, 16, DENSE)
    advantages = [[np.zeros(len(r.tokens), np.float32) for r in group.rows] for group in batch.groups]
    packs = [[piece] for piece in pieces]
    assert collate(batch, packs, advantages, torch.device("cpu")).inputs.segments is None
    filler = collate(batch, packs[:1], advantages, torch.device("cpu"), is_trained=False)
    assert filler.inputs.tokens.shape == (1, pieces[0].length) and not filler.response.trained.any()
    assert filler.rows == () and not filler.response.behaviour.any()
