"""Finds the rows of each episode of a group, its number of sampled tokens, and the rewards of its turns."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from async_rl.base.types import Group


def rows_by_episode(group: Group) -> list[range]:
    """Return for each episode of the group, in order, the range of the indices of its rows in `group.rows`."""
    ends = itertools.accumulate(group.episode_rows)
    return [range(end - count, end) for end, count in zip(ends, group.episode_rows, strict=True)]


def tokens_by_episode(group: Group) -> list[int]:
    """Return for each episode the number of its sampled tokens.

    These are the trained tokens of all its rows and those that are masked only for their age.
    """
    sampled = [int(row.sampled.sum()) for row in group.rows]
    return [sum(sampled[index] for index in indices) for indices in rows_by_episode(group)]


def reward_at_tokens(group: Group) -> list[npt.NDArray[np.float64]]:
    """Return for each row the reward that is given at each of its tokens, [T].

    The reward of a turn is given at the turn's last token. The last trained token of a row also gets the rewards of all
    turns in later rows of its episode: what a model did before its history was rewritten led to them too. A turn that
    is masked for its age has no trained token before its end, so its reward is left out.
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
