"""Packs typed fields, arrays and episodes into messages, and reads them with checks of kinds, ranges and lengths."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.messages.limits import Limits
from async_rl.base.types import (
    MAX_INT,
    MAX_INT32,
    MAX_METRICS,
    MAX_NAME_CHARS,
    Array,
    BoolArray,
    ChatMessages,
    Choice,
    EpisodeFacts,
    Flag,
    Group,
    IntArray,
    Kind,
    Metrics,
    Number,
    PerPromptToken,
    PerTurn,
    Row,
    Scalar,
    Text,
    Texts,
    Whole,
    kinds_of,
)

INT32, INT64, FLOAT64, BOOL = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8"), np.dtype("bool")
"""The dtypes of the arrays in messages, all in little-endian order."""

_WHOLE = object()
_PACKER = msgpack.Packer()
"""Shared, because creating a Packer takes longer than packing a small message."""


class Fields:
    """A decoded msgpack map. Each method reads one field and raises WireError if its value is not allowed.

    Args:
        values: the decoded message.
        names: the fields that it must have.
        path: prefix of the field names in errors.

    Raises:
        WireError: `values` is not a map, or does not have exactly the fields `names`.
    """

    def __init__(self, values: object, names: Iterable[str], path: str = "") -> None:
        if not isinstance(values, dict):
            raise refusal(path.rstrip(".") or "message", values, "a map")
        self._values = values
        self._path = path
        names = frozenset(names)
        if values.keys() != names:
            for name in sorted(names - values.keys()):
                raise WireError(f"{path}{name}: missing, found {sorted(map(str, values))[:20]}")
            raise refusal(f"{path}{min(map(str, values.keys() - names))[:80]}", "a field", "no such field")

    def refuse(self, name: str, allowed: str, got: object = _WHOLE) -> WireError:
        """Return a WireError about field `name`, for the caller to raise.

        Args:
            allowed: describes the allowed values.
            got: the part of the field's value that is wrong; by default the whole value.
        """
        return refusal(self._path + name, self._values[name] if got is _WHOLE else got, allowed)

    def value(self, name: str) -> Any:
        """Return a field without a check; the caller checks it."""
        return self._values[name]

    def integer(self, name: str, low: int, high: int = MAX_INT) -> int:
        value = self._values[name]
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an integer in {low}..{high}")
        return value

    def number(self, name: str, low: float = -math.inf) -> float:
        """Read a field that must be a finite number >= low."""
        value = self._values[name]
        if type(value) not in (int, float) or not low <= value < math.inf or value == -math.inf:
            raise self.refuse(name, "a finite number" + (f" >= {low}" if low > -math.inf else ""))
        return float(value)

    def number_or_none(self, name: str, low: float = -math.inf) -> float | None:
        return None if self._values[name] is None else self.number(name, low)

    def boolean(self, name: str) -> bool:
        value = self._values[name]
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str, max_chars: int = MAX_NAME_CHARS) -> str:
        value = self._values[name]
        if not isinstance(value, str) or len(value) > max_chars:
            raise self.refuse(name, f"a string of at most {max_chars} characters")
        return value

    def items(self, name: str, low: int, high: int) -> list[Any]:
        value = self._values[name]
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise self.refuse(name, f"a list of {low}..{high} items")
        return value

    def nested(self, name: str) -> dict[Any, Any]:
        value = self._values[name]
        if not isinstance(value, dict):
            raise self.refuse(name, "a map")
        return value

    def nested_or_none(self, name: str) -> dict[Any, Any] | None:
        return None if self._values[name] is None else self.nested(name)

    def array(self, name: str, dtype: np.dtype[Any], low: int, high: int) -> npt.NDArray[Any]:
        """Read a one-dimensional array of this exact dtype with low..high elements. It is read-only."""
        value = self._values[name]
        if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], bytes):
            raise self.refuse(name, "a list of dtype, number of elements, bytes")
        kind, count, data = value
        if kind != dtype.str:
            raise WireError(f"{self._path}{name}: dtype {_short(kind)}, allowed {dtype.str} ({dtype.name})")
        if type(count) is not int or not low <= count <= high:
            allowed = f"{low}" if low == high else f"{low}..{high}"
            raise WireError(f"{self._path}{name}: {_short(count)} elements, allowed {allowed}")
        if len(data) != count * dtype.itemsize:
            raise WireError(f"{self._path}{name}: {len(data)} bytes, allowed {count * dtype.itemsize}")
        array = np.frombuffer(data, dtype)
        # numpy accepts any byte as a bool, but arithmetic with bytes other than 0 and 1 is wrong.
        if dtype == BOOL and count and (worst := np.maximum.reduce(array.view(np.uint8))) > 1:
            raise self.refuse(name, "bytes 0 and 1", int(worst))
        return array


def pack_array(array: npt.NDArray[Any]) -> list[Any]:
    """Return an array as a list that `Fields.array` reads: [dtype, number of elements, bytes]."""
    return [array.dtype.str, len(array), array.tobytes()]


def pack(message: dict[str, Any]) -> bytes:
    """Return a map as msgpack bytes. Raises WireError if a text in it is not valid Unicode."""
    try:
        data: bytes = _PACKER.pack(message)
    except UnicodeEncodeError as error:
        raise WireError(f"message: the text {_short(error.object)} is not valid Unicode") from None
    return data


def unpack(data: bytes | memoryview) -> object:
    """Decode the one msgpack object in `data`. Raises WireError if the data is anything else."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        head = bytes(data[:16])
        raise WireError(f"message: {len(data)} bytes starting {head!r}, allowed one msgpack object ({error})") from None


