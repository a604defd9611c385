"""Routing in messages: the experts of each token, compressed, with those of the prompt once for a group."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.errors import ConfigError, WireError
from async_rl.base.messages.codec import check_group, decode_group, encode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.models_and_data.experts import Experts, experts_of
from async_rl.base.types import Group
from tests.kit.configs import buffer_config
from tests.kit.groups import assert_same, make_group, make_row
from tests.kit.models import save_bare_model
from tests.kit.routing import tiny_experts

LIMITS = Limits(
    group_size=2, fewest_episodes=2, max_rows=2, max_turns=0, max_prompt_tokens=600, max_response_tokens=64,
    needs_routing=True, num_experts=8, router_layers=3, experts_per_token=2,
)  # fmt: skip
PLAIN = dataclasses.replace(LIMITS, needs_routing=False, num_experts=0, router_layers=0, experts_per_token=0)


def routed(prompt: int = 2, lengths: tuple[int, int] = (3, 1), seed: int = 0, experts: int = 8) -> Group:
    rng, dtype = np.random.default_rng(seed), np.uint8 if experts <= 256 else np.uint16
    rows = [
        make_row(length, routing=rng.integers(0, experts, (prompt + length - 1, 3, 2)).astype(dtype))
        for length in lengths
    ]
    return make_group(1, range(prompt), rows)


def column_of(group: Group) -> tuple[list[int], np.ndarray]:
    *sizes, (size, frame) = msgpack.unpackb(encode_group(group))["routing"]
    return sizes, np.frombuffer(pa.decompress(frame, decompressed_size=size, codec="zstd", asbytes=True), np.uint8)


def with_column(group: Group, sizes: list[Any], data: bytes) -> bytes:
    message = msgpack.unpackb(encode_group(group))
    column = [*sizes, [len(data), pa.compress(data, codec="zstd", asbytes=True)]]
    return msgpack.packb(message | {"routing": column})


@given(
    prompt=st.integers(1, 9), lengths=st.tuples(st.integers(1, 64), st.integers(1, 64)), seed=st.integers(0, 2**32 - 1),
    experts=st.sampled_from([2, 256, 257, 2**16]),
)
@settings(max_examples=40, deadline=None)
def test_routing_comes_back_as_it_was(prompt: int, lengths: tuple[int, int], seed: int, experts: int) -> None:
    group = routed(prompt, lengths, seed, experts)
    limits = dataclasses.replace(LIMITS, num_experts=experts)
    data = encode_group(group)
    assert_same(decode_group(data, limits), group)
    assert_same(decode_group(data, Limits.of_stored(data, 2)), group)


def test_a_message_has_the_experts_row_by_row_and_a_shared_prompt_once() -> None:
    group = routed()
    first, second = (row.routing for row in group.rows)
    assert first is not None and second is not None
    sizes, data = column_of(group)
    assert sizes == [1, 3, 2]
    differences = (second[:2].astype(int) - first[:2]) % 256
    assert data.tolist() == [*first.ravel().tolist(), *differences.ravel().tolist(), *second[2:].ravel().tolist()]
    group = routed(600, (1, 1))
    same = dataclasses.replace(group, rows=(group.rows[0], group.rows[0]))
    assert len(encode_group(same)) < len(encode_group(group)) - 1000


def test_a_group_has_routing_where_the_run_needs_it_and_only_there() -> None:
    with pytest.raises(WireError, match="routing: got None"):
        check_group(encode_group(make_group(1)), LIMITS)
    with pytest.raises(WireError, match=r"routing: .* allowed None"):
        check_group(encode_group(routed()), PLAIN)
    assert check_group(encode_group(make_group(1)), PLAIN).group().rows[0].routing is None


@pytest.mark.parametrize(("sizes", "change"), [
    ([2, 3, 2], {}), ([1, 2, 3], {}), ([1, 3, 3], {}), ([1, 3], {}), (["1", 3, 2], {}), ([True, 3, 2], {}),
    ([1, 3, 2], {"num_experts": 4}), ([1, 3, 2], {"num_experts": 300}), ([1, 3, 2], {"router_layers": 6}),
])  # fmt: skip
def test_a_column_of_another_model_is_refused(sizes: list[Any], change: dict[str, int]) -> None:
    _, data = column_of(routed())
    check_group(with_column(routed(), [1, 3, 2], data.tobytes()), LIMITS)
    with pytest.raises(WireError, match="routing"):
        check_group(with_column(routed(), sizes, data.tobytes()), dataclasses.replace(LIMITS, **change))


def test_a_column_with_too_few_or_too_many_bytes_or_an_expert_too_high_is_refused() -> None:
    _, data = column_of(routed())
    high = data.copy()
    high[-1] = 8
    for wrong in (data[:-1], [*data, 0], high):
        with pytest.raises(WireError, match="routing"):
            check_group(with_column(routed(), [1, 3, 2], bytes(wrong)), LIMITS)
    bomb = pa.compress(bytes(2**28), codec="zstd", asbytes=True)
    message = msgpack.unpackb(encode_group(routed()))
    for size in (2**28, len(data)):
        with pytest.raises(WireError, match="routing"):
            check_group(msgpack.packb(message | {"routing": [1, 3, 2, [size, bomb]]}), LIMITS)


def test_rows_whose_routing_does_not_fit_are_refused_by_their_sender() -> None:
    group = routed()
    routing = group.rows[1].routing
    assert routing is not None
    for wrong in (None, routing[:-1], routing[:, :2], routing.astype(np.uint16), routing[:, 0]):
        rows = (group.rows[0], dataclasses.replace(group.rows[1], routing=wrong))
        with pytest.raises(WireError, match=r"rows\[1\].routing"):
            encode_group(dataclasses.replace(group, rows=rows))


def test_the_folder_of_a_model_says_which_layers_have_experts(tmp_path: Path) -> None:
    for family, layers in (("Qwen3Moe", (0, 1)), ("DeepseekV3", (1,))):
        tiny_experts(family).save_pretrained(tmp_path / family)
        assert experts_of(str(tmp_path / family)) == Experts(layers, 8, 2)
    config = buffer_config(model={"path": tmp_path / "Qwen3Moe"})
    limits = Limits.from_config(config)
    assert (limits.num_experts, limits.router_layers, limits.experts_per_token, limits.needs_routing) == (8, 2, 2, True)
    ignoring = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, routing="ignore"))
    assert not Limits.from_config(ignoring).num_experts and not Limits.from_config(ignoring).needs_routing
    assert experts_of(str(save_bare_model(tmp_path / "dense"))) is None
    tiny_experts("GraniteMoe").save_pretrained(tmp_path / "unknown")  # its experts are one weight, of another name
    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        experts_of(str(tmp_path / "unknown"))
