from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.weights.transport import iter_buckets, unpack


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 400),
)
def test_unpacked_buckets_hold_every_tensor_once_in_order(shapes: list[list[int]], bucket_bytes: int) -> None:
    tensors = [(f"w{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]
    received: list[tuple[str, torch.Tensor]] = []
    last: list[tuple[str, torch.Tensor]] = []
    for bucket in iter_buckets(tensors, bucket_bytes, torch.float32, [None, None]):
        received += [(name, tensor.clone()) for name, tensor in last]  # that bucket was sent while this one was filled
        last = unpack(bucket.data, bucket.names, bucket.dtypes, bucket.shapes)
    received += last
    assert [name for name, _ in received] == [name for name, _ in tensors]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(received, tensors, strict=True))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), bucket_bytes=st.integers(4, 200))
def test_only_the_last_bucket_is_marked_and_none_exceeds_the_limit(sizes: list[int], bucket_bytes: int) -> None:
    tensors = ((str(i), torch.ones(n)) for i, n in enumerate(sizes))
    buckets = list(iter_buckets(tensors, bucket_bytes, torch.float32, [None, None]))
    assert len({b.data.untyped_storage().data_ptr() for b in buckets[:-2]}) <= 2 or max(sizes) * 4 > bucket_bytes
    assert [b.is_last for b in buckets] == [False] * (len(buckets) - 1) + [True]
    assert all(b.data.numel() <= bucket_bytes or len(b.names) == 1 for b in buckets)
