"""Encodes a RolloutGroup to msgpack bytes and decodes it, after checking all that comes from the network.

    group     {schema, group_id, ..., lengths [N], tokens [sum of lengths], logprobs, versions, mask, rewards [N], ...,
               episodes: None if each of the N rollouts is the answer to a question, else see episode_columns.py}
    array     [dtype, number of elements, little-endian bytes]

A group of N rollouts is sent as columns, each with one rollout after the other, so that a few array operations check
all rollouts. An array names its dtype, so that a wrong dtype is refused and not reinterpreted. Decoded arrays are
read-only views of the columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from async_rl.errors import WireError
from async_rl.messages.episode_columns import EpisodeColumns, check_episodes, error_text, pack_episodes, read_errors
from async_rl.messages.limits import Limits
from async_rl.messages.message_reader import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT32,
    Fields,
    pack,
    pack_array,
    refusal,
    unpack,
)
from async_rl.types import BoolArray, FloatArray, IntArray, Rollout, RolloutGroup

SCHEMA_VERSION = 9
"""Version of every message; raise it when a field is added, removed or changes its meaning."""

MAX_ROUNDING = 1e-4
"""The largest logprob above 0 that is taken for a rounding error and sent as 0. Float32 log-softmax rounds the logprob
0 of a certain token by up to 1e-5 at |logit| = 100. Larger values are refused: they may be probabilities or negated
logprobs sent by mistake."""
FINISH_REASONS = ("stop", "length", "timeout")


def encode_group(group: RolloutGroup) -> bytes:
    """Return a rollout group as bytes for `decode_group`; a logprob above 0 by a rounding error becomes 0.

    WireError: an array has the wrong shape, dtype or length, or the turns of a rollout do not match its rewards.
    """
    rollouts = group.rollouts
    logprobs = _column("logprobs", rollouts, FLOAT32)
    if logprobs.size and 0 < logprobs.max() <= MAX_ROUNDING:
        logprobs = np.minimum(logprobs, 0)
    return pack(
        {
            "schema": SCHEMA_VERSION,
            "group_id": operator.index(group.group_id),
            "prompt_index": operator.index(group.prompt_index),
            "start_version": operator.index(group.start_version),
            "temperature": float(group.temperature),
            "prompt_tokens": pack_array(_one_dimensional("prompt_tokens", group.prompt_tokens, INT32)),
            "lengths": pack_array(np.array([len(rollout.tokens) for rollout in rollouts], INT32)),
            "tokens": pack_array(_column("tokens", rollouts, INT32)),
            "logprobs": pack_array(logprobs),
            "versions": pack_array(_column("versions", rollouts, INT32)),
            "mask": pack_array(_column("mask", rollouts, BOOL)),
            "rewards": pack_array(np.array([rollout.reward for rollout in rollouts], FLOAT64)),
            "finish_reasons": [rollout.finish_reason for rollout in rollouts],
            "duration_s": float(group.duration_s),
            "worker": group.worker,
            "baseline_reward": None if group.baseline_reward is None else float(group.baseline_reward),
            "keeps_kv": group.keeps_kv,
            "episodes": pack_episodes(group),
            "data_row": operator.index(group.data_row),
            "left_out": [error_text(error) for error in group.left_out],
        }
    )


class GroupColumns(NamedTuple):
    """A checked group of N rollouts as it is sent: each array holds all rollouts, one after the other."""

    group_id: int
    prompt_index: int
    start_version: int
    temperature: float
    prompt_tokens: IntArray  # [P]
    lengths: list[int]  # [N] T of each rollout
    tokens: IntArray  # [sum of T]
    logprobs: FloatArray  # [sum of T]
    versions: IntArray  # [sum of T]
    mask: BoolArray  # [sum of T]
    rewards: list[float]  # [N]
    finish_reasons: list[str]  # [N]
    duration_s: float
    worker: str
    baseline_reward: float | None
    keeps_kv: bool
    episodes: EpisodeColumns | None
    """None if each rollout is an episode of one turn."""
    data_row: int
    left_out: tuple[str, ...]
    newest_version: int
    """The highest version of the group's tokens. A trained token has it, because the last one of each rollout is."""
    trained_tokens: list[int]  # [N] the number of trained tokens of each rollout

    @property
    def starts(self) -> list[int]:
        """The position of the first token of each rollout in the columns."""
        return list(itertools.accumulate(self.lengths[:-1], initial=0))

    @property
    def episode_rewards(self) -> list[float]:
        """The reward of each episode."""
        if self.episodes is None:
            return self.rewards
        rows = [facts.rows for facts in self.episodes.facts]
        return [self.rewards[first] for first in itertools.accumulate(rows[:-1], initial=0)]

    def oldest_versions(self) -> list[int]:
        """Return the version of the first trained token of each rollout, the lowest of those that are trained."""
        firsts = self.starts
        if self.trained_tokens != self.lengths:
            masks = np.split(self.mask, firsts[1:])
            firsts = [start + int(mask.argmax()) for start, mask in zip(firsts, masks, strict=True)]
        versions: list[int] = self.versions[firsts].tolist()
        return versions

    def group(self) -> RolloutGroup:
        """Return the group as a RolloutGroup, whose arrays are views of the columns."""
        facts, turn_ends, turn_rewards = self.episodes or _NO_EPISODES
        rollouts = tuple(
            Rollout(
                tokens=self.tokens[start:end], logprobs=self.logprobs[start:end], versions=self.versions[start:end],
                mask=self.mask[start:end], reward=reward, finish_reason=reason, turn_ends=ends, turn_rewards=rewards,
            )
            for start, end, reward, reason, ends, rewards in zip(
                self.starts, itertools.accumulate(self.lengths), self.rewards, self.finish_reasons, turn_ends,
                turn_rewards, strict=False,
            )
        )
        shared = {name: getattr(self, name) for name in _SHARED_FIELDS}
        return RolloutGroup(rollouts=rollouts, episodes=facts, **shared)


