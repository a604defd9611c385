"""The warning of many groups in a row that have one reward each: the buffer drops them while the learner waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from async_rl.base.types import Prompt
from rollout_server.episodes.conversation.rows import WholeRow
from rollout_server.episodes.episode import Episode
from rollout_server.worker.worker_stats import MIXED_WARNING_GROUPS, FlatRewards

PROMPT = Prompt(index=0, tokens=np.array([5]), text="", question="")


def episode(reward: float) -> Episode:
    row = WholeRow(
        tokens=np.array([5, 6]), logprobs=np.array([0.0, -1.0]), versions=np.zeros(2, np.int32),
        mask=np.array([False, True]), num_start_tokens=1, turn_ends=(1,), turn_rewards=(reward,), finish_reason="stop",
    )
    return Episode(rows=(row,), answer="x", end="done")


def mixed_warnings(flat: FlatRewards, number: int) -> Iterator[tuple[int, str]]:
    """Yield (groups in a row, warning) of groups that are right and wrong by turns."""
    for in_row in range(1, number + 1):
        if told := flat.add(PROMPT, [episode(float(in_row % 2))] * 2, (1, in_row)):
            yield in_row, told


def test_many_groups_flat_at_different_rewards_are_told_ever_more_seldom() -> None:
    told = dict(mixed_warnings(FlatRewards(8, lambda *_: None, ends_after=64), 5 * MIXED_WARNING_GROUPS))
    assert list(told) == [256, 512, 1024]
    assert told[256].startswith("256 groups") and "1, 0, 1, 0" in told[256] and "rollout.group_size" in told[256]


@pytest.mark.parametrize(("limit", "ends_after", "expected"), [(300, 1200, [300]), (8, 0, [])])
def test_the_warning_waits_for_two_batches_and_for_groups_that_are_dropped(
    limit: int, ends_after: int, expected: list[int]
) -> None:
    flat = FlatRewards(limit, lambda *_: None, ends_after)
    assert [in_row for in_row, _ in mixed_warnings(flat, 400)] == expected
