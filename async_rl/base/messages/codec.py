"""Encodes a Group to msgpack bytes and decodes it, after checking everything that comes from the network.

    group     {schema, each field of GroupFacts, lengths [N], each field of Row for all N rows,
               episodes: None if each of the N rows is the answer to a question, else see pack_episodes}
    array     [dtype, number of elements, little-endian bytes]
    support   [number of bytes, their zstd frame], None if no row has one: see packed.py
    routing   [bytes of a number, layers, experts of a token, [number of bytes, their zstd frame]] or None: likewise

A group of N rows is sent as columns that contain one row after the other, so that a few array operations check all
rows. An array names its dtype, so that a wrong dtype is refused and not reinterpreted. Decoded arrays are read-only
views of the columns. async_rl/base/types.py declares the fields and their allowed values; this file checks rules
between fields.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.messages.fields import (
    INT32,
    Fields,
    Limits,
    one_dimensional,
    pack,
    pack_array,
    pack_column,
    pack_value,
    read_array,
    read_column,
    read_value,
    refusal,
    refuse_element,
    unpack,
)
from async_rl.base.types import (
    BoolArray,
    EpisodeFacts,
    ExpertChoices,
    FloatArray,
    Group,
    GroupFacts,
    IntArray,
    Kind,
    PerToken,
    PerTurn,
    Row,
    Scalar,
    Support,
    TokenSets,
    kinds_of,
)

T = TypeVar("T")

REWARD_ROUNDING = 1e-6
"""The largest difference between an episode's reward and the sum of its turns' rewards, relative to the sum of
|rewards|."""
MAX_ROUNDING = 1e-4
"""The largest logprob above 0 that counts as a rounding error and is sent as 0. Float32 log-softmax rounds the
logprob 0 of a certain token by up to 1e-5 at |logit| = 100. Larger values are refused: they may be probabilities or
negated logprobs sent by mistake."""

_GROUP = kinds_of(GroupFacts, Kind)
_TOKEN_ARRAYS = kinds_of(Row, PerToken)
_TOKEN_SETS = kinds_of(Row, TokenSets)
_EXPERT_CHOICES = kinds_of(Row, ExpertChoices)
_ROW = kinds_of(Row, Scalar)
_MESSAGE_FIELDS = ("schema", *_GROUP, "lengths", *_TOKEN_ARRAYS, *_TOKEN_SETS, *_EXPERT_CHOICES, *_ROW, "episodes")
_GROUP_FIELDS = frozenset(_MESSAGE_FIELDS)
assert len(_GROUP_FIELDS) == len(_MESSAGE_FIELDS), "a field of GroupFacts has the name of one of Row"

_DECLARED = [kinds_of(declared, Kind) for declared in (GroupFacts, Row, EpisodeFacts)]
SCHEMA_VERSION = zlib.crc32(repr(_DECLARED).encode())
"""The version of every message: a checksum of all declared fields."""

_PACK_GROUP = {name: pack_value(name, kind) for name, kind in _GROUP.items()}
_READ_GROUP = {name: read_value(name, kind) for name, kind in _GROUP.items()}
_DTYPES = {name: np.dtype(kind.dtype) for name, kind in _TOKEN_ARRAYS.items()}
_READ_TOKENS = {name: read_array(name, kind) for name, kind in _TOKEN_ARRAYS.items()}
_PACK_ROWS = {name: pack_column(name, kind) for name, kind in _ROW.items()}
_READ_ROWS = {name: read_column(name, kind, "rows[{}]") for name, kind in _ROW.items()}
_BY_TOKEN = frozenset((*_TOKEN_ARRAYS, *_TOKEN_SETS))
_EPISODE = kinds_of(EpisodeFacts, Scalar)
_TURN_ARRAYS = kinds_of(Row, PerTurn)
_EPISODE_FIELDS = frozenset((*_EPISODE, "row_turns", *_TURN_ARRAYS))
_PACK_EPISODES = {name: pack_column(name, kind) for name, kind in _EPISODE.items()}
_READ_EPISODES = {name: read_column(name, kind, "episodes[{}]") for name, kind in _EPISODE.items()}
_TURN_DTYPES = {name: np.dtype(kind.dtype) for name, kind in _TURN_ARRAYS.items()}
_READ_TURNS = {name: read_array(name, kind) for name, kind in _TURN_ARRAYS.items()}


def encode_group(group: Group) -> bytes:
    """Return a group as bytes, which `decode_group` reads. A logprob above 0 by a rounding error becomes 0.

    WireError: an array has the wrong shape, dtype or length, or the turns of a row do not match its rewards.
    """
    rows = group.rows
    arrays = {name: _column(name, rows, dtype) for name, dtype in _DTYPES.items()}
    if len(logprobs := arrays["logprobs"]) and 0 < np.maximum.reduce(logprobs) <= MAX_ROUNDING:
        arrays["logprobs"] = np.minimum(logprobs, 0)
    return pack(
        {
            "schema": SCHEMA_VERSION,
            **{name: pack_field(getattr(group, name)) for name, pack_field in _PACK_GROUP.items()},
            "lengths": pack_array(np.array([len(row.tokens) for row in rows], INT32)),
            **{name: pack_array(array) for name, array in arrays.items()},
            **{name: _pack_column(name, group) for name in (*_TOKEN_SETS, *_EXPERT_CHOICES)},
            **{
                name: pack_field([getattr(row, name) for row in rows])
                for name, pack_field in _PACK_ROWS.items()
            },
            "episodes": pack_episodes(group),
        }
    )


def _pack_column(name: str, group: Group) -> list[Any] | None:
    """Return the field `name` of the rows, several numbers for each token, as a column; None if no row has it."""
    if all(getattr(row, name) is None for row in group.rows):
        return None
    from async_rl.base.messages.packed import pack_routing, pack_supports

    return pack_supports(name, group.rows) if name in _TOKEN_SETS else pack_routing(name, group)


class GroupColumns(NamedTuple):
    """A checked group of N rows in the form that is sent: a field's column has the values of all rows in order.
    """

    facts: GroupFacts
    lengths: list[int]  # [N] T of each row
    ends: list[int]  # [N] the sums of these
    rows: dict[str, Any]
    """The column of each field of Row. Of a field with a number per token it is an array [sum of T], or None if
    the field is missing; of the support, one Support of all tokens; of any other field, a list [N]. Answers to a
    question have no turns."""
    episodes: dict[str, list[Any]] | None
    """The column [G] of each field of EpisodeFacts. None if each row is a single-turn episode."""
    newest_version: int
    """The highest version of the group's tokens. A trained token has it, because the last token of each row is trained.
    """
    trained_tokens: list[int]  # [N] the number of trained tokens of each row

    @property
    def starts(self) -> list[int]:
        """The position of each row's first token in the columns."""
        return [0, *self.ends[:-1]]

    @property
    def episode_rewards(self) -> list[float]:
        """The reward of each episode."""
        rewards: list[float] = self.rows["reward"]
        if self.episodes is None:
            return rewards
        return [rewards[first] for first in itertools.accumulate(self.episodes["rows"][:-1], initial=0)]

    def oldest_versions(self) -> list[int]:
        """Return the lowest version of a trained token in each row. Its first trained token has it."""
        firsts = self.starts
        if self.trained_tokens != self.lengths:
            masks = np.split(self.rows["mask"], firsts[1:])
            firsts = [start + int(mask.argmax()) for start, mask in zip(firsts, masks, strict=True)]
        versions: list[int] = self.rows["versions"][firsts].tolist()
        return versions

    def group(self) -> Group:
        """Return the group as a Group, whose arrays are views of the columns."""
        bounds = list(map(slice, self.starts, self.ends))
        columns = {name: _by_row(column, bounds) if name in _BY_TOKEN else column for name, column in self.rows.items()}
        return Group(
            **{name: getattr(self.facts, name) for name in _GROUP},
            rows=_made(Row, columns),
            episodes=_made(EpisodeFacts, self.episodes or {}),
        )


