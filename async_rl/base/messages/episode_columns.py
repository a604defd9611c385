"""Encodes the episodes of a group as columns, and checks such columns.

    episodes  {each field of EpisodeFacts [G], row_turns [rows],
               each field of Row that has a number for each turn [sum of row_turns]}

`row_turns` is the number of turns that each row trains. A group whose rows are answers to a question has none
of these columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.base.errors import WireError
from async_rl.base.field_kinds import PerTurn, Scalar, kinds_of
from async_rl.base.messages.field_packing import pack_column, read_array, read_column, refuse_element
from async_rl.base.messages.limits import Limits
from async_rl.base.messages.message_reader import INT32, Fields, pack_array, refusal
from async_rl.base.types import BoolArray, EpisodeFacts, Group, IntArray, Row

REWARD_ROUNDING = 1e-6
"""The largest difference, relative to the sum of the absolute values, between an episode's reward and the sum of the
rewards of its turns."""

_EPISODE = kinds_of(EpisodeFacts, Scalar)
_TURN_ARRAYS = kinds_of(Row, PerTurn)
_FIELDS = frozenset((*_EPISODE, "row_turns", *_TURN_ARRAYS))
_PACK = {name: pack_column(name, kind) for name, kind in _EPISODE.items()}
_READ = {name: read_column(name, kind, "episodes[{}]") for name, kind in _EPISODE.items()}
_DTYPES = {name: np.dtype(kind.dtype) for name, kind in _TURN_ARRAYS.items()}
_READ_TURNS = {name: read_array(name, kind) for name, kind in _TURN_ARRAYS.items()}


def pack_episodes(group: Group) -> dict[str, Any] | None:
    """Return the episodes of a group as columns, or None if the group has none.

    WireError: a row has not one reward for each of its turns, or it has turns and the group no episodes.
    """
    rows, episodes = group.rows, group.episodes
    for i, row in enumerate(rows):
        num_turns = len(row.turn_ends)
        for name in _TURN_ARRAYS:
            if (number := len(getattr(row, name))) != num_turns:
                raise WireError(f"rows[{i}].{name}: {number} values for {num_turns} turns")
        if num_turns and not episodes:
            raise refusal(f"rows[{i}].turn_ends", row.turn_ends, "none in a group without episodes")
    if not episodes:
        return None
    return {
        **{name: pack_field([getattr(episode, name) for episode in episodes]) for name, pack_field in _PACK.items()},
        "row_turns": pack_array(np.array([len(row.turn_ends) for row in rows], INT32)),
        **{
            name: pack_array(np.array([value for row in rows for value in getattr(row, name)], dtype))
            for name, dtype in _DTYPES.items()
        },
    }


def check_episodes(
    columns: dict[Any, Any], limits: Limits, lengths: list[int], mask: BoolArray, rewards: list[float]
) -> tuple[dict[str, list[Any]], dict[str, list[tuple[Any, ...]]]]:
    """Check the columns of `pack_episodes`. Return (a column for each field of EpisodeFacts, a column for each array
    of turns).

    The numbers of episodes and of turns are within `limits`. Each row belongs to one episode, and all rows of
    an episode have its reward, to which the rewards of its turns add up. Each row trains at least one turn. The
    ends of its turns ascend, each is a trained token, and the last one is the row's last token. Otherwise this
    raises WireError, which names the field and the value.

    Args:
        lengths: the number of tokens of each row.
        mask: for all rows, one after the other, whether a token is trained. The last token of each row is.
        rewards: the reward of each row.
    """
    fields = Fields(columns, _FIELDS, "episodes.")
    num_episodes = len(fields.array("rows", INT32, limits.fewest_episodes, limits.group_size))
    episodes = {name: read(fields, num_episodes) for name, read in _READ.items()}
    rows = episodes["rows"]
    if sum(rows) != len(lengths):
        raise fields.refuse("rows", f"a sum of {len(lengths)}, the number of rows", sum(rows))
    if max(episodes["turns"]) > limits.max_turns:
        raise fields.refuse("turns", f"at most {limits.max_turns} in an episode", max(episodes["turns"]))
    turns = _read_turns(fields, episodes, lengths, mask)
    for i, (start, end) in enumerate(itertools.pairwise(itertools.accumulate(rows, initial=0))):
        for row in range(start + 1, end):
            if rewards[row] != rewards[start]:
                allowed = f"{rewards[start]}, the reward of the episode's first row"
                raise refusal(f"rows[{row}].reward", rewards[row], allowed)
        of_turns = [reward for of_row in turns["turn_rewards"][start:end] for reward in of_row]
        # A sum is not close to the reward, which is finite, if it is infinite.
        if not math.isclose(sum(of_turns), rewards[start], abs_tol=REWARD_ROUNDING * sum(map(abs, of_turns))):
            allowed = f"{rewards[start]}, the reward of the episode"
            raise refusal(f"episodes[{i}], sum of turn_rewards", sum(of_turns), allowed)
    return episodes, turns


def _read_turns(
    fields: Fields, episodes: dict[str, list[Any]], lengths: list[int], mask: BoolArray
) -> dict[str, list[tuple[Any, ...]]]:
    """Return the checked arrays of turns, each as a list [rows]."""
    num_rows = len(lengths)
    row_turns = fields.array("row_turns", INT32, num_rows, num_rows)
    if row_turns.min() < 1:
        raise fields.refuse("row_turns", "at least 1 turn in a row", int(row_turns.min()))
    counts = row_turns.tolist()
    rest = iter(counts)
    for i, (num_rows, turns) in enumerate(zip(episodes["rows"], episodes["turns"], strict=True)):
        trained = sum(itertools.islice(rest, num_rows))
        if trained > turns:
            allowed = f"at least {trained}, the number of turns that its rows train"
            raise refusal(f"episodes[{i}].turns", turns, allowed)
    total = sum(counts)
    arrays = {name: read(fields, total, total, counts) for name, read in _READ_TURNS.items()}
    _check_turn_ends(arrays["turn_ends"], row_turns, counts, lengths, mask)
    bounds = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    plain = {name: array.tolist() for name, array in arrays.items()}
    return {name: [tuple(values[a:b]) for a, b in bounds] for name, values in plain.items()}


def _check_turn_ends(
    ends: IntArray, row_turns: IntArray, counts: Sequence[int], lengths: Sequence[int], mask: BoolArray
) -> None:
    num_rows = len(lengths)
    rows = np.repeat(np.arange(num_rows), row_turns)
    sizes = np.array(lengths)

    def refuse_if(is_bad: BoolArray, allowed: str) -> None:
        if is_bad.any():
            raise refuse_element("turn_ends", ends, is_bad, counts, allowed)

    refuse_if((ends < 0) | (ends >= sizes[rows]), "a position in the row")
    positions = (np.cumsum(sizes) - sizes)[rows] + ends
    # Each end is in its row, so positions in the group ascend if and only if the ends of each row ascend.
    refuse_if(np.diff(positions, prepend=-1) <= 0, "a position after that of the turn before")
    refuse_if(~mask[positions], "the position of a trained token")
    is_last = np.diff(rows, append=num_rows) > 0
    refuse_if(is_last & (ends != sizes[rows] - 1), "the row's last token, which ends its last turn")
