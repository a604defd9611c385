from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from async_rl.base.types import Batch
from learner.algorithms.diagnostics import distinct_fraction, repeated_fraction
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_episodes


def answered(*groups: tuple[int, list[list[int]]]) -> Batch:
    """A batch of groups, each as the token of its prompt and its answers."""
    return batch_of(*(
        make_group(number, [prompt], [make_row(answer, [-1.0] * len(answer)) for answer in answers])
        for number, (prompt, answers) in enumerate(groups)
    ))


def test_repetition_is_the_share_of_distinct_tokens_in_an_answer() -> None:
    rows = [make_row([5, 6, 5, 5], [-1.0] * 4, 1.0), make_row([7], [-1.0], 0.0)]
    masked = replace(make_row([5, 6], [-1.0, 0.0], 1.0), mask=np.array([True, False]))
    assert [distinct_fraction(rows[:1]), distinct_fraction(rows), distinct_fraction([masked])] == [0.5, 0.6, 1.0]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # each prompt gets one answer of its own, all of the time
        ([(1, [[5], [5]]), (2, [[6], [6]]), (3, [[7], [7]])], 0.0),
        ([(1, [[5], [5]]), (2, [[5], [5]]), (3, [[5], [5]])], 1.0),
        # 5 is 1/2, 1/2 and 0 of the answers to the three prompts: (1 - 1/2) / 2
        ([(1, [[5], [6]]), (2, [[5], [7]]), (3, [[8], [9]])], 0.25),
        # yes to two prompts and no to two: (2 - 1) / 3
        ([(1, [[5]]), (2, [[5]]), (3, [[6]]), (4, [[6]])], 1 / 3),
        # the same prompt twice counts as one: prompt 1 has 5 in 1/2 of its answers, prompt 2 in all of them
        ([(1, [[5]]), (1, [[6]]), (2, [[5]])], 0.5),
        ([(1, [[5, 6]]), (2, [[5]])], 0.0),
        ([(1, [[5]]), (1, [[5]])], None),
    ],
)
def test_repeated_answers_are_those_that_other_prompts_get_too(
    groups: list[tuple[int, list[list[int]]]], expected: float | None
) -> None:
    assert repeated_fraction(answered(*groups)) == pytest.approx(expected)


def test_an_episode_is_the_tokens_of_all_its_rows() -> None:
    batch = answered((1, [[5], [6], [7]]), (2, [[5], [6], [8]]))
    groups = tuple(replace(group, episodes=make_episodes([2, 1])) for group in batch.groups)
    # 5 6 is one of the two episodes of each prompt
    assert repeated_fraction(replace(batch, groups=groups)) == 0.5