_NO_EPISODES = ((), itertools.repeat(()), itertools.repeat(()))
_SHARED_FIELDS = tuple(
    field.name for field in dataclasses.fields(RolloutGroup) if field.name not in ("rollouts", "episodes")
)
_GROUP_FIELDS = frozenset(("schema", *GroupColumns._fields)) - {"newest_version", "trained_tokens"}


def decode_group(data: bytes | memoryview, limits: Limits) -> RolloutGroup:
    """Return the rollout group in the bytes of `encode_group`, after the checks of `check_group`; arrays are read-only.
    """
    return check_group(data, limits).group()


def check_group(data: bytes | memoryview, limits: Limits) -> GroupColumns:
    """Check the bytes of `encode_group` and return them as columns, in half the time of decoding them to rollouts.

    A valid message has exactly the known fields, sizes within `limits`, and the right dtypes. Each rollout has four
    arrays of equal length T >= 1, tokens >= 0, finite logprobs <= 0, versions that start at start_version or later and
    do not decrease, and a finite reward. Its last token is trained, and the logprob of a masked token is 0. Episodes
    meet `check_episodes`. Otherwise this raises WireError, which names the field and the value.
    """
    if len(data) > limits.max_group_bytes:
        raise WireError(
            f"group: {len(data)} bytes, allowed at most {limits.max_group_bytes} (from rollout.group_size, "
            "task.max_prompt_tokens, rollout.max_response_tokens and rollout.max_episode_tokens)"
        )
    fields = Fields(unpack(data), _GROUP_FIELDS)
    fields.integer("schema", SCHEMA_VERSION, SCHEMA_VERSION)
    start_version = fields.integer("start_version", 0, 2**31 - 1)
    temperature = fields.number("temperature", 0.0)
    if temperature == 0:
        raise fields.refuse("temperature", "above 0")
    episodes = fields.nested_or_none("episodes")
    if episodes is not None and not limits.max_turns:
        raise fields.refuse("episodes", "None: an episode of this run is the answer to a question")
    size = limits.group_size
    fewest, most = (size, size) if episodes is None else (limits.fewest_episodes, limits.max_rows)
    lengths = fields.array("lengths", INT32, fewest, most).tolist()
    if min(lengths) < 1 or max(lengths) > limits.max_response_tokens:
        bad = min(lengths) if min(lengths) < 1 else max(lengths)
        raise fields.refuse("lengths", f"1..{limits.max_response_tokens} tokens a rollout", bad)
    total = sum(lengths)
    tokens = fields.array("tokens", INT32, total, total)
    if tokens.min() < 0:
        raise _refuse_element("tokens", tokens, tokens < 0, lengths, "token ids 0 and up")
    logprobs = fields.array("logprobs", FLOAT32, total, total)
    # A NaN makes both comparisons false.
    if not (logprobs.max() <= 0 and logprobs.min() > -math.inf):
        bad_logprobs = ~((logprobs <= 0) & (logprobs > -math.inf))
        raise _refuse_element("logprobs", logprobs, bad_logprobs, lengths, "finite numbers <= 0")
    versions = fields.array("versions", INT32, total, total)
    newest_version = _check_versions(versions, start_version, lengths)
    mask = fields.array("mask", BOOL, total, total)
    trained_tokens = _check_mask(mask, logprobs, lengths)
    prompt_tokens = _read_prompt(fields, limits.max_prompt_tokens, mask, lengths)
    rewards = fields.array("rewards", FLOAT64, len(lengths), len(lengths)).tolist()
    reasons = fields.items("finish_reasons", len(lengths), len(lengths))
    for i, (reward, reason) in enumerate(zip(rewards, reasons, strict=True)):
        if not math.isfinite(reward):
            raise refusal(f"rollouts[{i}].reward", reward, "a finite number")
        if reason not in FINISH_REASONS:
            raise refusal(f"rollouts[{i}].finish_reason", reason, " or ".join(FINISH_REASONS))
    checked = None if episodes is None else check_episodes(episodes, limits, lengths, mask, rewards)
    return GroupColumns(
        fields.integer("group_id", 0), fields.integer("prompt_index", 0), start_version, temperature, prompt_tokens,
        lengths, tokens, logprobs, versions, mask, rewards, reasons, fields.number("duration_s", 0.0),
        fields.text("worker"), fields.number_or_none("baseline_reward"), fields.boolean("keeps_kv"), checked,
        fields.integer("data_row", -1), read_errors(fields, "left_out", 0, limits.max_rows if limits.max_turns else 0),
        newest_version, trained_tokens,
    )


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


