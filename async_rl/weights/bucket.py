"""Buckets: tensors packed into flat bytes, as which the weights of a model travel, and their unpacking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Part of a model's weights: tensors that lie one after the other in `data`, in the order of `names`."""

    names: list[str]
    dtypes: list[str]
    """Torch names without the prefix, e.g. `float32`."""
    shapes: list[list[int]]
    data: Tensor  # [bytes] uint8
    is_last: bool


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    dtype: torch.dtype,
    buffers: list[Tensor | None],  # two of [bytes] uint8; None: not allocated yet
) -> Iterator[Bucket]:
    """Cast the tensors to `dtype` and yield them in buckets, in order. A tensor over `bucket_bytes` has its own bucket.

    The two buffers take turns: a bucket may be sent while the next one is filled, and must have been sent when the one
    after that is requested.
    """
    held: list[tuple[str, list[int]]] = []  # name and shape of each tensor in the bucket that is being filled
    size = turn = 0

    def packed(is_last: bool) -> Bucket:
        buffer = buffers[turn]
        assert buffer is not None
        return Bucket(
            names=[name for name, _ in held], dtypes=[str(dtype).removeprefix("torch.")] * len(held),
            shapes=[shape for _, shape in held], data=buffer[:size], is_last=is_last,
        )

    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * dtype.itemsize
        if held and size + num_bytes > bucket_bytes:
            yield packed(is_last=False)
            held, size, turn = [], 0, 1 - turn
        buffer = buffers[turn]
        if buffer is None or buffer.numel() < num_bytes:
            buffers[turn] = buffer = None  # so that its memory can be used for the new one
            buffer = torch.empty(max(bucket_bytes, num_bytes), dtype=torch.uint8, device=tensor.device)
            buffers[turn] = buffer
        buffer[size : size + num_bytes].view(dtype).copy_(tensor.detach().reshape(-1))
        held.append((name, list(tensor.shape)))
        size += num_bytes
    if held:
        yield packed(is_last=True)


def unpack(
    data: Tensor,  # [bytes] uint8
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) for each tensor of a bucket, as views of its bytes. ValueError: the sizes don't add up."""
    named: list[tuple[str, Tensor]] = []
    offset = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        named.append((name, data[offset : offset + size].view(dtype).view(torch.Size(shape))))
        offset += size
    if offset != data.numel():
        raise ValueError(f"the bucket must hold the {offset} bytes of its tensors, got {data.numel()} bytes")
    return named


def bucket_num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Return the number of bytes that tensors of these types and shapes take."""
    return sum(getattr(torch, d).itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True))