def _by_row(column: npt.NDArray[Any] | Support | None, bounds: Sequence[slice]) -> list[Any]:
    """Split a column with a value per token into its rows.

    Args:
        bounds: the slice of each row.
    """
    if isinstance(column, Support):
        return [column.cut(of_row.start, of_row.stop) for of_row in bounds]
    return [None if column is None else column[of_row] for of_row in bounds]


def _made(declared: type[T], columns: dict[str, list[Any]]) -> tuple[T, ...]:
    """Return one object of class `declared` for each row, from the columns of its fields."""
    names = tuple(columns)
    return tuple([declared(**dict(zip(names, row, strict=False))) for row in zip(*columns.values(), strict=True)])


def decode_group(data: bytes | memoryview, limits: Limits) -> Group:
    """Decode the bytes of `encode_group`, after the checks of `check_group`. The group's arrays are read-only."""
    return check_group(data, limits).group()


def check_group(data: bytes | memoryview, limits: Limits) -> GroupColumns:
    """Check the bytes of `encode_group` and return them as columns, in half the time that decoding them to rows takes.

    A valid message has exactly the known fields, each as it is declared, sizes within `limits`, and a baseline,
    supports and routing if the limits require them. The arrays of each row have equal length T >= 1. Its versions start
    at start_version or later and do not decrease. Its last token is trained, and the logprob of a masked token is 0.
    Episodes meet `check_episodes`. Otherwise this raises WireError, which names the field and the value.
    """
    if len(data) > limits.max_group_bytes:
        raise WireError(
            f"group: {len(data)} bytes, allowed at most {limits.max_group_bytes} (from rollout.group_size, "
            "task.max_prompt_tokens, rollout.max_response_tokens and rollout.max_episode_tokens)"
        )
    fields = Fields(unpack(data), _GROUP_FIELDS)
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    facts = GroupFacts(**{name: read(fields, limits) for name, read in _READ_GROUP.items()})
    if facts.temperature == 0:
        raise fields.refuse("temperature", "above 0")
    if limits.needs_baseline and facts.baseline_reward is None:
        raise fields.refuse("baseline_reward", "the reward of a greedy answer, which algorithm.advantage needs")
    episodes = fields.nested_or_none("episodes")
    if episodes is not None and not limits.max_turns:
        raise fields.refuse("episodes", "None: an episode of this run is the answer to a question")
    lengths = _read_lengths(fields, limits, episodes is not None)
    ends = list(itertools.accumulate(lengths))
    rows: dict[str, Any] = {name: read(fields, ends[-1], ends[-1], lengths) for name, read in _READ_TOKENS.items()}
    newest_version = _check_versions(rows["versions"], facts.start_version, lengths, ends)
    trained_tokens = _check_mask(rows["mask"], rows["logprobs"], lengths, ends)
    num_prompt = len(facts.prompt_tokens)
    for name in _TOKEN_SETS:
        rows[name] = None
        if fields.value(name) is not None:
            from async_rl.base.messages.packed import read_supports

            rows[name] = read_supports(fields, name, rows["tokens"], rows["mask"], lengths, limits)
        elif limits.needs_support:
            raise fields.refuse(name, "the ids that each token was drawn from: rollout.top_p, top_k or min_p is set")
    for name in _EXPERT_CHOICES:
        rows[name] = [None] * len(lengths)
        if fields.value(name) is not None:
            from async_rl.base.messages.packed import read_routing

            rows[name] = read_routing(fields, name, num_prompt, lengths, limits)
        elif limits.needs_routing:
            raise fields.refuse(name, "the experts of each token: the model has some, and rollout.routing is replay")
    if not num_prompt:
        _check_no_prompt(limits.max_prompt_tokens, rows["mask"], lengths)
    rows |= {name: read(fields, len(lengths)) for name, read in _READ_ROWS.items()}
    of_episodes = None
    if episodes is not None:
        of_episodes, turns = check_episodes(episodes, limits, lengths, rows["mask"], rows["reward"])
        rows |= turns
    return GroupColumns(facts, lengths, ends, rows, of_episodes, newest_version, trained_tokens)


