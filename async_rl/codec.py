"""RolloutGroup <-> msgpack bytes. What comes off a wire is checked here before anybody looks at it.

An array travels as [dtype string, raw bytes], so that a wrong dtype is refused instead of reinterpreted. Decoding
copies nothing: arrays are read-only views into the message.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.errors import WireError
from async_rl.types import Rollout, RolloutGroup

SCHEMA_VERSION = 1
"""Of every message; raised when a field is added, removed or changes its meaning."""

MAX_LOGPROB = 1e-4
"""Log-softmax in float32 rounds a certain token's 0 to a few ulps of its logit: at |logit| = 100 up to 1e-5, and ten
times that is of no consequence to a ratio. Probabilities or negated logprobs sent by mistake lie above."""
MAX_INT = 2**62
MAX_NAME_CHARS = 200
FINISH_REASONS = ("stop", "length")

_GROUP_FIELDS = (
    "schema", "group_id", "prompt_index", "start_version", "temperature", "prompt_tokens", "rollouts", "duration_s",
    "worker",
)
_ROLLOUT_FIELDS = ("tokens", "logprobs", "versions", "mask", "reward", "finish_reason")
_WHOLE = object()
_INT32, _FLOAT32, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes a group may have."""

    group_size: int
    max_prompt_tokens: int
    max_response_tokens: int

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        return cls(
            group_size=config.rollout.group_size,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )

    @property
    def max_group_bytes(self) -> int:
        """No valid group encodes to more: 13 bytes a response token, 4 a prompt token, and room for the names."""
        return 4096 + 4 * self.max_prompt_tokens + self.group_size * (512 + 13 * self.max_response_tokens)


