"""Encodes a RolloutGroup to msgpack bytes and decodes it, after checking all that comes from the network.

    group     {schema, group_id, ..., lengths [G], tokens [sum of lengths], logprobs, versions, mask, rewards [G], ...}
    array     [dtype, number of elements, little-endian bytes]

A group of G rollouts is sent as columns, each with one rollout after the other, so that a few array operations check
all rollouts. An array names its dtype, so that a wrong dtype is refused and not reinterpreted. Decoded arrays are
read-only views of the columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.errors import WireError
from async_rl.messages.message_reader import Fields, pack, refusal, unpack
from async_rl.types import BoolArray, FloatArray, IntArray, Rollout, RolloutGroup

SCHEMA_VERSION = 5
"""Version of every message; raise it when a field is added, removed or changes its meaning."""

MAX_ROUNDING = 1e-4
"""The largest logprob above 0 that is taken for a rounding error and sent as 0. Float32 log-softmax rounds the logprob
0 of a certain token by up to 1e-5 at |logit| = 100. Larger values are refused: they may be probabilities or negated
logprobs sent by mistake."""
FINISH_REASONS = ("stop", "length")

_INT32, _FLOAT32, _FLOAT64, _BOOL = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8"), np.dtype("bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest sizes that a rollout group may have; `group_size` must be met exactly."""

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
        """The most bytes of a valid group: 13 for each response token, 4 for each prompt token, some for the rest."""
        return 4096 + 4 * self.max_prompt_tokens + self.group_size * (512 + 13 * self.max_response_tokens)


def encode_group(group: RolloutGroup) -> bytes:
    """Encode one rollout group as bytes; a logprob above 0 by a rounding error is sent as 0.

    WireError: an array has the wrong shape, dtype or length.
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


class GroupColumns(NamedTuple):
    """A checked group as it is sent: each array holds all rollouts, one after the other."""

    group_id: int
    prompt_index: int
    start_version: int
    temperature: float
    prompt_tokens: IntArray  # [P]
    lengths: list[int]  # [G] T of each rollout
    tokens: IntArray  # [sum of T]
    logprobs: FloatArray  # [sum of T]
    versions: IntArray  # [sum of T]
    mask: BoolArray  # [sum of T]
    rewards: list[float]  # [G]
    finish_reasons: list[str]  # [G]
    duration_s: float
    worker: str
    baseline_reward: float | None
    keeps_kv: bool
    newest_version: int
    """The highest version of the group's tokens."""

    def group(self) -> RolloutGroup:
        """Return the group as a RolloutGroup, whose arrays are views of the columns."""
        ends = list(itertools.accumulate(self.lengths))
        rollouts = tuple(
            Rollout(
                tokens=self.tokens[start:end], logprobs=self.logprobs[start:end], versions=self.versions[start:end],
                mask=self.mask[start:end], reward=reward, finish_reason=reason,
            )
            for start, end, reward, reason in zip([0, *ends], ends, self.rewards, self.finish_reasons, strict=False)
        )
        return RolloutGroup(rollouts=rollouts, **{name: getattr(self, name) for name in _SHARED_FIELDS})


_SHARED_FIELDS = tuple(field.name for field in dataclasses.fields(RolloutGroup) if field.name != "rollouts")
_GROUP_FIELDS = frozenset(("schema", *GroupColumns._fields)) - {"newest_version"}


def decode_group(data: bytes | memoryview, limits: Limits) -> RolloutGroup:
    """Decode the bytes of `encode_group` to a rollout group, with the checks of `check_group` and read-only arrays."""
    return check_group(data, limits).group()


