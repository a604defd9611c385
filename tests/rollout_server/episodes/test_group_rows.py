"""The rows of a group's episodes: the prompt that they share, places of turns, and rewards when rows are dropped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollout_server.episodes.episode import EPISODE_METRICS, Episode, WholeRow, group_rows


def row(tokens: list[int], sampled: list[int], ends: tuple[int, ...], rewards: tuple[float, ...]) -> WholeRow:
    mask = np.isin(np.arange(len(tokens)), sampled)
    return WholeRow(
        tokens=np.array(tokens, np.int32), logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.zeros(len(tokens), np.int32), mask=mask, num_start_tokens=sampled[0], turn_ends=ends,
        turn_rewards=rewards, finish_reason="stop",
    )  # fmt: skip


FORKED = Episode(
    rows=(
        row([1, 2, 5, 6], [2, 3], (3,), (0.5,)), row([1, 2, 7, 8, 9], [3, 4], (4,), (0.25,)),
        row([1, 2, 7, 3, 4, 5], [3, 5], (3, 5), (1.0, 2.0)),
    ),
    answer="", end="done",
    metrics={**dict.fromkeys(EPISODE_METRICS, 1.0), "env/score": 3.0},
)  # fmt: skip
PLAIN = replace(FORKED, rows=(row([1, 2, 4, 4], [2, 3], (3,), (7.0,)),))


def test_rows_share_their_common_start_as_prompt_and_turns_are_placed_after_it() -> None:
    found = group_rows([FORKED, PLAIN], max_prompt_tokens=8, max_rows=4)
    assert found.prompt_tokens.tolist() == [1, 2]
    assert [r.tokens.tolist() for r in found.rows] == [[5, 6], [7, 8, 9], [7, 3, 4, 5], [4, 4]]
    assert [r.turn_ends for r in found.rows] == [(1,), (2,), (1, 3), (1,)]
    assert [r.reward for r in found.rows] == [3.75] * 3 + [7.0]
    assert [(e.rows, e.metrics) for e in found.episodes] == [(3, {"score": 3.0}), (1, {"score": 3.0})]


@pytest.mark.parametrize(("max_rows", "rewards"), [(2, [(0.75,), (1.0, 2.0)]), (1, [(1.75, 2.0)])])
def test_rewards_of_dropped_rows_stay_with_the_episode(max_rows: int, rewards: list[tuple[float, ...]]) -> None:
    found = group_rows([FORKED], max_prompt_tokens=8, max_rows=max_rows)
    assert [r.turn_rewards for r in found.rows] == rewards
    assert {r.reward for r in found.rows} == {3.75}
    assert found.episodes[0].rows == max_rows