class Fields:
    """A decoded msgpack map, read field by field; each reader raises WireError naming field, value and what is allowed.

    Raises:
        WireError: not a map, or not exactly the fields `names`.
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
        """The error to raise for field `name`; `got` where a part of its value is at fault."""
        return refusal(self._path + name, self._values[name] if got is _WHOLE else got, allowed)

    def integer(self, name: str, low: int, high: int = MAX_INT) -> int:
        value = self._values[name]
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an integer in {low}..{high}")
        return value

    def number(self, name: str, low: float = -math.inf) -> float:
        """A finite number >= low."""
        value = self._values[name]
        if type(value) not in (int, float) or not low <= value < math.inf or value == -math.inf:
            raise self.refuse(name, "a finite number" + (f" >= {low}" if low > -math.inf else ""))
        return float(value)

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

    def array(self, name: str, dtype: np.dtype[Any], low: int, high: int) -> npt.NDArray[Any]:
        """One-dimensional, of low..high elements of exactly this dtype."""
        value = self._values[name]
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], bytes):
            raise self.refuse(name, "a [dtype, bytes] pair")
        if value[0] != dtype.str:
            raise WireError(f"{self._path}{name}: dtype {_short(value[0])}, allowed {dtype.str} ({dtype.name})")
        if len(value[1]) % dtype.itemsize or not low * dtype.itemsize <= len(value[1]) <= high * dtype.itemsize:
            lengths = f"{low} ({dtype.name})" if low == high else f"{low}..{high} ({dtype.name})"
            raise WireError(f"{self._path}{name}: {len(value[1]) / dtype.itemsize:g} elements, allowed {lengths}")
        array = np.frombuffer(value[1], dtype)
        # Any byte passes for a bool in numpy, but arithmetic with bytes other than 0 and 1 is wrong.
        if dtype == _BOOL and (bits := array.view(np.uint8)).size and bits.max() > 1:
            raise self.refuse(name, "bytes 0 and 1", int(bits.max()))
        return array


def encode_group(group: RolloutGroup) -> bytes:
    """One group as bytes.

    Raises:
        WireError: an array is not a one-dimensional numpy array.
    """
    return pack(
        {
            "schema": SCHEMA_VERSION,
            "group_id": operator.index(group.group_id),
            "prompt_index": operator.index(group.prompt_index),
            "start_version": operator.index(group.start_version),
            "temperature": float(group.temperature),
            "prompt_tokens": _pack_array("prompt_tokens", group.prompt_tokens),
            "rollouts": [_pack_rollout(i, rollout) for i, rollout in enumerate(group.rollouts)],
            "duration_s": float(group.duration_s),
            "worker": group.worker,
        }
    )


def decode_group(data: bytes | memoryview, limits: Limits) -> RolloutGroup:
    """The group that `encode_group` was given; arrays are read-only views.

    Checked: exactly the known fields; sizes within `limits`; dtypes; for each rollout equal lengths T >= 1 of all four
    arrays, tokens >= 0, logprobs finite and <= MAX_LOGPROB, versions non-decreasing from start_version up.

    Raises:
        WireError: names the field and the value.
    """
    if len(data) > limits.max_group_bytes:
        raise WireError(f"group: {len(data)} bytes, allowed at most {limits.max_group_bytes}")
    fields = Fields(unpack(data), _GROUP_FIELDS)
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    start_version = fields.integer("start_version", 0, 2**31 - 1)
    prompt_tokens = fields.array("prompt_tokens", _INT32, 1, limits.max_prompt_tokens)
    if prompt_tokens.min() < 0:
        raise fields.refuse("prompt_tokens", "token ids 0 and up", int(prompt_tokens.min()))
    temperature = fields.number("temperature", 0.0)
    if temperature == 0:
        raise fields.refuse("temperature", "above 0")
    return RolloutGroup(
        group_id=fields.integer("group_id", 0),
        prompt_index=fields.integer("prompt_index", 0),
        start_version=start_version,
        temperature=temperature,
        prompt_tokens=prompt_tokens,
        rollouts=tuple(
            _decode_rollout(Fields(rollout, _ROLLOUT_FIELDS, f"rollouts[{i}]."), start_version, limits)
            for i, rollout in enumerate(fields.items("rollouts", limits.group_size, limits.group_size))
        ),
        duration_s=fields.number("duration_s", 0.0),
        worker=fields.text("worker"),
    )


def pack(message: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(message)
    return data


def unpack(data: bytes | memoryview) -> object:
    """
    Raises:
        WireError: not one msgpack object.
    """
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


def _pack_array(name: str, array: npt.NDArray[Any]) -> list[Any]:
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        got = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise WireError(f"{name}: got {got}, allowed a one-dimensional numpy array")
    return [array.dtype.str, array.tobytes()]


def _pack_rollout(index: int, rollout: Rollout) -> dict[str, Any]:
    path = f"rollouts[{index}]."
    return {
        "tokens": _pack_array(path + "tokens", rollout.tokens),
        "logprobs": _pack_array(path + "logprobs", rollout.logprobs),
        "versions": _pack_array(path + "versions", rollout.versions),
        "mask": _pack_array(path + "mask", rollout.mask),
        "reward": float(rollout.reward),
        "finish_reason": rollout.finish_reason,
    }


def _decode_rollout(fields: Fields, start_version: int, limits: Limits) -> Rollout:
    tokens = fields.array("tokens", _INT32, 1, limits.max_response_tokens)
    length = len(tokens)
    logprobs = fields.array("logprobs", _FLOAT32, length, length)
    versions = fields.array("versions", _INT32, length, length)
    if tokens.min() < 0:
        raise fields.refuse("tokens", "token ids 0 and up", int(tokens.min()))
    if not (np.isfinite(logprobs).all() and logprobs.max() <= MAX_LOGPROB):
        bad = logprobs[~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))][0]
        raise fields.refuse("logprobs", f"finite numbers <= {MAX_LOGPROB}", float(bad))
    if versions[0] < start_version:
        raise fields.refuse("versions", f"start_version = {start_version} and up", int(versions[0]))
    if (versions[1:] < versions[:-1]).any():
        at = int((versions[1:] < versions[:-1]).argmax())
        raise fields.refuse("versions", "non-decreasing versions", f"{versions[at]} then {versions[at + 1]}")
    finish_reason = fields.text("finish_reason")
    if finish_reason not in FINISH_REASONS:
        raise fields.refuse("finish_reason", " or ".join(FINISH_REASONS))
    return Rollout(
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        mask=fields.array("mask", _BOOL, length, length),
        reward=fields.number("reward"),
        finish_reason=finish_reason,
    )
