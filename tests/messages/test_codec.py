from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.errors import WireError
from async_rl.base.messages.codec import MAX_ROUNDING, SCHEMA_VERSION, decode_group, encode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.types import Row, Slot
from tests.kit.groups import assert_same, make_group, make_row

LIMITS = Limits(
    group_size=2, fewest_episodes=2, max_rows=2, max_turns=0, max_prompt_tokens=16, max_response_tokens=32
)
SLOT = Slot(group_id=5, prompt_index=9, start_version=3)


@given(
    lengths=st.lists(st.integers(1, 32), min_size=2, max_size=2),
    reward=st.floats(-1e6, 1e6),
    seed=st.integers(0, 2**32 - 1),
    worker=st.text(max_size=20),
    baseline=st.none() | st.floats(-10, 10),
)
@settings(max_examples=60, deadline=None)
def test_a_group_comes_back_as_it_was(
    lengths: list[int], reward: float, seed: int, worker: str, baseline: float | None
) -> None:
    rng = np.random.default_rng(seed)
    masks = [np.append(rng.random(n - 1) < 0.5, True) for n in lengths]
    rows = tuple(
        Row(
            tokens=rng.integers(0, 2**31 - 1, len(mask), dtype=np.int32),
            logprobs=np.where(mask, -rng.exponential(size=len(mask)), 0).astype(np.float32),
            versions=np.sort(rng.integers(3, 9, len(mask))).astype(np.int32),
            mask=mask,
            reward=reward,
            finish_reason="length",
        )
        for mask in masks
    )
    group = make_group(SLOT, rows=rows, worker=worker, baseline_reward=baseline)
    assert_same(decode_group(encode_group(group), LIMITS), group)


def with_rollout(**changes: Any) -> dict[str, Any]:
    return {"rows": (make_row(3, version=3), make_row(3, version=3, **changes))}


F, I = np.float32, np.int32  # noqa: E741


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_id": -1}, "group_id: got -1"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"duration_s": -0.5}, "duration_s: got -0.5"),
        ({"worker": "w" * 201}, "worker: got 'www"),
        ({"worker": 5}, "worker: got 5"),
        ({"messages": ({"role": "user", "content": 5},)}, "messages: got a list of 2"),
        ({"messages": ({"role": "user", "content": ""},) * 17}, "messages: got a list of 17"),
        ({"prompt_tokens": np.zeros(0, I)}, "prompt_tokens: 0 elements"),
        ({"prompt_tokens": np.zeros(17, I)}, "prompt_tokens: 17 elements"),
        ({"prompt_tokens": np.array([3, -4], I)}, "prompt_tokens: got -4"),
        ({"rows": (make_row(3, version=3),)}, "lengths: 1 elements"),
        ({"rows": (make_row(0, version=3), make_row(3, version=3))}, r"lengths: got 0"),
        ({"rows": (make_row(33, version=3), make_row(3, version=3))}, "lengths: got 33"),
        (with_rollout(tokens=np.array([1, -1, 2], I)), r"rows\[1\].tokens: got -1"),
        (
            with_rollout(mask=np.full(3, 2, np.uint8).view(np.bool_)),
            r"mask: got 2",
        ),
        (with_rollout(mask=np.array([1, 1, 0], np.bool_)), r"rows\[1\].mask: got False"),
        (
            with_rollout(mask=np.array([1, 0, 1], np.bool_)),
            r"rows\[1\].logprobs: got -1.25",
        ),
        (with_rollout(logprobs=np.array([-1, 0.5, -1], F)), r"rows\[1\].logprobs: got 0.5"),
        (with_rollout(logprobs=np.array([-1, np.nan, -1], F)), r"rows\[1\].logprobs: got nan"),
        (with_rollout(logprobs=np.array([-np.inf, -1, -1], F)), r"rows\[1\].logprobs: got -inf"),
        (with_rollout(versions=np.array([2, 3, 3], I)), r"rows\[1\].versions: got 2"),
        (with_rollout(versions=np.array([3, 5, 4], I)), r"rows\[1\].versions: got 4"),
        (with_rollout(reward=float("inf")), r"rows\[1\].reward: got inf"),
        (with_rollout(finish_reason="abort"), r"rows\[1\].finish_reason: got 'abort'"),
    ],
)
def test_a_refused_group_names_the_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_group(encode_group(make_group(SLOT, **changes)), LIMITS)


def test_the_rounding_of_a_certain_token_is_removed_by_its_sender() -> None:
    rounded, expected = (with_rollout(logprobs=np.array([0, a, -1], F)) for a in (MAX_ROUNDING / 2, 0))
    assert_same(decode_group(encode_group(make_group(SLOT, **rounded)), LIMITS), make_group(SLOT, **expected))