def _column(name: str, rows: Sequence[Row], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    arrays = []
    for i, row in enumerate(rows):
        array = one_dimensional(name, getattr(row, name), dtype, i)
        if len(array) != len(row.tokens):
            raise WireError(f"rows[{i}].{name}: {len(array)} elements for {len(row.tokens)} tokens")
        arrays.append(array)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _read_lengths(fields: Fields, limits: Limits, has_episodes: bool) -> list[int]:
    """Return the number of tokens of each row."""
    most = limits.max_rows if has_episodes else limits.group_size
    lengths: list[int] = fields.array("lengths", INT32, limits.fewest_episodes, most).tolist()
    if min(lengths) < 1 or max(lengths) > limits.max_response_tokens:
        bad = min(lengths) if min(lengths) < 1 else max(lengths)
        raise fields.refuse("lengths", f"1..{limits.max_response_tokens} tokens a row", bad)
    return lengths


def _check_versions(versions: IntArray, start_version: int, lengths: list[int], ends: list[int]) -> int:
    """Return the newest token version.

    Args:
        lengths, ends: the number of tokens of each row, and their cumulative sums.

    Raises:
        WireError: a version is below start_version, or decreases within a row.
    """
    oldest, newest = int(np.minimum.reduce(versions)), int(np.maximum.reduce(versions))
    if oldest < start_version:
        too_old = versions < start_version
        raise refuse_element("versions", versions, too_old, lengths, f"start_version = {start_version} and up")
    if oldest < newest:
        falls = versions[1:] < versions[:-1]
        falls[[end - 1 for end in ends[:-1]]] = False  # at the start of a row they may decrease
        if b"\1" in falls.tobytes():  # a tenth of the time of falls.any()
            at = int(falls.argmax())
            allowed = f"{versions[at]} and up, as the token before has version {versions[at]}"
            raise refuse_element("versions", versions, np.append(False, falls), lengths, allowed)
    return newest


def _check_mask(mask: BoolArray, logprobs: FloatArray, lengths: list[int], row_ends: list[int]) -> list[int]:
    """Return the number of trained tokens of each row.

    WireError: the last token of a row is masked, or a masked token has a logprob that is not 0.
    """
    if b"\0" not in mask.tobytes():  # a tenth of the time of mask.all()
        return lengths
    ends = np.array(row_ends, np.intp)
    is_trained = mask[ends - 1]
    if not is_trained.all():
        raise refusal(f"rows[{is_trained.argmin()}].mask", False, "true for the last token of a row")
    has_logprob = (logprobs != 0) & ~mask
    if has_logprob.any():
        raise refuse_element("logprobs", logprobs, has_logprob, lengths, "0 for a token that is not trained")
    trained: list[int] = np.add.reduceat(mask, ends - lengths, dtype=np.intp).tolist()
    return trained


def _check_no_prompt(max_tokens: int, mask: BoolArray, lengths: list[int]) -> None:
    """Raise WireError if a row of a group without a prompt begins with a trained token."""
    is_trained = mask[np.cumsum(lengths, dtype=np.intp) - lengths]
    if is_trained.any():
        raise WireError(
            f"prompt_tokens: 0 elements, allowed 1..{max_tokens}, as the first token of row {is_trained.argmax()} "
            "is trained"
        )


def pack_episodes(group: Group) -> dict[str, Any] | None:
    """Return the episodes of a group as columns, or None if the group has no episodes.

    WireError: a row has not exactly one reward for each of its turns, or has turns although the group has no episodes.
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
        **{
            name: pack_field([getattr(episode, name) for episode in episodes])
            for name, pack_field in _PACK_EPISODES.items()
        },
        "row_turns": pack_array(np.array([len(row.turn_ends) for row in rows], INT32)),
        **{
            name: pack_array(np.array([value for row in rows for value in getattr(row, name)], dtype))
            for name, dtype in _TURN_DTYPES.items()
        },
    }


def check_episodes(
    columns: dict[Any, Any], limits: Limits, lengths: list[int], mask: BoolArray, rewards: list[float]
) -> tuple[dict[str, list[Any]], dict[str, list[tuple[Any, ...]]]]:
    """Check the columns of `pack_episodes`.

    The numbers of episodes and of turns are within `limits`. Each row belongs to one episode. All rows of an episode
    have the same reward, which is the sum of the rewards of its turns. Each row trains at least one turn. The ends of a
    row's turns ascend, each is a trained token, and the last one is the row's last token. Otherwise this raises
    WireError, which names the field and the value.

    Args:
        lengths: the number of tokens of each row.
        mask: whether each token is trained, row after row. The last token of each row is.
        rewards: the reward of each row.

    Returns:
        A column for each field of EpisodeFacts, and a column for each of a row's arrays of turns.
    """
    fields = Fields(columns, _EPISODE_FIELDS, "episodes.")
    num_episodes = len(fields.array("rows", INT32, limits.fewest_episodes, limits.group_size))
    episodes = {name: read(fields, num_episodes) for name, read in _READ_EPISODES.items()}
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
    """Read and check the arrays of turns. Returns each as a list with one tuple per row."""
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
