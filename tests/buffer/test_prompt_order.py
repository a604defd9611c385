"""Which question a prompt index asks."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.base.config.check import SettingsError
from buffer.prompt_order import MAX_PROMPTS, PromptOrder
from tests.kit.configs import make_config


def epochs(order: PromptOrder, number: int) -> list[list[int]]:
    size = order.num_prompts
    return [[order.position(epoch * size + place) for place in range(size)] for epoch in range(number)]


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_an_epoch_of_one_source_is_numpys_permutation_of_the_seed(size: int, seed: int) -> None:
    order = PromptOrder([(size, size)], seed, shuffles=True)
    assert epochs(order, 2) == [np.random.default_rng([seed, e]).permutation(size).tolist() for e in range(2)]


def test_without_a_shuffle_an_epoch_has_the_order_of_the_files() -> None:
    assert epochs(PromptOrder([(3, 3), (2, 2)], 0, shuffles=False), 2) == [[0, 1, 2, 3, 4]] * 2


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=4), st.integers(0, 9),
    st.booleans(),
)
def test_an_epoch_has_its_share_of_each_source_and_all_questions_come_equally_often(
    sources: list[tuple[int, int]], seed: int, shuffles: bool
) -> None:
    found = epochs(PromptOrder(sources, seed, shuffles=shuffles), 6)
    start = 0
    for size, per_epoch in sources:
        own = [[each for each in epoch if start <= each < start + size] for epoch in found]
        assert {len(each) for each in own} == {per_epoch}
        asked = Counter(each for epoch in own for each in epoch)
        times = [asked[start + place] for place in range(size)]
        assert max(times) - min(times) <= 1
        start += size


def test_the_order_of_the_largest_task_takes_2_gib_and_4_while_it_is_made() -> None:
    """Four epochs are kept: 32 bytes a prompt. While the next one is shuffled, there are four more arrays."""
    size = 100_000
    order = PromptOrder([(size, size)], 0, shuffles=True)
    tracemalloc.start()
    for epoch in range(7):
        order.position(epoch * size)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (kept / size, peak / size) == pytest.approx((32, 64), rel=0.02)
    assert (32 * MAX_PROMPTS, 64 * MAX_PROMPTS) == (2 * 2**30, 4 * 2**30)


def test_a_larger_task_size_is_refused() -> None:
    assert make_config(task={"size": MAX_PROMPTS}).task.size == MAX_PROMPTS
    with pytest.raises(SettingsError, match=r"^task\.size .*67108864, got 67108865"):
        make_config(task={"size": MAX_PROMPTS + 1})
