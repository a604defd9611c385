"""RolloutGroup <-> msgpack bytes. What comes off a wire is checked here before anybody looks at it.

    group     {schema, group_id, ..., lengths [G], tokens [sum of lengths], logprobs, versions, mask, rewards [G], ...}
    array     [dtype, number of elements, little-endian bytes]

The rollouts of a group travel as columns, one rollout after the other, so that a group is checked by a handful of
array operations however many rollouts it has. An array names its dtype, so that a wrong one is refused instead of
reinterpreted. Decoding copies nothing out of the columns: arrays are read-only views.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.errors import WireError
from async_rl.types import Rollout, RolloutGroup

SCHEMA_VERSION = 3
"""Of every message; raised when a field is added, removed or changes its meaning."""

MAX_ROUNDING = 1e-4
"""Log-softmax in float32 rounds a certain token's 0 to a few ulps of its logit: at |logit| = 100 up to 1e-5. So much
above 0, ten times that, the sender cuts to 0; more (probabilities or negated logprobs sent by mistake) is refused."""
MAX_INT = 2**62
MAX_NAME_CHARS = 200
FINISH_REASONS = ("stop", "length")

_GROUP_FIELDS = (
    "schema", "group_id", "prompt_index", "start_version", "temperature", "prompt_tokens", "lengths", "tokens",
    "logprobs", "versions", "mask", "rewards", "finish_reasons", "duration_s", "worker", "baseline_reward",
    "keeps_kv",
)
_WHOLE = object()
_INT32, _FLOAT32, _FLOAT64, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8"), np.dtype("bool")


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

    def number_or_none(self, name: str) -> float | None:
        return None if self._values[name] is None else self.number(name)

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
        if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], bytes):
            raise self.refuse(name, "a list of dtype, number of elements, bytes")
        kind, count, data = value
        if kind != dtype.str:
            raise WireError(f"{self._path}{name}: dtype {_short(kind)}, allowed {dtype.str} ({dtype.name})")
        if type(count) is not int or not low <= count <= high:
            allowed = f"{low}" if low == high else f"{low}..{high}"
            raise WireError(f"{self._path}{name}: {_short(count)} elements, allowed {allowed}")
        if len(data) != count * dtype.itemsize:
            raise WireError(f"{self._path}{name}: {len(data)} bytes, allowed {count * dtype.itemsize} as it says")
        array = np.frombuffer(data, dtype)
        # Any byte passes for a bool in numpy, but arithmetic with bytes other than 0 and 1 is wrong.
        if dtype == _BOOL and count and (worst := array.view(np.uint8).max()) > 1:
            raise self.refuse(name, "bytes 0 and 1", int(worst))
        return array


def encode_group(group: RolloutGroup) -> bytes:
    """One group as bytes.

    Raises:
        WireError: an array has the wrong shape or dtype, or another length than its rollout's tokens.
    """
    rollouts = group.rollouts
    logprobs = _column("logprobs", rollouts, _FLOAT32)
    if logprobs.size and 0 < logprobs.max() <= MAX_ROUNDING:
        logprobs = np.minimum(logprobs, 0)
    return pack(
        {
            "schema": SCHEMA_VERSION,
            "group_id": operator.index(group.group_id),
            "prompt_index": operator.index(group.prompt_index),
            "start_version": operator.index(group.start_version),
            "temperature": float(group.temperature),
            "prompt_tokens": _pack_array(_one_dimensional("prompt_tokens", group.prompt_tokens, _INT32)),
            "lengths": _pack_array(np.array([len(rollout.tokens) for rollout in rollouts], _INT32)),
            "tokens": _pack_array(_column("tokens", rollouts, _INT32)),
            "logprobs": _pack_array(logprobs),
            "versions": _pack_array(_column("versions", rollouts, _INT32)),
            "mask": _pack_array(_column("mask", rollouts, _BOOL)),
            "rewards": _pack_array(np.array([rollout.reward for rollout in rollouts], _FLOAT64)),
            "finish_reasons": [rollout.finish_reason for rollout in rollouts],
            "duration_s": float(group.duration_s),
            "worker": group.worker,
            "baseline_reward": None if group.baseline_reward is None else float(group.baseline_reward),
            "keeps_kv": group.keeps_kv,
        }
    )


def decode_group(data: bytes | memoryview, limits: Limits) -> RolloutGroup:
    """The group that `encode_group` was given; arrays are read-only views.

    Checked: exactly the known fields; sizes within `limits`; dtypes; for each rollout equal lengths T >= 1 of all four
    arrays, tokens >= 0, logprobs finite and <= 0, versions non-decreasing from start_version up, a finite reward.

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
        rollouts=_decode_rollouts(fields, start_version, limits),
        duration_s=fields.number("duration_s", 0.0),
        worker=fields.text("worker"),
        baseline_reward=fields.number_or_none("baseline_reward"),
        keeps_kv=fields.boolean("keeps_kv"),
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