def refusal(field: str, value: object, allowed: str) -> WireError:
    return WireError(f"{field}: got {_short(value)}, allowed {allowed}")


def _short(value: object) -> str:
    # Cut before repr: a refused value may be the whole of a large message.
    if isinstance(value, str | bytes):
        return repr(value[:80]) + (f"... ({len(value)} long)" if len(value) > 80 else "")
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:80]


Check = Callable[[list[Any], str], list[Any]]
"""Checks values and returns them. Its second argument is the path of value i in errors, with {} for i."""


def pack_value(name: str, kind: Kind) -> Callable[[Any], Any]:
    """Return a function that packs a value of field `name`, according to its kind."""
    match kind:
        case Whole():
            return operator.index
        case Number(may_be_none=True):
            return lambda value: None if value is None else float(value)
        case Number():
            return float
        case Flag():
            return bool
        case Text(is_cut=True, max_chars=max_chars):
            return lambda text: cut_text(text, max_chars)
        case Text() | Choice():
            return lambda text: text
        case Metrics():
            return lambda metrics: {key: float(value) for key, value in metrics.items()}
        case Texts(each=each):
            pack_text = pack_value(name, each)
            return lambda texts: [pack_text(text) for text in texts]
        case ChatMessages():
            return lambda messages: [[each["role"], each["content"]] for each in messages]
        case PerPromptToken(dtype=dtype):
            return lambda array: pack_array(one_dimensional(name, array, np.dtype(dtype)))
    raise TypeError(f"{name}: a field of a group can't be {kind}")


def pack_column(name: str, kind: Kind) -> Callable[[list[Any]], list[Any]]:
    """Return a function that packs the values of field `name` of all rows or episodes, according to its kind."""
    if (dtype := _column_dtype(kind)) is not None:
        return lambda values: pack_array(np.array(values, dtype))
    pack_one = pack_value(name, kind)
    return lambda values: [pack_one(value) for value in values]