def check_group(data: bytes | memoryview, limits: Limits) -> GroupColumns:
    """Check the bytes of `encode_group` and return them as columns, in half the time of decoding them to rollouts.

    A valid message has exactly the known fields, sizes within `limits`, and the right dtypes. Each rollout has four
    arrays of equal length T >= 1, tokens >= 0, finite logprobs <= 0, versions that start at start_version or later and
    do not decrease, and a finite reward. Otherwise this raises WireError, which names the field and the value.
    """
    if len(data) > limits.max_group_bytes:
        raise WireError(
            f"group: {len(data)} bytes, allowed at most {limits.max_group_bytes} (from rollout.group_size, "
            "task.max_prompt_tokens and rollout.max_response_tokens)"
        )
    fields = Fields(unpack(data), _GROUP_FIELDS)
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    size = limits.group_size
    start_version = fields.integer("start_version", 0, 2**31 - 1)
    prompt_tokens = fields.array("prompt_tokens", _INT32, 1, limits.max_prompt_tokens)
    if prompt_tokens.min() < 0:
        raise fields.refuse("prompt_tokens", "token ids 0 and up", int(prompt_tokens.min()))
    temperature = fields.number("temperature", 0.0)
    if temperature == 0:
        raise fields.refuse("temperature", "above 0")
    lengths = fields.array("lengths", _INT32, size, size).tolist()
    if min(lengths) < 1 or max(lengths) > limits.max_response_tokens:
        bad = min(lengths) if min(lengths) < 1 else max(lengths)
        raise fields.refuse("lengths", f"1..{limits.max_response_tokens} tokens a rollout", bad)
    total = sum(lengths)
    tokens = fields.array("tokens", _INT32, total, total)
    if tokens.min() < 0:
        raise _refuse_element("tokens", tokens, tokens < 0, lengths, "token ids 0 and up")
    logprobs = fields.array("logprobs", _FLOAT32, total, total)
    # A NaN makes both comparisons false.
    if not (logprobs.max() <= 0 and logprobs.min() > -math.inf):
        bad_logprobs = ~((logprobs <= 0) & (logprobs > -math.inf))
        raise _refuse_element("logprobs", logprobs, bad_logprobs, lengths, "finite numbers <= 0")
    versions = fields.array("versions", _INT32, total, total)
    newest_version = _check_versions(versions, start_version, lengths)
    rewards = fields.array("rewards", _FLOAT64, size, size).tolist()
    reasons = fields.items("finish_reasons", size, size)
    for i, (reward, reason) in enumerate(zip(rewards, reasons, strict=True)):
        if not math.isfinite(reward):
            raise refusal(f"rollouts[{i}].reward", reward, "a finite number")
        if reason not in FINISH_REASONS:
            raise refusal(f"rollouts[{i}].finish_reason", reason, " or ".join(FINISH_REASONS))
    return GroupColumns(
        fields.integer("group_id", 0), fields.integer("prompt_index", 0), start_version, temperature, prompt_tokens,
        lengths, tokens, logprobs, versions, fields.array("mask", _BOOL, total, total), rewards, reasons,
        fields.number("duration_s", 0.0), fields.text("worker"), fields.number_or_none("baseline_reward"),
        fields.boolean("keeps_kv"), newest_version,
    )


def _pack_array(array: npt.NDArray[Any]) -> list[Any]:
    return [array.dtype.str, len(array), array.tobytes()]


def _one_dimensional(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array in little-endian order. WireError: it is not one-dimensional, or not of the given dtype."""
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        got = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise WireError(f"{name}: got {got}, allowed a one-dimensional numpy array")
    if array.dtype == dtype:
        return array
    if array.dtype != dtype.newbyteorder(">"):
        raise WireError(f"{name}: dtype {array.dtype.str!r}, allowed {dtype.str} ({dtype.name})")
    return array.astype(dtype)


def _column(name: str, rollouts: Sequence[Rollout], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    arrays = []
    for i, rollout in enumerate(rollouts):
        array = _one_dimensional(f"rollouts[{i}].{name}", getattr(rollout, name), dtype)
        if len(array) != len(rollout.tokens):
            raise WireError(f"rollouts[{i}].{name}: {len(array)} elements for {len(rollout.tokens)} tokens")
        arrays.append(array)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _check_versions(versions: IntArray, start_version: int, lengths: list[int]) -> int:
    """Return the newest token version. WireError: one is below start_version, or they decrease within a rollout."""
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < start_version:
        too_old = versions < start_version
        raise _refuse_element("versions", versions, too_old, lengths, f"start_version = {start_version} and up")
    if oldest < newest:
        falls = versions[1:] < versions[:-1]
        falls[np.cumsum(lengths[:-1], dtype=np.intp) - 1] = False  # at the start of a rollout they may decrease
        if falls.any():
            at = int(falls.argmax())
            allowed = f"{versions[at]} and up, as the token before has version {versions[at]}"
            raise _refuse_element("versions", versions, np.append(False, falls), lengths, allowed)
    return newest


def _refuse_element(
    name: str, column: npt.NDArray[Any], is_bad: npt.NDArray[np.bool_], lengths: list[int], allowed: str
) -> WireError:
    """Return the WireError to raise for the first bad element of a column; it names the element's rollout and value."""
    at = int(is_bad.argmax())
    rollout = np.cumsum(lengths).searchsorted(at, side="right")
    return refusal(f"rollouts[{rollout}].{name}", column[at].item(), allowed)
