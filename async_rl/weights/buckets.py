"""Packing named tensors into flat byte buckets, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    names: list[str]
    dtypes: list[str]
    """Torch names without the prefix, e.g. `float32`."""
    shapes: list[list[int]]
    data: Tensor  # [bytes] uint8: the tensors' bytes one after the other
    is_last: bool


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Cast to `dtype` and fill buckets in order. A tensor larger than `bucket_bytes` gets a bucket of its own.

    Holds one bucket back so that the last one can be marked: at most two buckets and the tensors of one are alive.
    """
    held: Bucket | None = None
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, tensor in named_tensors:
        cast = tensor.detach().to(dtype)
        if tensors and size + cast.nbytes > bucket_bytes:
            if held is not None:
                yield held
            held = _pack(names, tensors, is_last=False)
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(cast)
        size += cast.nbytes
    if held is not None:
        yield held
    if tensors:
        yield _pack(names, tensors, is_last=True)


def _pack(names: Sequence[str], tensors: Sequence[Tensor], *, is_last: bool) -> Bucket:
    return Bucket(
        names=list(names),
        dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors],
        shapes=[list(t.shape) for t in tensors],
        data=torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]),
        is_last=is_last,
    )


def unpack(
    data: Tensor,  # [bytes] uint8
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its bytes. Raises ValueError when the sizes do not add up."""
    named: list[tuple[str, Tensor]] = []
    offset = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        named.append((name, data[offset : offset + size].view(dtype).view(torch.Size(shape))))
        offset += size
    if offset != data.numel():
        raise ValueError(f"bucket holds {data.numel()} bytes, its tensors need {offset}")
    return named


def bucket_num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    return sum(getattr(torch, d).itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True))