def _check_mask(mask: BoolArray, logprobs: FloatArray, lengths: list[int]) -> list[int]:
    """Return the number of trained tokens of each rollout.

    WireError: the last token of a rollout is masked, or a masked token has a logprob that is not 0.
    """
    if b"\0" not in mask.tobytes():  # a tenth of the time of mask.all()
        return lengths
    ends = np.cumsum(lengths, dtype=np.intp)
    is_trained = mask[ends - 1]
    if not is_trained.all():
        raise refusal(f"rollouts[{is_trained.argmin()}].mask", False, "true for the last token of a rollout")
    has_logprob = (logprobs != 0) & ~mask
    if has_logprob.any():
        raise _refuse_element("logprobs", logprobs, has_logprob, lengths, "0 for a token that is not trained")
    trained: list[int] = np.add.reduceat(mask, ends - lengths, dtype=np.intp).tolist()
    return trained


def _read_prompt(fields: Fields, max_tokens: int, mask: BoolArray, lengths: list[int]) -> IntArray:
    """Return the prompt tokens. Rollouts that share no first token have none, and each begins with a masked token."""
    tokens = fields.array("prompt_tokens", INT32, 0, max_tokens)
    if not len(tokens):
        is_trained = mask[np.cumsum(lengths, dtype=np.intp) - lengths]
        if is_trained.any():
            raise WireError(
                f"prompt_tokens: 0 elements, allowed 1..{max_tokens}, as the first token of rollout "
                f"{is_trained.argmax()} is trained"
            )
    elif tokens.min() < 0:
        raise fields.refuse("prompt_tokens", "token ids 0 and up", int(tokens.min()))
    return tokens


def _refuse_element(
    name: str, column: npt.NDArray[Any], is_bad: npt.NDArray[np.bool_], lengths: list[int], allowed: str
) -> WireError:
    """Return the WireError to raise for the first bad element of a column; it names the element's rollout and value."""
    at = int(is_bad.argmax())
    rollout = np.cumsum(lengths).searchsorted(at, side="right")
    return refusal(f"rollouts[{rollout}].{name}", column[at].item(), allowed)