def _pack_array(array: npt.NDArray[Any]) -> list[Any]:
    return [array.dtype.str, len(array), array.tobytes()]


def _one_dimensional(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The array, in little-endian order."""
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        got = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise WireError(f"{name}: got {got}, allowed a one-dimensional numpy array")
    if array.dtype == dtype:
        return array
    if array.dtype != dtype.newbyteorder(">"):
        raise WireError(f"{name}: dtype {array.dtype.str!r}, allowed {dtype.str} ({dtype.name})")
    return array.astype(dtype)


def _column(name: str, rollouts: Sequence[Rollout], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """This array of all rollouts, one after the other."""
    arrays = []
    for i, rollout in enumerate(rollouts):
        array = _one_dimensional(f"rollouts[{i}].{name}", getattr(rollout, name), dtype)
        if len(array) != len(rollout.tokens):
            raise WireError(f"rollouts[{i}].{name}: {len(array)} elements, allowed {len(rollout.tokens)} as its tokens")
        arrays.append(array)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _decode_rollouts(fields: Fields, start_version: int, limits: Limits) -> tuple[Rollout, ...]:
    size = limits.group_size
    lengths = fields.array("lengths", _INT32, size, size)
    if lengths.min() < 1 or lengths.max() > limits.max_response_tokens:
        bad = int(lengths.min() if lengths.min() < 1 else lengths.max())
        raise fields.refuse("lengths", f"1..{limits.max_response_tokens} tokens a rollout", bad)
    ends = lengths.cumsum()
    total = int(ends[-1])
    tokens = fields.array("tokens", _INT32, total, total)
    logprobs = fields.array("logprobs", _FLOAT32, total, total)
    versions = fields.array("versions", _INT32, total, total)
    mask = fields.array("mask", _BOOL, total, total)
    rewards = fields.array("rewards", _FLOAT64, size, size)
    reasons = fields.items("finish_reasons", size, size)
    if tokens.min() < 0:
        raise _refuse_element("tokens", tokens, tokens < 0, ends, "token ids 0 and up")
    # A NaN makes both comparisons false.
    if not (logprobs.max() <= 0 and logprobs.min() > -math.inf):
        bad_logprobs = ~((logprobs <= 0) & (logprobs > -math.inf))
        raise _refuse_element("logprobs", logprobs, bad_logprobs, ends, "finite numbers <= 0")
    _check_versions(versions, start_version, ends)
    if not np.isfinite(rewards).all():
        raise _refuse_element("reward", rewards, ~np.isfinite(rewards), np.arange(1, size + 1), "a finite number")
    for i, reason in enumerate(reasons):
        if reason not in FINISH_REASONS:
            raise refusal(f"rollouts[{i}].finish_reason", reason, " or ".join(FINISH_REASONS))
    rollouts = []
    start = 0
    for end, reward, reason in zip(ends.tolist(), rewards.tolist(), reasons, strict=True):
        part = slice(start, end)
        rollouts.append(
            Rollout(
                tokens=tokens[part], logprobs=logprobs[part], versions=versions[part], mask=mask[part], reward=reward,
                finish_reason=reason,
            )
        )
        start = end
    return tuple(rollouts)


def _check_versions(versions: npt.NDArray[Any], start_version: int, ends: npt.NDArray[Any]) -> None:
    if versions.min() < start_version:
        too_old = versions < start_version
        raise _refuse_element("versions", versions, too_old, ends, f"start_version = {start_version} and up")
    falls = versions[1:] < versions[:-1]
    falls[ends[:-1] - 1] = False  # from one rollout to the next they may
    if falls.any():
        at = int(falls.argmax())
        allowed = f"{versions[at]} and up, as the token before has it"
        raise _refuse_element("versions", versions, np.append(False, falls), ends, allowed)


def _refuse_element(
    name: str, column: npt.NDArray[Any], is_bad: npt.NDArray[np.bool_], ends: npt.NDArray[Any], allowed: str
) -> WireError:
    """Of the first bad element of a column; `ends` says where each rollout's part ends."""
    at = int(is_bad.argmax())
    return refusal(f"rollouts[{ends.searchsorted(at, side='right')}].{name}", column[at].item(), allowed)
