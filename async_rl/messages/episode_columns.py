"""Encodes the episodes of a rollout group as columns, and checks such columns.

    episodes  {rows [G], turns [G], tool_calls [G], generate_s [G], tool_s [G], duration_s [G], ends [G],
               metrics [G], errors [G], row_turns [rollouts], turn_ends [sum of row_turns],
               turn_rewards [sum of row_turns]}

`row_turns` is the number of turns that each rollout trains. A group whose rollouts are answers to a question has none
of these columns.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.errors import WireError
from async_rl.messages.limits import MAX_CAUSE_CHARS, MAX_METRICS, Limits
from async_rl.messages.message_reader import FLOAT64, INT32, MAX_NAME_CHARS, Fields, pack_array, refusal
from async_rl.types import BoolArray, EpisodeFacts, IntArray, RolloutGroup

ENDS = ("done", "length", "turns", "timeout", "error")
REWARD_ROUNDING = 1e-6
"""The largest difference, relative to the sum of the absolute values, between an episode's reward and the sum of the
rewards of its turns."""

_COUNTS = ("rows", "turns", "tool_calls")
_TIMES = ("generate_s", "tool_s", "duration_s")
_FIELDS = (*_COUNTS, *_TIMES, "ends", "metrics", "errors", "row_turns", "turn_ends", "turn_rewards")


class EpisodeColumns(NamedTuple):
    """The episodes of a group and the turns of each of its rollouts, after the checks of `check_episodes`."""

    facts: tuple[EpisodeFacts, ...]  # [G]
    turn_ends: list[tuple[int, ...]]  # [rollouts]
    turn_rewards: list[tuple[float, ...]]  # [rollouts]


def pack_episodes(group: RolloutGroup) -> dict[str, Any] | None:
    """Return the episodes of a group as columns, or None if the group has none.

    WireError: a rollout has not one reward for each of its turns, or it has turns and the group no episodes.
    """
    rollouts, facts = group.rollouts, group.episodes
    for i, rollout in enumerate(rollouts):
        if len(rollout.turn_ends) != len(rollout.turn_rewards):
            raise WireError(
                f"rollouts[{i}].turn_rewards: {len(rollout.turn_rewards)} rewards for {len(rollout.turn_ends)} turns"
            )
        if rollout.turn_ends and not facts:
            raise refusal(f"rollouts[{i}].turn_ends", rollout.turn_ends, "none in a group without episodes")
    if not facts:
        return None
    counts = {name: _int32([getattr(episode, name) for episode in facts]) for name in _COUNTS}
    times = {name: _float64([getattr(episode, name) for episode in facts]) for name in _TIMES}
    return {
        **counts, **times,
        "ends": [episode.end for episode in facts],
        "metrics": [{name: float(value) for name, value in episode.metrics.items()} for episode in facts],
        "errors": [error_text(episode.error) for episode in facts],
        "row_turns": _int32([len(rollout.turn_ends) for rollout in rollouts]),
        "turn_ends": _int32([end for rollout in rollouts for end in rollout.turn_ends]),
        "turn_rewards": _float64([reward for rollout in rollouts for reward in rollout.turn_rewards]),
    }


def error_text(error: str) -> str:
    """Return the text of an error as it is sent: at most MAX_CAUSE_CHARS characters of valid Unicode."""
    return error.encode(errors="replace").decode()[:MAX_CAUSE_CHARS]  # an error may quote half a character


def read_errors(fields: Fields, name: str, low: int, high: int) -> tuple[str, ...]:
    """Return a list of `low` to `high` texts of errors. WireError: it is another list."""
    errors = fields.items(name, low, high)
    if not all(isinstance(error, str) and len(error) <= MAX_CAUSE_CHARS for error in errors):
        raise fields.refuse(name, f"texts of at most {MAX_CAUSE_CHARS} characters")
    return tuple(errors)


def check_episodes(
    columns: dict[Any, Any], limits: Limits, lengths: list[int], mask: BoolArray, rewards: list[float]
) -> EpisodeColumns:
    """Check the columns of `pack_episodes`, and return them.

    The numbers of episodes and of turns are within `limits`. Each rollout belongs to one episode, and all rollouts of
    an episode have its reward, to which the rewards of its turns add up. Each rollout trains at least one turn. The
    ends of its turns ascend, each is a trained token, and the last one is the rollout's last token. Otherwise this
    raises WireError, which names the field and the value.

    Args:
        lengths: the number of tokens of each rollout.
        mask: for all rollouts, one after the other, whether a token is trained. The last token of each rollout is.
        rewards: the reward of each rollout.
    """
    fields = Fields(columns, _FIELDS, "episodes.")
    facts = _read_facts(fields, limits, len(lengths))
    turn_ends, turn_rewards = _read_turns(fields, facts, lengths, mask)
    ends = list(itertools.accumulate(episode.rows for episode in facts))
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for row in range(start + 1, end):
            if rewards[row] != rewards[start]:
                allowed = f"{rewards[start]}, the reward of the episode's first rollout"
                raise refusal(f"rollouts[{row}].reward", rewards[row], allowed)
        of_turns = [reward for of_row in turn_rewards[start:end] for reward in of_row]
        # A sum is not close to the reward, which is finite, if an element is not.
        if not math.isclose(sum(of_turns), rewards[start], abs_tol=REWARD_ROUNDING * sum(map(abs, of_turns))):
            allowed = f"{rewards[start]}, the reward of the episode"
            raise refusal(f"episodes[{i}], sum of turn_rewards", sum(of_turns), allowed)
    return EpisodeColumns(facts, turn_ends, turn_rewards)


def _read_facts(fields: Fields, limits: Limits, num_rows: int) -> tuple[EpisodeFacts, ...]:
    rows = _numbers(fields, "rows", INT32, (limits.fewest_episodes, limits.group_size), lowest=1)
    if sum(rows) != num_rows:
        raise fields.refuse("rows", f"a sum of {num_rows}, the number of rollouts", sum(rows))
    size = (len(rows), len(rows))
    turns = _numbers(fields, "turns", INT32, size, lowest=1)
    if max(turns) > limits.max_turns:
        raise fields.refuse("turns", f"at most {limits.max_turns} in an episode", max(turns))
    tool_calls = _numbers(fields, "tool_calls", INT32, size)
    generate_s, tool_s, duration_s = (_numbers(fields, name, FLOAT64, size) for name in _TIMES)
    ends = fields.items("ends", *size)
    metrics = fields.items("metrics", *size)
    errors = read_errors(fields, "errors", *size)
    for i, end in enumerate(ends):
        if end not in ENDS:
            raise refusal(f"episodes[{i}].end", end, " or ".join(ENDS))
    return tuple(
        EpisodeFacts(
            rows=rows[i], turns=turns[i], tool_calls=tool_calls[i], generate_s=generate_s[i], tool_s=tool_s[i],
            duration_s=duration_s[i], end=ends[i], metrics=_read_metrics(i, metrics[i]), error=errors[i],
        )
        for i in range(len(rows))
    )  # fmt: skip


def _numbers(
    fields: Fields, name: str, dtype: np.dtype[Any], size: tuple[int, int], lowest: int = 0
) -> list[Any]:
    """Return an array of finite numbers >= lowest as a list; `size` is the fewest and the most elements."""
    numbers: list[Any] = fields.array(name, dtype, *size).tolist()
    for i, number in enumerate(numbers):
        if not lowest <= number <= sys.float_info.max:
            raise refusal(f"episodes[{i}].{name}", number, f"a finite number >= {lowest}")
    return numbers


def _read_metrics(episode: int, metrics: object) -> dict[str, float]:
    path = f"episodes[{episode}].metrics"
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise refusal(path, metrics, f"a map of at most {MAX_METRICS} metrics")
    for name in metrics:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise refusal(path, name, f"names of at most {MAX_NAME_CHARS} characters")
    values = Fields(metrics, metrics, f"{path}.")
    return {name: values.number(name) for name in metrics}


def _read_turns(
    fields: Fields, facts: Sequence[EpisodeFacts], lengths: list[int], mask: BoolArray
) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
    """Return the checked ends of each rollout's turns, and their rewards, the values of which are not checked."""
    num_rows = len(lengths)
    row_turns = fields.array("row_turns", INT32, num_rows, num_rows)
    if row_turns.min() < 1:
        raise fields.refuse("row_turns", "at least 1 turn in a rollout", int(row_turns.min()))
    counts = row_turns.tolist()
    rest = iter(counts)
    for i, episode in enumerate(facts):
        trained = sum(itertools.islice(rest, episode.rows))
        if trained > episode.turns:
            allowed = f"at least {trained}, the number of turns that its rollouts train"
            raise refusal(f"episodes[{i}].turns", episode.turns, allowed)
    total = sum(counts)
    ends = fields.array("turn_ends", INT32, total, total)
    rewards = fields.array("turn_rewards", FLOAT64, total, total).tolist()
    rows = np.repeat(np.arange(num_rows), row_turns)
    sizes = np.array(lengths)
    _refuse_turn(ends, (ends < 0) | (ends >= sizes[rows]), rows, "a position in the rollout")
    positions = (np.cumsum(sizes) - sizes)[rows] + ends
    # Each end is in its rollout, so positions in the group ascend if and only if the ends of each rollout ascend.
    _refuse_turn(ends, np.diff(positions, prepend=-1) <= 0, rows, "a position after that of the turn before")
    _refuse_turn(ends, ~mask[positions], rows, "the position of a trained token")
    is_last = np.diff(rows, append=num_rows) > 0
    _refuse_turn(ends, is_last & (ends != sizes[rows] - 1), rows, "the rollout's last token, which ends its last turn")
    bounds = [0, *itertools.accumulate(counts)]
    of_rows = list(itertools.pairwise(bounds))
    plain_ends = ends.tolist()
    return [tuple(plain_ends[a:b]) for a, b in of_rows], [tuple(rewards[a:b]) for a, b in of_rows]


def _refuse_turn(ends: IntArray, is_bad: npt.NDArray[np.bool_], rows: npt.NDArray[np.intp], allowed: str) -> None:
    """Raise WireError for the first bad end of a turn, if there is one; it names the rollout and the value."""
    if is_bad.any():
        at = int(is_bad.argmax())
        raise refusal(f"rollouts[{rows[at]}].turn_ends", int(ends[at]), allowed)


def _int32(values: list[int]) -> list[Any]:
    return pack_array(np.array(values, INT32))


def _float64(values: list[float]) -> list[Any]:
    return pack_array(np.array(values, FLOAT64))
