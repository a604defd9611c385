"""Reads msgpack messages field by field, and refuses an invalid message with an error that names field and value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.field_kinds import MAX_INT, MAX_NAME_CHARS

INT32, INT64, FLOAT64, BOOL = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8"), np.dtype("bool")
"""The dtypes of the arrays in messages, all in little-endian order."""

_WHOLE = object()
_PACKER = msgpack.Packer()
"""Shared, because creating a Packer takes longer than packing a small message."""


class Fields:
    """A decoded msgpack map whose methods read one field each; for a wrong value they raise WireError.

    Args:
        values: the decoded message.
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
        """Return the WireError to raise for field `name`; `allowed` says in words what its value may be.

        Args:
            got: the part of the field's value that is wrong; by default the whole value.
        """
        return refusal(self._path + name, self._values[name] if got is _WHOLE else got, allowed)

    def value(self, name: str) -> Any:
        """Return a field that the caller checks."""
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
        """Read a one-dimensional array of low..high elements of exactly this dtype; the array is read-only."""
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
    """Return an array as the list that `Fields.array` reads: its dtype, number of elements and bytes."""
    return [array.dtype.str, len(array), array.tobytes()]


def pack(message: dict[str, Any]) -> bytes:
    """Return a map as msgpack bytes. Raises WireError if it holds text that is not valid Unicode."""
    try:
        data: bytes = _PACKER.pack(message)
    except UnicodeEncodeError as error:
        raise WireError(f"message: the text {_short(error.object)} is not valid Unicode") from None
    return data


def unpack(data: bytes | memoryview) -> object:
    """Return the value of the one msgpack object in `data`. Raises WireError if the data is anything else."""
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
