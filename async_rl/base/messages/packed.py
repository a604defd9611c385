"""Columns with several numbers for each token, which are compressed in messages and in the journal.

    column     [number of bytes before compression, zstd frame]; None if no row of the group has the field
    Support    a size for each token, then for each id its difference to the one before it in its set (the first: to 0);
               then, if they are recorded, for each id -logprob in steps of 2^-16 nats; all as varints (LEB128: seven
               bits a byte, the lowest first, the eighth bit set where more follow)
    routing    the experts [P + T - 1, layers, k] of each row, one row after the other; those of the prompt as
               differences to the first row's, which are mostly 0

A column is never larger than its limit: the size comes first, and zstd writes no byte beyond it. Reading a support
takes at most 18 times its size before compression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.base.errors import WireError
from async_rl.base.messages.fields import (
    MAX_COLUMN_BYTES,
    MAX_VOCABULARY,
    VARINT_BYTES,
    Fields,
    Limits,
    most_support_bytes,
    refuse_element,
)
from async_rl.base.types import BoolArray, Group, IntArray, RoutingArray, Row, Support

PER_NAT = 2**16
"""Logprobs of ids are rounded to steps of 1 / PER_NAT nats."""
LARGEST_SURPRISE = 4095.0
"""The largest -logprob that fits into a varint; a probability of e^-4095 is 0."""
PART_BYTES = 2**16
"""A column is decoded in parts of this size."""
MASS_ERROR = 1e-3
"""How far the sum of a support's probabilities may be from 1."""


