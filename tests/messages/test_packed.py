"""Supports in messages: the ids that each token was drawn from, compressed."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import check_group, decode_group, encode_group
from async_rl.base.messages.fields import MAX_COLUMN_BYTES, MAX_VOCABULARY, Limits
from async_rl.base.types import Group, Row, Support
from tests.kit.groups import assert_same, make_group, make_row

LIMITS = Limits(
    group_size=2, fewest_episodes=2, max_rows=2, max_turns=0, max_prompt_tokens=16, max_response_tokens=64,
    needs_support=True, max_support_ids=MAX_VOCABULARY,
)  # fmt: skip
PLAIN = dataclasses.replace(LIMITS, needs_support=False, max_support_ids=0)


def row_of(tokens: Sequence[int], sets: Sequence[Sequence[int]]) -> Row:
    """A row that trains the tokens which have a set."""
    mask = np.array([len(each) > 0 for each in sets])
    logprobs = np.where(mask, -0.5, 0)
    return make_row(tokens, logprobs.tolist(), mask=mask, support=Support.of(sets))


def two_rows(*, sets: Sequence[Sequence[int]] = ((9, 4, 300), (), (70_000,))) -> Group:
    return make_group(1, rows=[row_of([4, 5, 70_000], sets), row_of([2], [[2, 1]])])


def with_logprobs(group: Group, logprobs: Sequence[Sequence[float]]) -> Group:
    """The group, with the logprobs of the ids of each of its rows."""
    rows = [
        dataclasses.replace(row, support=dataclasses.replace(row.support, logprobs=np.array(values, np.float32)))
        for row, values in zip(group.rows, logprobs, strict=True)
        if row.support is not None
    ]
    return dataclasses.replace(group, rows=tuple(rows))


SHARES = [[*np.log([0.25, 0.5, 0.25]), 0.0], [*np.log([0.001, 0.999])]]
"""Logprobs of the ids of `two_rows`."""


def leb128(values: Sequence[int]) -> bytes:
    """Encode numbers one by one, as the standard of DWARF describes it."""
    data = bytearray()
    for value in values:
        while value >= 0x80:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)
    return bytes(data)


def with_column(data: bytes, group: Group | None = None) -> bytes:
    """The message of a group with this in place of its packed supports."""
    message = msgpack.unpackb(encode_group(group or two_rows()))
    return msgpack.packb(message | {"support": [len(data), pa.compress(data, codec="zstd", asbytes=True)]})


GOOD = [3, 0, 1, 2, 4, 5, 291, 70_000, 1, 1]
"""The numbers of `two_rows`: sizes of the four tokens; 4 9 300, then 70000, then 1 2 as differences."""


def test_supports_are_sizes_and_differences_as_varints() -> None:
    size, frame = msgpack.unpackb(encode_group(two_rows()))["support"]
    assert pa.decompress(frame, decompressed_size=size, codec="zstd", asbytes=True) == leb128(GOOD)
    assert_same(decode_group(with_column(leb128(GOOD)), LIMITS), two_rows())


@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_supports_come_back_as_they_were(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        vocabulary = int(2 ** rng.uniform(1, 20))
        sizes = [min(vocabulary, int(2 ** rng.uniform(0, 8))) for _ in range(length)]
        sets = [rng.choice(vocabulary, size, replace=False) for size in sizes]
        for place in np.flatnonzero(rng.random(length - 1) < 0.3):
            sets[place] = sets[place][:0]
        tokens = [int(rng.choice(each)) if len(each) else int(rng.integers(vocabulary)) for each in sets]
        rows.append(row_of(tokens, [each.tolist() for each in sets]))
    group = make_group(1, rows=rows)
    assert_same(decode_group(encode_group(group), LIMITS), group)


def test_a_group_has_supports_where_the_run_needs_them_and_only_there() -> None:
    with pytest.raises(WireError, match="support: got None"):
        check_group(encode_group(make_group(1)), LIMITS)
    with pytest.raises(WireError, match="support: got a list of 2, allowed None"):
        check_group(encode_group(two_rows()), PLAIN)
    assert check_group(encode_group(make_group(1)), PLAIN).rows["support"] is None
    stored = encode_group(two_rows())
    assert_same(decode_group(stored, Limits.of_stored(stored, 2)), two_rows())


def test_rows_whose_supports_do_not_fit_are_refused_by_their_sender() -> None:
    group = two_rows()
    for support in (None, Support.of([[4], []]), Support.of([[4, 2**20], [], [70_000]])):
        rows = (dataclasses.replace(group.rows[0], support=support), group.rows[1])
        with pytest.raises(WireError, match="support"):
            encode_group(dataclasses.replace(group, rows=rows))


@pytest.mark.parametrize(
    "numbers",
    [
        GOOD[:3],  # not all sizes
        GOOD[:-1],  # an id too few
        [*GOOD, 1],  # an id too many
        [3, 0, 1, 2, 4, 0, 296, 70_000, 1, 1],  # an id twice
        [3, 0, 1, 2, 3, 6, 291, 70_000, 1, 1],  # another id than the token
        [2, 1, 1, 2, 4, 5, 291, 70_000, 1, 1],  # a set for the masked token, of the first one's ids
        [3, 0, 1, 2, 4, 5, 291, 2**20, 1, 1],  # an id that no vocabulary has
        [2, 0, 2, 2, 4, 5, 291, 69_708, 1, 1],  # 70000 has become 69999
    ],
)  # fmt: skip
def test_numbers_that_are_no_supports_of_the_group_are_refused(numbers: list[int]) -> None:
    with pytest.raises(WireError, match="support"):
        check_group(with_column(leb128(numbers)), LIMITS)


def test_a_set_above_the_limit_is_refused() -> None:
    check_group(encode_group(two_rows()), dataclasses.replace(LIMITS, max_support_ids=3))
    with pytest.raises(WireError, match=r"rows\[0\].support: got 3, allowed 1..2 ids"):
        check_group(encode_group(two_rows()), dataclasses.replace(LIMITS, max_support_ids=2))


@pytest.mark.parametrize(
    "change",
    [
        5, [1], [3, "abc"], [3, b"abc"], [-1, b""], [True, b""], [2**40, b""],
        [14, pa.compress(leb128(GOOD), codec="zstd", asbytes=True)],  # one byte more than there is
        [MAX_COLUMN_BYTES, pa.compress(bytes(100), codec="zstd", asbytes=True)],
    ],
)  # fmt: skip
def test_a_damaged_column_is_refused(change: Any) -> None:
    message = msgpack.unpackb(encode_group(two_rows()))
    with pytest.raises(WireError, match="support"):
        check_group(msgpack.packb(message | {"support": change}), LIMITS)


@pytest.mark.parametrize("data", [leb128(GOOD)[:-1] + b"\x81", leb128(GOOD) + b"\xff" * 4 + b"\x01"])
def test_broken_varints_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="varints"):
        check_group(with_column(data), LIMITS)


def test_a_decompression_bomb_takes_no_memory() -> None:
    bomb = pa.compress(bytes(2**28), codec="zstd", asbytes=True)
    message = msgpack.unpackb(encode_group(two_rows()))
    limits = dataclasses.replace(LIMITS, max_support_ids=1000)
    for size in (2**28, 1000):
        with pytest.raises(WireError, match="support"):
            check_group(msgpack.packb(message | {"support": [size, bomb]}), limits)


MANY = 2**20
WHOLE_SETS = leb128([MANY, 0, MANY, MANY]) + 3 * (b"\0" + b"\1" * (MANY - 1))
"""The supports of `two_rows` if each token was drawn from the whole of a vocabulary."""


@pytest.mark.parametrize(
    ("data", "expected", "times"),
    [
        (bytes(2**24), "a logprob of each id", 6),  # the bytes, a mark for each, and 4 bytes for each number
        (WHOLE_SETS + bytes(3 * MANY), "add up to 1", 18),  # also 4 bytes for an id, its logprob and each step to them
    ],
    ids=["no sets", "whole sets"],
)
def test_a_column_that_is_refused_has_taken_few_times_its_size(data: bytes, expected: str, times: int) -> None:
    message, limits = with_column(data), dataclasses.replace(LIMITS, needs_support_logprobs=True)
    assert len(message) < 2**16, "it would take more memory than its sender's message"
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="support") as refused:
            check_group(message, limits)
        assert tracemalloc.get_traced_memory()[1] < times * len(data) + 2**21
    finally:
        tracemalloc.stop()
    assert expected in str(refused.value)


def test_ids_far_beyond_every_vocabulary_are_refused() -> None:
    """Each difference is below 2^20, but their sums would come back to small ids in 32 bits."""
    steps = [4, *[2**20 - 1] * 4096, 4096 + 66, 70_000, 1, 1]
    assert sum(steps[:-3]) == 2**32 + 70
    with pytest.raises(WireError, match="ascending"):
        check_group(with_column(leb128([4098, 0, 1, 2, *steps])), LIMITS)


def test_logprobs_of_ids_survive_a_message_to_a_65536th_of_a_nat() -> None:
    sent = with_logprobs(two_rows(), SHARES)
    for limits in (LIMITS, dataclasses.replace(LIMITS, needs_support_logprobs=True)):
        supports = [row.support for row in check_group(encode_group(sent), limits).group().rows]
        for support, values in zip(supports, SHARES, strict=True):
            assert support is not None and support.logprobs is not None and support.logprobs.dtype == np.float32
            np.testing.assert_allclose(support.logprobs, values, atol=2**-16)
        first, second = supports
        assert first is not None and second is not None and second.ids.tolist() == [1, 2]
        part = first.cut(1, 3)
        assert part.logprobs is not None and (part.logprobs.tolist(), part.ids.tolist()) == ([0.0], [70_000])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (encode_group(two_rows()), "logprob of each id"),
        (encode_group(with_logprobs(two_rows(), [[*np.log([0.25, 0.25, 0.25]), 0.0], SHARES[1]])), "add up to 1"),
        (with_column(leb128([*GOOD, 0, 0])), "logprob of each id"),
    ],
)
def test_a_loss_that_reads_logprobs_of_ids_gets_them_whole(message: bytes, expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        check_group(message, dataclasses.replace(LIMITS, needs_support_logprobs=True))
