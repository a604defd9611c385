"""Compact pushes: parcels between the learner's half and a server's, without a transport."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.base.weights.parcels import (
    SUFFIX,
    ChangedWeights,
    Rebuilder,
    adapter_parcel,
    base_parcel,
    checksum,
    decode_gaps,
    delta_parcel,
    dense_parcel,
    encode_gaps,
)
from async_rl.base.weights.servers import Member
from async_rl.base.weights.sums import holds_nan

FIRST = Member("rollout/0", "http://a", 1)
MEMBERS = (FIRST,)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def sent(changes: ChangedWeights, weights: dict[str, Tensor], version: int) -> list[tuple[str, Tensor]]:
    parcels = list(changes.parcels(weights.items(), version, MEMBERS))
    changes.delivered(MEMBERS)
    return parcels


def no_files() -> list[Path]:
    raise AssertionError("no model folder is needed")


def test_gaps_keep_every_position() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size = draw.choice([1, 3, 300, 5000])
        chosen = sorted(draw.sample(range(size), draw.randint(0, min(size, 40))))
        gaps = encode_gaps(torch.tensor(chosen, dtype=torch.int64))
        assert decode_gaps(gaps).tolist() == chosen


def test_a_gap_of_254_takes_one_byte_and_one_of_255_takes_two() -> None:
    assert encode_gaps(torch.tensor([254])).tolist() == [254]
    assert encode_gaps(torch.tensor([255])).tolist() == [255, 0]
    assert encode_gaps(torch.tensor([0, 1, 512])).tolist() == [0, 0, 255, 255, 0]


def test_the_checksum_is_that_of_its_formula_and_sees_a_single_bit() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (2**20 + 5,), generator=torch.Generator().manual_seed(1))
    expected = sum((2 * i + 1) * x for i, x in enumerate(words.tolist())) % 2**64
    assert checksum(words) % 2**64 == expected
    words[2**20 + 1] ^= 1
    assert checksum(words) % 2**64 != expected
    assert checksum(torch.tensor([1, 0], dtype=torch.int16)) == 1  # a part of a word is filled up with zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_single_nan_is_found_in_weights_of_each_type(dtype: torch.dtype) -> None:
    weights = torch.ones(3, 5)
    assert not holds_nan(weights.to(dtype))
    weights[1, 2] = torch.nan
    assert holds_nan(weights.to(dtype))


def walk(dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Weights of which each step changes a few values, among them their signs: 0.0 becomes -0.0."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        "w": torch.randn(64, 100, generator=generator), "one": torch.zeros(()), "norm": torch.zeros(300),
        "all": torch.randn(7, 3, generator=generator), "still": torch.ones(5, 5),
    }
    for step in range(20):
        weights["w"] += (torch.rand(64, 100, generator=generator) < 0.02) * 0.1
        weights["norm"][step] = -0.0
        weights["all"] *= 1.1
        weights["one"] += step % 2
        yield {name: tensor.to(dtype) for name, tensor in weights.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sparse_pushes_give_exact_bits_over_twenty_steps(dtype: torch.dtype) -> None:
    changes, rebuilder = ChangedWeights(dtype), Rebuilder(no_files)
    for version, weights in enumerate(walk(dtype)):
        parcels = sent(changes, weights, version)
        assert changes.is_sparse == (version > 0)
        rebuilt = dict(rebuilder.rebuild(parcels))
        assert rebuilt.keys() == weights.keys()
        assert all(torch.equal(bits(rebuilt[name]), bits(weights[name])) for name in weights)
    sizes = {name: len(parcel) for name, parcel in parcels}
    assert sizes["w" + SUFFIX] < 0.1 * weights["w"].nbytes
    assert sizes["all" + SUFFIX] >= weights["all"].nbytes  # all of it has changed: it travels whole


@pytest.mark.parametrize("members", [
    (FIRST._replace(url="http://b"),), (FIRST._replace(start=2),), (FIRST, Member("rollout/1", "http://c", 1)),
])
def test_all_weights_travel_whole_when_a_server_has_joined(members: tuple[Member, ...]) -> None:
    """One that was started again has joined too, also at the same URL."""
    changes = ChangedWeights(torch.bfloat16)
    weights = {"w": torch.ones(1000)}
    sent(changes, weights, 1)
    ((_, parcel),) = changes.parcels(weights.items(), 2, members)
    assert not changes.is_sparse
    (rebuilt,) = Rebuilder(no_files).rebuild([("w" + SUFFIX, parcel)])
    assert torch.equal(rebuilt[1], weights["w"].bfloat16())


def test_a_joiner_gets_the_last_version_whole_and_the_next_push_of_all_is_sparse() -> None:
    changes, joiner = ChangedWeights(torch.bfloat16), Member("rollout/1", "http://c", 1)
    weights, rebuilders = {"w": torch.randn(1000)}, [Rebuilder(no_files), Rebuilder(no_files)]
    list(rebuilders[0].rebuild(sent(changes, weights, 1)))
    parcels = list(changes.parcels(weights.items(), 1, [joiner]))
    assert not changes.is_sparse
    list(rebuilders[1].rebuild(parcels))
    changes.delivered([joiner])
    weights["w"][3] = 9.0
    parcels = list(changes.parcels(weights.items(), 2, [FIRST, joiner]))
    assert changes.is_sparse
    for rebuilder in rebuilders:
        ((_, rebuilt),) = rebuilder.rebuild(parcels)
        assert torch.equal(bits(rebuilt), bits(weights["w"].bfloat16()))


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_joiner_that_does_not_get_it_leaves_the_next_push_of_the_others_sparse(
    breaks_off: bool
) -> None:
    changes, joiner = ChangedWeights(torch.bfloat16), Member("rollout/1", "http://c", 1)
    weights, rebuilder = {"a": torch.randn(1000), "b": torch.randn(1000)}, Rebuilder(no_files)
    list(rebuilder.rebuild(sent(changes, weights, 1)))
    parcels = changes.parcels(weights.items(), 1, [joiner])
    next(parcels) if breaks_off else list(parcels)
    weights["a"][3] = 9.0
    rebuilt = dict(rebuilder.rebuild(sent(changes, weights, 2)))
    assert changes.is_sparse
    assert all(torch.equal(bits(rebuilt[name]), bits(weights[name].bfloat16())) for name in weights)


def test_a_new_version_that_only_a_joiner_has_travels_whole_to_all() -> None:
    changes, joiner = ChangedWeights(torch.bfloat16), Member("rollout/1", "http://c", 1)
    weights = {"w": torch.randn(1000)}
    sent(changes, weights, 1)
    list(changes.parcels(weights.items(), 2, [joiner]))
    changes.delivered([joiner])
    for version, is_sparse in ((2, False), (3, True)):
        list(changes.parcels(weights.items(), version, [FIRST, joiner]))
        changes.delivered([FIRST, joiner])
        assert changes.is_sparse == is_sparse


def test_all_weights_travel_whole_after_a_push_that_failed() -> None:
    changes = ChangedWeights(torch.bfloat16)
    weights = {"a": torch.ones(1000), "b": torch.ones(1000)}
    sent(changes, weights, 1)
    next(changes.parcels(weights.items(), 2, MEMBERS))  # it breaks off
    sent(changes, weights, 3)
    assert not changes.is_sparse
    sent(changes, weights, 4)
    assert changes.is_sparse


def test_changes_of_another_version_than_the_server_holds_are_refused() -> None:
    before, after = torch.zeros(1000), torch.zeros(1000)
    after[3] = 1
    parcel, _ = delta_parcel(after, before, version=6, base=5)
    rebuilder = Rebuilder(no_files)
    with pytest.raises(ValueError, match=r"w: .*version 5.* none"):
        list(rebuilder.rebuild([("w" + SUFFIX, parcel)]))
    list(rebuilder.rebuild([("w" + SUFFIX, dense_parcel(before, 4))]))
    with pytest.raises(ValueError, match=r"w: .*version 5.*version 4"):
        list(rebuilder.rebuild([("w" + SUFFIX, parcel)]))


@pytest.mark.parametrize("form", ["dense", "delta"])
def test_a_damaged_parcel_is_refused_by_its_checksum(form: str) -> None:
    before, after = torch.zeros(1000), torch.zeros(1000)
    after[500] = 1
    rebuilder = Rebuilder(no_files)
    list(rebuilder.rebuild([("w" + SUFFIX, dense_parcel(before, 5))]))
    parcel = dense_parcel(after, 6) if form == "dense" else delta_parcel(after, before, 6, 5)[0]
    length = int.from_bytes(bytes(parcel[:8].tolist()), "little")
    parcel[8 + length + 2] ^= 1  # in the values
    with pytest.raises(ValueError, match=r"w: .*version 6"):
        list(rebuilder.rebuild([("w" + SUFFIX, parcel)]))
    with pytest.raises(ValueError, match="w: "):
        list(rebuilder.rebuild([("w" + SUFFIX, torch.full((32,), 255, dtype=torch.uint8))]))


def test_adapters_are_added_to_the_servers_own_weights(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(*shape, generator=generator) for shape in ((24, 16), (4, 16), (24, 4)))
    w = w.bfloat16()
    save_file({"w": w, "norm": torch.ones(16)}, tmp_path / "model.safetensors")
    rebuilder = Rebuilder(lambda: [tmp_path / "model.safetensors"])
    parcel = adapter_parcel(a, b, 2.0, torch.bfloat16, checksum(w.float()))
    parcels = [("norm" + SUFFIX, base_parcel(torch.bfloat16)), ("w" + SUFFIX, parcel)]
    rebuilt = dict(rebuilder.rebuild(parcels))
    assert torch.equal(rebuilt["norm"], torch.ones(16, dtype=torch.bfloat16))
    torch.testing.assert_close(rebuilt["w"], (w.double() + 2 * b.double() @ a.double()).bfloat16())
    again = dict(rebuilder.rebuild(parcels))["w"]
    assert torch.equal(again, rebuilt["w"])  # nothing is added up
    other = adapter_parcel(a, b, 2.0, torch.bfloat16, checksum(w.float() + 1))
    with pytest.raises(ValueError, match=r"w: .*model\.path"):
        list(rebuilder.rebuild([("w" + SUFFIX, other)]))
    with pytest.raises(ValueError, match="v: "):
        list(rebuilder.rebuild([("v" + SUFFIX, parcel)]))
