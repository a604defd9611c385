from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.types import Batch
from learner.microbatches import Row, attention_mask, collate, make_rows, plan_microbatches, split_minibatches
from tests.learner.handmade import make_batch, make_group, make_rollout


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 6), st.integers(0, 99))
def test_minibatches_hold_every_rollout_once_and_differ_by_at_most_one(
    sizes: list[int], count: int, seed: int
) -> None:
    parts = split_minibatches(sizes, count, np.random.default_rng(seed))
    assert sorted(pair for part in parts for pair in part) == [
        (g, i) for g, n in enumerate(sizes) for i in range(n)
    ]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 999), st.integers(20, 60), st.integers(1, 5))
def test_rows_hold_every_rollout_once_within_budget_and_never_cost_more_than_separate_rows(
    seed: int, max_tokens: int, max_answers: int
) -> None:
    groups = make_batch(seed).groups
    pairs = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rollouts))]
    rows = make_rows(groups, pairs, max_tokens, max_answers)
    assert sorted((row.group, i) for row in rows for i in row.answers) == pairs
    for row in rows:
        prompt = len(groups[row.group].prompt_tokens)
        fed = [len(groups[row.group].rollouts[i].tokens) - 1 for i in row.answers]
        assert row.length == prompt + sum(fed)
        assert len(row.answers) == 1 or (row.length <= max_tokens and len(row.answers) <= max_answers)
        assert row.length <= sum(prompt + t for t in fed)
        assert row.length**2 <= sum((prompt + t) ** 2 for t in fed)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5), st.integers(50, 200))
def test_a_plan_holds_every_row_once_within_budget_with_equal_counts_on_all_ranks(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    rows = [Row(g, (0,), length) for g, length in enumerate(lengths)]
    plan = plan_microbatches(rows, ranks, max_tokens)
    assert len(plan) == ranks and len({len(share) for share in plan}) == 1
    assert sorted(row.group for share in plan for cut in share for row in cut) == list(range(len(lengths)))
    for share in plan:
        for cut in share:
            assert not cut or len(cut) * max(row.length for row in cut) <= max_tokens
    loads = [sum(row.length for cut in share for row in cut) for share in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_shared_row_by_hand() -> None:
    first, second = make_rollout([11, 12, 13], [-1.0, -2.0, -3.0], 1.0), make_rollout([21], [-4.0], 0.0)
    second.versions[:] = 1
    first.mask[1] = False
    group = make_group(0, [5, 6, 7], [first, second], version=1)
    batch = Batch(version=1, groups=(group,), finished_versions=(1,))
    (row,) = make_rows(batch.groups, [(0, 0), (0, 1)], 100, 16)
    micro = collate(batch, [row], [[np.array([0.5, 0.6, 0.7]), np.array([-0.5])]], torch.device("cpu"))
    assert micro.tokens.tolist() == [[5, 6, 7, 11, 12]]
    assert micro.segments is not None and micro.segments.tolist() == [[0, 0, 0, 1, 1]]
    assert micro.positions is not None and micro.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert micro.where.tolist() == [2, 3, 4, 2]
    assert micro.targets.tolist() == [11, 12, 13, 21]
    assert micro.behaviour.tolist() == [-1.0, 0.0, -3.0, -4.0]
    assert micro.trained.tolist() == [True, False, True, True]
    assert micro.comparable.tolist() == [False, False, False, True]
    assert micro.advantages.tolist() == pytest.approx([0.5, 0.6, 0.7, -0.5])
    assert micro.staleness.tolist() == [1, 1, 1, 0]
    assert micro.lengths == (3, 1)


def test_an_answer_sees_the_prompt_and_itself_but_no_other_answer() -> None:
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]), torch.float32)
    assert mask.shape == (1, 1, 6, 6)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_rows_of_single_answers_need_no_mask_and_an_empty_micro_batch_trains_nothing() -> None:
    batch = make_batch()
    rows = make_rows(batch.groups, [(0, 0), (1, 0)], 100, 16)
    advantages = [[np.zeros(len(rollout.tokens)) for rollout in group.rollouts] for group in batch.groups]
    assert collate(batch, rows, advantages, torch.device("cpu")).segments is None
    empty = collate(batch, [], [], torch.device("cpu"))
    assert empty.tokens.shape == (1, 1) and not empty.trained.any()