def pack_supports(name: str, rows: Sequence[Row]) -> list[Any]:
    """Return the supports of a group's rows as a column.

    Args:
        name: the field of Row.

    Raises:
        WireError: only some rows have a support, it has not one set per token of the row, an id is outside every
            vocabulary, or the column is too large for a message.
    """
    supports = [getattr(row, name) for row in rows]
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
    fields: Fields, name: str, tokens: IntArray, mask: BoolArray, lengths: Sequence[int], limits: Limits
) -> Support:
    """Read the column of `pack_supports`. Returns one Support of all rows in order.

    Each trained token must have a set of ascending ids that contains the token, at most limits.max_support_ids; other
    tokens must have none. Probabilities, if recorded, must add up to 1. Otherwise this raises WireError.

    Args:
        tokens, mask: [sum of T] the tokens of all rows, and whether each is trained.
        lengths: the number of tokens of each row.
    """
    max_ids = limits.max_support_ids
    if not max_ids:
        raise fields.refuse(name, "None: nothing narrows what this run samples, or algorithm.support is ignore")
    data = decompress(fields, name, fields.value(name), most_support_bytes(len(tokens), max_ids))
    numbers = from_varints(fields, name, data)
    sizes, steps = np.split(numbers, [len(tokens)])
    has_logprobs = len(steps) > 0 and 2 * int(sizes.sum()) == len(steps)
    if limits.needs_support_logprobs and not has_logprobs:
        raise fields.refuse(name, "a logprob of each id: algorithm.loss reads them", len(numbers))
    steps, surprises = np.split(steps, [len(steps) // 2]) if has_logprobs else (steps, steps[:0])
    if len(sizes) < len(tokens) or int(sizes.sum()) != len(steps):
        raise fields.refuse(name, f"a size for each of {len(tokens)} tokens, and so many ids", len(numbers))
    if (is_bad := (sizes > max_ids) | ((sizes > 0) != mask)).any():
        at = int(is_bad.argmax())
        allowed = f"1..{max_ids} ids for a trained token" if mask[at] else "no ids for a token that is not trained"
        raise refuse_element(name, sizes, is_bad, lengths, allowed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    firsts, sizes = offsets[:-1][mask], sizes[mask]  # of the trained tokens, which alone have ids
    is_repeated = steps == 0
    is_repeated[firsts] = False
    ids = np.cumsum(steps, dtype=np.int32)
    # These sums may wrap. In a token's own ids one is refused before they do, as each step is below MAX_VOCABULARY.
    ids -= np.repeat(ids[firsts] - steps[firsts], sizes)
    if is_repeated.any() or max(steps.max(), ids.max()) >= MAX_VOCABULARY:
        raise fields.refuse(name, f"different ids in 0..{MAX_VOCABULARY - 1} for each token, ascending")
    is_bad = mask.copy()
    is_bad[mask] = ~np.logical_or.reduceat(ids == np.repeat(tokens[mask], sizes), firsts)
    if is_bad.any():
        raise refuse_element(name, tokens, is_bad, lengths, "a token of the set that it was sampled from")
    logprobs = None
    if has_logprobs:
        logprobs = (-surprises).astype(np.float32)
        logprobs /= PER_NAT
        mass = np.ones(len(tokens))
        mass[mask] = np.add.reduceat(np.exp(logprobs), firsts, dtype=np.float64)
        if (is_bad := np.abs(mass - 1) > MASS_ERROR).any():
            raise refuse_element(name, mass, is_bad, lengths, "probabilities that add up to 1")
    return Support(ids, offsets, logprobs)


def pack_routing(name: str, group: Group) -> list[Any]:
    """Return the experts of a group's tokens (MoE routing) as [bytes of one number, layers, k, column].

    Args:
        name: the field of Row.

    Raises:
        WireError: only some rows have a routing, their shapes differ, or the column is too large for a message.
    """
    routings: list[RoutingArray | None] = [getattr(row, name) for row in group.rows]
    some = next(routing for routing in routings if routing is not None)
    num_prompt = len(group.prompt_tokens)
    parts: list[RoutingArray] = []
    for i, (row, routing) in enumerate(zip(group.rows, routings, strict=True)):
        shape = (num_prompt + len(row.tokens) - 1, *some.shape[1:])
        if routing is None or routing.shape != shape or routing.dtype != some.dtype or routing.ndim != 3:
            found = None if routing is None else (routing.dtype.name, *routing.shape)
            raise WireError(f"rows[{i}].{name}: must be {some.dtype.name} {shape}, got {found}")
        parts += [routing[:num_prompt] - some[:num_prompt] if parts else routing[:num_prompt], routing[num_prompt:]]
    data = np.concatenate(parts).astype(some.dtype.newbyteorder("<"), copy=False).tobytes()
    return [some.itemsize, *some.shape[1:], compress(name, data)]


def read_routing(
    fields: Fields, name: str, num_prompt: int, lengths: Sequence[int], limits: Limits
) -> list[RoutingArray]:
    """Read the column of `pack_routing`. Returns the routing of each row.

    WireError: the number of layers, of experts per token, or an expert's number is not the model's.

    Args:
        num_prompt: the number of tokens of the group's prompt.
        lengths: the number of tokens of each row's response.
    """
    column = fields.value(name)
    if not isinstance(column, list) or len(column) != 4 or not all(type(number) is int for number in column[:3]):
        raise fields.refuse(name, "None, or a list of the bytes of a number, layers, experts of a token, and a column")
    *sizes, packed = column
    if not limits.num_experts:
        raise fields.refuse(name, "None: the model has no experts, or rollout.routing is ignore")
    if limits.router_layers:
        expected = [1 if limits.num_experts <= 256 else 2, limits.router_layers, limits.experts_per_token]
        if sizes != expected:
            raise fields.refuse(name, f"{expected} as bytes of a number, layers and experts of a token", sizes)
    elif sizes[0] not in (1, 2) or min(sizes) < 1:
        raise fields.refuse(name, "1 or 2 as bytes of a number, and some layers and experts of a token", sizes)
    tokens = [num_prompt + length - 1 for length in lengths]
    size = sum(tokens) * math.prod(sizes)
    data = decompress(fields, name, packed, min(size, MAX_COLUMN_BYTES))
    if len(data) != size:
        raise fields.refuse(name, f"{size} bytes", len(data))
    whole = np.frombuffer(data, f"<u{sizes[0]}").astype(f"u{sizes[0]}", copy=False).reshape(-1, *sizes[1:])
    routings = list(np.split(whole, np.cumsum(tokens)[:-1]))
    for i, routing in enumerate(routings[1:], 1):
        routings[i] = np.concatenate([routing[:num_prompt] + routings[0][:num_prompt], routing[num_prompt:]])
    for i, routing in enumerate(routings):
        if routing.size and (largest := int(routing.max())) >= limits.num_experts:
            raise fields.refuse(f"rows[{i}].{name}", f"0..{limits.num_experts - 1}, the numbers of experts", largest)
        routing.flags.writeable = False
    return routings


def compress(name: str, data: bytes) -> list[Any]:
    """Return data as a column: [its number of bytes, zstd frame].

    Raises:
        WireError: it is larger than MAX_COLUMN_BYTES.
    """
    import pyarrow as pa  # most runs have no such column, and importing it takes 0.2 s in each process

    if len(data) > MAX_COLUMN_BYTES:
        raise WireError(
            f"{name}: {len(data)} bytes in one group, allowed at most {MAX_COLUMN_BYTES}. Lower rollout.group_size or, "
            "for support, rollout.top_p; or set rollout.top_k or rollout.min_p, or algorithm.support or "
            "rollout.routing to ignore"
        )
    return [len(data), pa.compress(data, codec="zstd", asbytes=True)]


def decompress(fields: Fields, name: str, column: Any, most_bytes: int) -> bytes:
    """Return the data of a column. Raises WireError if it is malformed, or has more than `most_bytes`.

    Args:
        name: the field, for errors.
    """
    import pyarrow as pa

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
    """Encode whole numbers in 0..2^28 - 1 as varints."""
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


def from_varints(fields: Fields, name: str, data: bytes) -> npt.NDArray[np.int32]:
    """Decode the varints in `data`. Raises WireError if one is too long, or the last one is incomplete.

    It takes memory for the result and PART_BYTES of the data at a time.
    """
    octets = np.frombuffer(data, np.uint8)
    values = np.empty(np.count_nonzero(octets < 0x80), np.int32)
    at = number = 0
    while at < len(octets):
        part = octets[at : at + PART_BYTES]
        ends = np.flatnonzero(part < 0x80)
        lengths = np.diff(ends, prepend=-1)
        if not len(ends) or lengths.max() > VARINT_BYTES:
            raise fields.refuse(name, f"whole varints of 1..{VARINT_BYTES} bytes", data)
        decoded = part[ends].astype(np.int32)  # the last byte of each has the highest bits
        for i in range(1, VARINT_BYTES):
            longer = np.flatnonzero(lengths > i)
            decoded[longer] = decoded[longer] << 7 | part[ends[longer] - i] & 0x7F
        values[number : number + len(ends)] = decoded
        at, number = at + int(ends[-1]) + 1, number + len(ends)
    return values