def read_value(name: str, kind: Kind) -> Callable[[Fields, Limits], Any]:
    """Return a function that reads the value of a group's field `name`, according to its kind."""
    match kind:
        case Whole(low=low, high=high):
            return lambda fields, _: fields.integer(name, low, high)
        case Number(low=least, may_be_none=True):
            return lambda fields, _: fields.number_or_none(name, least)
        case Number(low=least):
            return lambda fields, _: fields.number(name, least)
        case Flag():
            return lambda fields, _: fields.boolean(name)
        case Text(max_chars=max_chars):
            return lambda fields, _: fields.text(name, max_chars)
        case Choice():
            check_one = _check_of(kind)
            return lambda fields, _: check_one([fields.value(name)], name)[0]
        case Texts(each=each):
            check = _check_of(each)
            return lambda fields, limits: tuple(check(fields.items(name, 0, limits.max_left_out), name + "[{}]"))
        case ChatMessages():
            return lambda fields, limits: _read_messages(fields, name, limits.max_prompt_tokens)
        case PerPromptToken():
            read = read_array(name, kind)
            return lambda fields, limits: read(fields, 0, limits.max_prompt_tokens, None)
    raise TypeError(f"{name}: a field of a group can't be {kind}")


def read_column(name: str, kind: Kind, path: str) -> Callable[[Fields, int], list[Any]]:
    """Return a function that reads a given number of values of field `name`, one per row or episode.

    Args:
        path: the path of row or episode i in errors, with {} for i.
    """
    path = f"{path}.{name}"
    check = _check_of(kind)
    if (dtype := _column_dtype(kind)) is None:
        return lambda fields, size: check(fields.items(name, size, size), path)
    return lambda fields, size: check(fields.array(name, dtype, size, size).tolist(), path)


def read_array(name: str, kind: Array) -> Callable[[Fields, int, int, Sequence[int] | None], npt.NDArray[Any]]:
    """Return a function (fields, fewest, most, lengths) that reads an array of fewest..most numbers.

    `lengths` is the number of elements of each row, so that an error can name the row; None: they belong to no row.
    """
    dtype, low, high = np.dtype(kind.dtype), kind.low, kind.high
    allowed = "finite numbers" if dtype.kind == "f" else "whole numbers"
    allowed += f" >= {low}" * (low > -math.inf) + f" <= {high}" * (high < math.inf)
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        low, high = max(low, -largest), min(high, largest)

    def read(fields: Fields, fewest: int, most: int, sizes: Sequence[int] | None) -> npt.NDArray[Any]:
        array = fields.array(name, dtype, fewest, most)
        # A NaN makes both comparisons false.
        if len(array) and not (
            (low == -math.inf or np.minimum.reduce(array) >= low)
            and (high == math.inf or np.maximum.reduce(array) <= high)
        ):
            is_bad = ~((array >= low) & (array <= high))
            if sizes is None:
                raise fields.refuse(name, allowed, array[is_bad.argmax()].item())
            raise refuse_element(name, array, is_bad, sizes, allowed)
        return array

    return read


def _read_messages(fields: Fields, name: str, most: int) -> tuple[dict[str, str], ...]:
    messages = fields.items(name, 0, most)
    for each in messages:
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(text, str) for text in each):
            raise fields.refuse(name, "lists of two texts, role and content", each)
    return tuple([{"role": role, "content": content} for role, content in messages])


def one_dimensional(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], row: int = -1) -> npt.NDArray[Any]:
    """Return an array in little-endian order. Raises WireError if it is not one-dimensional, or has another dtype.

    Args:
        row: the number of the array's row, for errors; -1: it belongs to the whole group.
    """
    if isinstance(array, np.ndarray) and array.ndim == 1:
        if array.dtype == dtype:
            return array
        if array.dtype == dtype.newbyteorder(">"):
            return array.astype(dtype)
    path = f"rows[{row}].{name}" if row >= 0 else name
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        got = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise WireError(f"{path}: got {got}, allowed a one-dimensional numpy array")
    raise WireError(f"{path}: dtype {array.dtype.str!r}, allowed {dtype.str} ({dtype.name})")


def cut_text(text: str, max_chars: int) -> str:
    """Return a text that can be sent: at most `max_chars` characters of valid Unicode."""
    return text.encode(errors="replace").decode()[:max_chars]  # an error may quote half a character


