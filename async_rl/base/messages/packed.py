"""Columns of a group that hold several numbers for each token, compressed in messages and so in the journal.

    column     [number of bytes before compression, zstd frame]; None if no row of the group has the field
    Support    a size for each token, then for each id its difference to the one before it in its set (the first: to 0);
               then, if they are recorded, for each id -logprob in steps of 2^-16 nats; all as varints (LEB128: seven
               bits a byte, the lowest first, the eighth bit set where more follow)

Reading one never takes more memory than its limit: the size comes first, and zstd writes no byte beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.messages.fields import Fields, refuse_element
from async_rl.base.messages.limits import MAX_COLUMN_BYTES, MAX_VOCABULARY, VARINT_BYTES, most_support_bytes
from async_rl.base.types import BoolArray, IntArray, Row, Support

PER_NAT = 2**16
"""Steps a nat in which logprobs of ids are rounded."""
LARGEST_SURPRISE = 4095.0
"""The largest -logprob that a varint has; a probability of e^-4095 is 0."""
MASS_ERROR = 1e-3
"""The most by which the probabilities of a support may miss 1."""


def pack_supports(name: str, rows: Sequence[Row]) -> list[Any] | None:
    """Return the supports of a group's rows as a column; None if no row has one.

    WireError: some rows have one and others have none, one has not a set for each token of its row, an id is none of a
    vocabulary, or they are too large for a message.
    """
    supports = [getattr(row, name) for row in rows]
    if not any(support is not None for support in supports):
        return None
    for i, (row, support) in enumerate(zip(rows, supports, strict=True)):
        sets = None if support is None else len(support)
        if sets != len(row.tokens):
            raise WireError(f"rows[{i}].{name}: {sets} sets for {len(row.tokens)} tokens")
    joined = Support.joined(supports)
    ids = joined.ids.astype(np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < MAX_VOCABULARY:
        bad = int(ids.max() if ids.min() >= 0 else ids.min())
        raise WireError(f"{name}: got the id {bad}, allowed 0..{MAX_VOCABULARY - 1}")
    steps = np.diff(ids, prepend=0)
    firsts = joined.offsets[:-1][joined.sizes > 0]
    steps[firsts] = ids[firsts]
    numbers = [joined.sizes, steps]
    if joined.logprobs is not None:
        surprises = np.clip(-joined.logprobs.astype(np.float64), 0, LARGEST_SURPRISE)
        numbers.append(np.rint(surprises * PER_NAT).astype(np.int64))
    return compress(name, to_varints(np.concatenate(numbers)))


def read_supports(
    fields: Fields, name: str, tokens: IntArray, mask: BoolArray, lengths: Sequence[int], max_ids: int,
    needs_logprobs: bool = False,
) -> Support | None:
    """Read the column of `pack_supports`: the sets of all rows, one after the other; None if the group has none.

    Each trained token has a set with 1..max_ids ascending ids, its own among them; other tokens have none. Otherwise
    this raises WireError.

    Args:
        max_ids: 0: the group may have no supports.
        needs_logprobs: the ids must have logprobs, those of a token of probabilities that add up to 1.
    """
    if fields.value(name) is None:
        return None
    if not max_ids:
        raise fields.refuse(name, "None: nothing narrows what this run samples, or algorithm.support is ignore")
    numbers = from_varints(fields, name, decompress(fields, name, most_support_bytes(len(tokens), max_ids)))
    sizes, steps = np.split(numbers, [len(tokens)])
    has_logprobs = len(steps) > 0 and 2 * int(sizes.sum()) == len(steps)
    if needs_logprobs and not has_logprobs:
        raise fields.refuse(name, "a logprob of each id: algorithm.loss reads them", len(numbers))
    steps, surprises = np.split(steps, [len(steps) // 2]) if has_logprobs else (steps, steps[:0])
    if len(sizes) < len(tokens) or int(sizes.sum()) != len(steps):
        raise fields.refuse(name, f"a size for each of {len(tokens)} tokens, and so many ids", len(numbers))
    if (is_bad := (sizes > max_ids) | ((sizes > 0) != mask)).any():
        at = int(is_bad.argmax())
        allowed = f"1..{max_ids} ids for a trained token" if mask[at] else "no ids for a token that is not trained"
        raise refuse_element(name, sizes, is_bad, lengths, allowed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    owners = np.repeat(np.arange(len(tokens)), sizes)
    sums = np.cumsum(steps)
    ids = sums - np.concatenate([[0], sums])[offsets[:-1]][owners]
    is_first = np.diff(owners, prepend=-1) > 0
    if ((steps == 0) & ~is_first).any() or (len(ids) and ids.max() >= MAX_VOCABULARY):
        raise fields.refuse(name, f"different ids in 0..{MAX_VOCABULARY - 1} for each token, ascending")
    is_own = np.bincount(owners[ids == tokens[owners]], minlength=len(tokens)) > 0
    if (is_bad := mask & ~is_own).any():
        raise refuse_element(name, tokens, is_bad, lengths, "a token of the set that it was sampled from")
    logprobs = None
    if has_logprobs:
        logprobs = (-surprises / PER_NAT).astype(np.float32)
        mass = np.bincount(owners, np.exp(logprobs), minlength=len(tokens))
        if (is_bad := mask & (np.abs(mass - 1) > MASS_ERROR)).any():
            raise refuse_element(name, mass, is_bad, lengths, "probabilities that add up to 1")
    return Support(ids.astype(np.int32), offsets, logprobs)


def compress(name: str, data: bytes) -> list[Any]:
    """Return data as a column. WireError: it is larger than a message may have."""
    import pyarrow as pa  # most runs have no such column, and importing it takes 0.2 s in each process

    if len(data) > MAX_COLUMN_BYTES:
        raise WireError(
            f"{name}: {len(data)} bytes in one group, allowed at most {MAX_COLUMN_BYTES}. Lower rollout.top_p or "
            "rollout.group_size, or set rollout.top_k or rollout.min_p"
        )
    return [len(data), pa.compress(data, codec="zstd", asbytes=True)]


def decompress(fields: Fields, name: str, most_bytes: int) -> bytes:
    """Read the data of a column, at most `most_bytes` of it."""
    import pyarrow as pa

    column = fields.value(name)
    if not isinstance(column, list) or len(column) != 2 or not isinstance(column[1], bytes):
        raise fields.refuse(name, "None, or a list of the number of bytes and a zstd frame")
    size, frame = column
    if type(size) is not int or not 0 <= size <= most_bytes:
        raise fields.refuse(name, f"0..{most_bytes} bytes", size)
    try:
        data: bytes = pa.decompress(frame, decompressed_size=size, codec="zstd", asbytes=True)
    except OSError as error:
        raise fields.refuse(name, f"a zstd frame of {size} bytes ({error})", frame) from None
    return data


def to_varints(values: npt.NDArray[np.int64]) -> bytes:
    """Return whole numbers in 0..2^28 - 1 as varints."""
    lengths = np.ones(len(values), np.int64)
    for i in range(1, VARINT_BYTES):
        lengths += values >= 1 << 7 * i
    starts = np.cumsum(lengths) - lengths
    data = np.zeros(int(lengths.sum()), np.uint8)
    for i in range(VARINT_BYTES):
        has_byte = lengths > i
        more = np.where(lengths[has_byte] > i + 1, 0x80, 0)
        data[starts[has_byte] + i] = values[has_byte] >> 7 * i & 0x7F | more
    return data.tobytes()


def from_varints(fields: Fields, name: str, data: bytes) -> npt.NDArray[np.int64]:
    """Return the numbers in the varints of field `name`. WireError: one is too long, or the last one breaks off."""
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    lengths = np.diff(ends, prepend=-1)
    if (len(octets) and octets[-1] >= 0x80) or (len(lengths) and lengths.max() > VARINT_BYTES):
        raise fields.refuse(name, f"whole varints of 1..{VARINT_BYTES} bytes", data)
    values = np.zeros(len(ends), np.int64)
    for i in range(VARINT_BYTES):
        has_byte = lengths > i
        values[has_byte] |= (octets[ends[has_byte] - lengths[has_byte] + 1 + i].astype(np.int64) & 0x7F) << 7 * i
    return values
