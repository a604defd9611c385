"""Which question a prompt index asks."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from buffer.prompt_order import PromptOrder


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