def test_arrays_that_do_not_fit_their_rollout_are_refused_by_its_sender() -> None:
    for changes, message in (
        ({"tokens": np.arange(3)}, r"rows\[1\].tokens: dtype '<i8'"),
        ({"logprobs": -np.ones(3)}, r"rows\[1\].logprobs: dtype '<f8'"),
        ({"tokens": np.arange(4, dtype=I)}, r"rows\[1\].logprobs: 3 elements for 4 tokens"),
        ({"versions": np.full(2, 3, I)}, r"rows\[1\].versions: 2 elements for 3 tokens"),
        ({"mask": np.ones(4, np.bool_)}, r"rows\[1\].mask: 4 elements for 3 tokens"),
        ({"tokens": [1, 2, 3]}, r"rows\[1\].tokens: got list"),
    ):
        with pytest.raises(WireError, match=message):
            encode_group(make_group(SLOT, **with_rollout(**changes)))
    with pytest.raises(WireError, match=r"prompt_tokens: got shape \(1, 2\)"):
        encode_group(make_group(SLOT, prompt_tokens=np.zeros((1, 2), I)))


def test_a_text_that_is_not_valid_unicode_is_refused_by_its_sender() -> None:
    with pytest.raises(WireError, match=r"the text 'rollout.ud800' is not valid Unicode"):
        encode_group(make_group(SLOT, worker="rollout\ud800"))
    assert_same(decode_group(encode_group(make_group(SLOT)), LIMITS), make_group(SLOT))


def test_arrays_are_sent_in_little_endian_order() -> None:
    big = with_rollout(tokens=np.arange(3, dtype=">i4"), logprobs=np.array([-3, -2, -1], ">f4"))
    data = encode_group(make_group(SLOT, **big))
    assert msgpack.unpackb(data)["tokens"][0] == "<i4"
    assert decode_group(data, LIMITS).rows[1].tokens.tolist() == [0, 1, 2]
    assert decode_group(data, LIMITS).rows[1].logprobs.tolist() == [-3, -2, -1]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", ["<i8", 6, bytes(48)], "tokens: dtype '<i8'"),
        ("tokens", ["<i4", 6, bytes(23)], "tokens: 23 bytes"),
        ("tokens", ["<i4", 6], "tokens: got a list of 2"),
        ("logprobs", ["<f4", 5, bytes(20)], "logprobs: 5 elements"),
        ("mask", ["|b1", True, b"1"], "mask: True elements"),
        ("mask", ["|b1", 6, b"\x01\x01\x01\x01\x01\x09"], "mask: got 9"),
        ("lengths", ["<i4", 2, np.array([9, 2**31 - 1], I).tobytes()], "lengths: got 2147483647"),
        ("lengths", ["<i4", 2, np.array([2, 3], I).tobytes()], "tokens: 6 elements"),
        ("finish_reason", ["stop"], "finish_reason: got a list of 1"),
    ],
)
def test_an_invalid_column_of_another_sender_is_refused_by_name(column: str, value: Any, message: str) -> None:
    good = msgpack.unpackb(encode_group(make_group(SLOT, rows=(make_row(3, version=3), make_row(3, version=3)))))
    with pytest.raises(WireError, match=message):
        decode_group(msgpack.packb({**good, column: value}), LIMITS)


def test_unknown_missing_and_renamed_fields_are_refused() -> None:
    good = msgpack.unpackb(encode_group(make_group(SLOT)))
    for change, message in (
        ({**good, "colour": 1}, "colour: got 'a field'"),
        ({k: v for k, v in good.items() if k != "worker"}, "worker: missing"),
        ({**good, "schema": 99}, f"schema: got 99, allowed an integer in {SCHEMA_VERSION}..{SCHEMA_VERSION}"),
        ({**good, "group_id": True}, "group_id: got True"),
        ({**good, "episodes": {}}, "episodes: got a dict of 0"),
        ({**good, "episodes": []}, "episodes: got a list of 0"),
        ([1], "message: got a list of 1"),
    ):
        with pytest.raises(WireError, match=message):
            decode_group(msgpack.packb(change), LIMITS)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"\xd6\xff\x00\x00\x00\x00"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="message"):
        decode_group(data, LIMITS)


def test_an_oversized_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match=f"group: {10**6} bytes, allowed at most {LIMITS.max_group_bytes}"):
        decode_group(bytes(10**6), LIMITS)
