"""Packs and reads the declared fields of a group, of its rows and of its episodes, each by its kind.

The functions here make those that pack or read one field, which the codec makes once for every field. A field of a
group is sent as one value. One of the rows or of the episodes is sent as a column: an array of numbers, or a list.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.field_kinds import (
    MAX_INT32,
    MAX_METRICS,
    MAX_NAME_CHARS,
    Array,
    ChatMessages,
    Choice,
    Flag,
    Kind,
    Metrics,
    Number,
    PerPromptToken,
    Text,
    Texts,
    Whole,
)
from async_rl.base.messages.limits import Limits
from async_rl.base.messages.message_reader import BOOL, FLOAT64, INT32, INT64, Fields, pack_array, refusal

Check = Callable[[list[Any], str], list[Any]]
"""Checks values, and returns them. Its text is the path of value i in errors, with {} for i."""


def pack_value(name: str, kind: Kind) -> Callable[[Any], Any]:
    """Return the function that packs the value of a field."""
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
    """Return the function that packs the values of a field, one of each row or episode."""
    if (dtype := _column_dtype(kind)) is not None:
        return lambda values: pack_array(np.array(values, dtype))
    pack_one = pack_value(name, kind)
    return lambda values: [pack_one(value) for value in values]


def read_value(name: str, kind: Kind) -> Callable[[Fields, Limits], Any]:
    """Return the function that reads the value of a field of a group."""
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
    """Return the function that reads the given number of values of a field of each row or episode.

    Args:
        path: the path of row or episode i in errors, with {} for i.
    """
    path = f"{path}.{name}"
    check = _check_of(kind)
    if (dtype := _column_dtype(kind)) is None:
        return lambda fields, size: check(fields.items(name, size, size), path)
    return lambda fields, size: check(fields.array(name, dtype, size, size).tolist(), path)


def read_array(name: str, kind: Array) -> Callable[[Fields, int, int, Sequence[int] | None], npt.NDArray[Any]]:
    """Return the function that reads fewest..most numbers.

    Its last argument is how many of them each row has, so that an error names the row; None: they are of no row.
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
    """Return an array in little-endian order. WireError: it is not one-dimensional, or not of the given dtype.

    Args:
        row: the number of the row that has the array; -1: the group has it.
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
    """Return the text as it is sent: at most `max_chars` characters of valid Unicode."""
    return text.encode(errors="replace").decode()[:max_chars]  # an error may quote half a character


def refuse_element(
    name: str, column: npt.NDArray[Any], is_bad: npt.NDArray[np.bool_], sizes: Sequence[int], allowed: str
) -> WireError:
    """Return the WireError to raise for the first bad element of a column; it names the element's row and value.

    Args:
        sizes: the number of elements of each row.
    """
    at = int(is_bad.argmax())
    row = np.cumsum(sizes).searchsorted(at, side="right")
    return refusal(f"rows[{row}].{name}", column[at].item(), allowed)


def _column_dtype(kind: Kind) -> np.dtype[Any] | None:
    """Return the dtype of the array as which the values of a kind are sent; None if they are sent as a list."""
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
    """Return the function that checks values of a kind: numbers that an array held, or parts of a message."""
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
