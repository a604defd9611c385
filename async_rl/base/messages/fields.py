"""Packs typed fields and arrays into messages, and reads them with checks of kinds, ranges and a run's limits."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from async_rl.base.config import Config
from async_rl.base.errors import WireError
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.types import (
    MAX_INT,
    MAX_INT32,
    MAX_METRICS,
    MAX_NAME_CHARS,
    Array,
    ChatMessages,
    Choice,
    EpisodeFacts,
    Flag,
    GroupFacts,
    Kind,
    Metrics,
    Number,
    PerPromptToken,
    PerToken,
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

MAX_VOCABULARY = 2**20
"""The most token ids of a model."""
MAX_COLUMN_BYTES = 2**29
"""The largest packed column of a group before compression (messages/packed.py)."""
VARINT_BYTES = 4
"""The longest varint in a packed column, for a number below 2^28."""
MAX_EXPERTS = 2**16
"""The most experts of a layer."""
MESSAGE_BYTES = 64
"""The most bytes of a prompt's chat messages for each token of max_prompt_tokens. An average token has about 4."""
_WHOLE = object()
_PACKER = msgpack.Packer()
"""Shared, because creating a Packer takes longer than packing a small message."""


def _most_bytes(kind: Kind) -> int:
    """Return the most bytes of a field in a message; for an array, of one element."""
    match kind:
        case Array(dtype=dtype):
            return np.dtype(dtype).itemsize
        case Text(max_chars=max_chars):
            return 4 * max_chars
        case Metrics():
            return MAX_METRICS * (4 * MAX_NAME_CHARS + 16)
    return 16


def _most_bytes_of(declared: type, kind: type[Kind]) -> int:
    """Return the most bytes of all fields of this kind in a class, together."""
    return sum(map(_most_bytes, kinds_of(declared, kind).values()))


def most_support_bytes(tokens: int, max_ids: int) -> int:
    """Return the most bytes of the supports of `tokens` tokens before compression, including a logprob of each id.

    Args:
        max_ids: the most ids of a token's support.
    """
    return min(tokens * VARINT_BYTES * (1 + 2 * max_ids), MAX_COLUMN_BYTES)


_GROUP_BYTES = 4096 + _most_bytes_of(GroupFacts, Scalar)
_EPISODE_BYTES = 512 + _most_bytes_of(EpisodeFacts, Scalar)
_ROW_BYTES = 512 + _most_bytes_of(Row, Scalar)
_TOKEN_BYTES, _TURN_BYTES = _most_bytes_of(Row, PerToken), _most_bytes_of(Row, PerTurn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed sizes of a group in this run. A message outside these limits is refused."""

    group_size: int
    """The most episodes of a group: answers to a question, or multi-turn episodes."""
    fewest_episodes: int
    """The fewest episodes of a group, from which failed ones and those without a verdict are left out."""
    max_rows: int
    """The most rows of all episodes of a group together."""
    max_turns: int
    """The most turns of an episode; 0: only answers to a question are allowed."""
    max_prompt_tokens: int
    max_response_tokens: int
    needs_baseline: bool = False
    """Whether a group must have the reward of a greedy answer. A group from before a resume may lack it."""
    needs_support: bool = False
    """Whether a group must have each token's support (the ids it was drawn from). One from before a resume may lack it.
    """
    needs_support_logprobs: bool = False
    """Whether each id in a support must have its logprob."""
    max_support_ids: int = 0
    """The most ids in a token's support; 0: groups must not have supports."""
    needs_routing: bool = False
    """Whether a group must have the experts of each token. A group from before a resume may lack them."""
    num_experts: int = 0
    """The number of experts in a layer; 0: groups must not have a routing."""
    router_layers: int = 0
    """The number of layers with a router; 0: any number of layers, and of experts per token, is allowed."""
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        experts = recorded_experts(config)
        return cls(
            group_size=config.rollout.group_size,
            fewest_episodes=config.fewest_episodes,
            max_rows=config.max_rows_per_group,
            max_turns=config.rollout.max_turns if config.task.has_turns else 0,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_response_tokens=config.longest_response_tokens,
            needs_baseline=config.algorithm.advantage_entry.needs_greedy_baseline,
            needs_support=config.records_support,
            needs_support_logprobs=config.algorithm.loss_entry.needs_heads,
            max_support_ids=(config.rollout.top_k or MAX_VOCABULARY) if config.records_support else 0,
            needs_routing=experts is not None,
            num_experts=experts.count if experts else 0,
            router_layers=len(experts.layers) if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
        )

    @classmethod
    def of_stored(cls, data: bytes, num_episodes: int | None) -> Limits:
        """Return limits that a stored group meets whatever its sizes are.

        They are for groups that were checked before they were stored: a resume may have changed the config since then.

        Args:
            data: the bytes of the group.
            num_episodes: the number of its episodes; None: not known.
        """
        size = len(data)
        return cls(
            group_size=num_episodes or size, fewest_episodes=num_episodes or 1, max_rows=size, max_turns=size,
            max_prompt_tokens=size, max_response_tokens=size, max_support_ids=MAX_VOCABULARY,
            num_experts=MAX_EXPERTS,
        )  # fmt: skip

    @property
    def max_left_out(self) -> int:
        """The most errors of left-out episodes in a group."""
        return self.max_rows

    @property
    def max_group_bytes(self) -> int:
        """The most bytes of a valid group: 13 for each response token, 68 for each prompt token, some for the rest.

        Supports and routing may take more than everything else.
        """
        of_rows = self.max_rows * (_ROW_BYTES + _TOKEN_BYTES * self.max_response_tokens)
        of_episodes = self.group_size * (_EPISODE_BYTES + _TURN_BYTES * self.max_turns) if self.max_turns else 0
        of_prompt = (4 + MESSAGE_BYTES) * self.max_prompt_tokens
        choices = (1 if self.num_experts <= 256 else 2) * self.router_layers * self.experts_per_token
        of_routing = self.max_rows * (self.max_prompt_tokens + self.max_response_tokens) * choices
        # What zstd can't compress grows by less than 1 %.
        of_supports = most_support_bytes(self.max_rows * self.max_response_tokens, self.max_support_ids)
        return _GROUP_BYTES + of_prompt + of_rows + of_episodes + (of_supports + of_routing) * 101 // 100


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