def refuse_element(
    name: str, column: npt.NDArray[Any], is_bad: npt.NDArray[np.bool_], sizes: Sequence[int], allowed: str
) -> WireError:
    """Return a WireError about the first bad element of a column, for the caller to raise. It names row and value.

    Args:
        is_bad: for each element, whether it is bad.
        sizes: the number of elements of each row.
        allowed: describes the allowed values.
    """
    at = int(is_bad.argmax())
    row = np.cumsum(sizes).searchsorted(at, side="right")
    return refusal(f"rows[{row}].{name}", column[at].item(), allowed)


def _column_dtype(kind: Kind) -> np.dtype[Any] | None:
    """Return the dtype of the array in which values of a kind are sent; None if they are sent as a list."""
    match kind:
        case Whole(low=low, high=high):
            return INT32 if low >= -MAX_INT32 and high <= MAX_INT32 else INT64
        case Number(may_be_none=False):
            return FLOAT64
        case Flag():
            return BOOL
        case Text() | Choice() | Metrics():
            return None
    raise TypeError(f"a field of a row or an episode can't be {kind}")


def _check_of(kind: Kind) -> Check:
    """Return the function that checks values of a kind. They come from an array or directly from a message."""
    match kind:
        case Whole(low=low, high=high):
            return lambda values, path: _check_range(values, path, low, high, f"an integer in {low}..{high}")
        case Number(low=least):
            allowed = "a finite number" + f" >= {least}" * (least > -math.inf)
            finite = sys.float_info.max
            return lambda values, path: _check_range(values, path, max(least, -finite), finite, allowed)
        case Text(max_chars=max_chars):
            return lambda values, path: _check_texts(values, path, max_chars)
        case Choice(names=names):
            return lambda values, path: _check_choices(values, path, names)
        case Metrics():
            return lambda values, path: [_checked_metrics(each, path.format(i)) for i, each in enumerate(values)]
    return lambda values, path: values


def _check_range(values: list[Any], path: str, low: float, high: float, allowed: str) -> list[Any]:
    for value in values:
        if not low <= value <= high:
            raise refusal(path.format(values.index(value)), value, allowed)
    return values


def _check_texts(values: list[Any], path: str, max_chars: int) -> list[Any]:
    for i, value in enumerate(values):
        if not isinstance(value, str) or len(value) > max_chars:
            raise refusal(path.format(i), value, f"a string of at most {max_chars} characters")
    return values


def _check_choices(values: list[Any], path: str, names: tuple[str, ...]) -> list[Any]:
    for value in values:
        if value not in names:
            raise refusal(path.format(values.index(value)), value, " or ".join(names))
    return values


def _checked_metrics(metrics: object, path: str) -> dict[str, float]:
    if metrics == {}:  # as most rows have it
        return {}
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise refusal(path, metrics, f"a map of at most {MAX_METRICS} metrics")
    for name in metrics:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise refusal(path, name, f"names of at most {MAX_NAME_CHARS} characters")
    values = Fields(metrics, metrics, f"{path}.")
    return {name: values.number(name) for name in metrics}


REWARD_ROUNDING = 1e-6
"""The largest difference between an episode's reward and the sum of its turns' rewards, relative to the sum of
|rewards|."""

_EPISODE = kinds_of(EpisodeFacts, Scalar)
_TURN_ARRAYS = kinds_of(Row, PerTurn)
_FIELDS = frozenset((*_EPISODE, "row_turns", *_TURN_ARRAYS))
_PACK = {name: pack_column(name, kind) for name, kind in _EPISODE.items()}
_READ = {name: read_column(name, kind, "episodes[{}]") for name, kind in _EPISODE.items()}
_DTYPES = {name: np.dtype(kind.dtype) for name, kind in _TURN_ARRAYS.items()}
_READ_TURNS = {name: read_array(name, kind) for name, kind in _TURN_ARRAYS.items()}


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
