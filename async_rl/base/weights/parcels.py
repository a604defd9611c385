"""Both halves of compact pushes: they send only changed values or adapters instead of whole weights.

The weight NAME is sent as a uint8 tensor NAME + SUFFIX, its parcel: the length of a header (8 bytes), the header in
JSON, and data. The header's `form` says how the server makes the weight:

    dense    data: the weight's values
    delta    data: the values that changed since version `base`, and their positions as gaps
    adapter  data: A and B; the weight is W + scaling * B A, with W from the model folder that the server started from
    base     no data: the weight is W

A dense or delta parcel gives exactly the bits of a push of whole tensors. An adapter is multiplied by the server, so on
another kind of processor the last bits of the product may differ from the learner's.

Servers of vLLM load this file by its path, so it imports nothing of this project.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SUFFIX = ".parcel"
_ALIGNMENT = 16
"""The size of a parcel is a multiple of this many bytes, so that parcels in a bucket are aligned for reading numbers.
"""
_SKIP = 255
"""A gap of this many unchanged values that is not followed by a changed one."""
_CHUNK = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_parcel(name: str) -> bool:
    return name.endswith(SUFFIX)


def dense_parcel(
    weight: Tensor,  # contiguous, on the CPU
    version: int,
) -> Tensor:  # [bytes] uint8
    """Return the parcel of a whole weight. Later delta parcels may be based on it."""
    return _pack({"form": "dense", **_of(weight, version)}, weight)


def delta_parcel(
    weight: Tensor,  # contiguous, on the CPU
    before: Tensor,  # like `weight`
    version: int,
    base: int,
) -> tuple[Tensor, int]:  # [bytes] uint8
    """Return (the smaller of the delta and the dense parcel, the number of values whose bits differ).

    Args:
        before: the weight of version `base`, which the servers have.
    """
    bits = _bits(weight)
    positions = (bits != _bits(before)).nonzero().view(-1)
    count, itemsize = len(positions), weight.element_size()
    if count * (itemsize + 1) < weight.nbytes:
        gaps = encode_gaps(positions)
        if count * itemsize + len(gaps) < weight.nbytes:
            header = {"form": "delta", **_of(weight, version), "base": base, "changed": count, "gaps": len(gaps)}
            return _pack(header, bits[positions], gaps), count
    return dense_parcel(weight, version), count


def adapter_parcel(
    a: Tensor,  # [rank, in] float32
    b: Tensor,  # [out, rank] float32
    scaling: float,
    dtype: torch.dtype,
    base_sum: int,
) -> Tensor:  # [bytes] uint8
    """Return the parcel of the adapted weight W + scaling * B A. Servers compute it in float32 and store it as `dtype`.

    Args:
        base_sum: the checksum of W in float32.
    """
    return _pack(
        {"form": "adapter", "dtype": _name(dtype), "a": list(a.shape), "b": list(b.shape), "scaling": scaling,
         "base_sum": base_sum}, a, b,
    )  # fmt: skip


def base_parcel(dtype: torch.dtype) -> Tensor:  # [bytes] uint8
    """Return the parcel of a weight that the servers take from their own model folder, as `dtype`."""
    return _pack({"form": "base", "dtype": _name(dtype)})


def encode_gaps(
    positions: Tensor,  # [n] int64, ascending
) -> Tensor:  # [bytes] uint8
    """Encode ascending positions as the numbers of values between them, one byte each for up to 254.

    A byte of 255 stands for 255 values, and another byte follows.
    """
    if not len(positions):
        return torch.empty(0, dtype=torch.uint8)
    steps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    ends = (steps // _SKIP + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1,), _SKIP, dtype=torch.uint8)
    gaps[ends] = (steps % _SKIP).to(torch.uint8)
    return gaps


def decode_gaps(
    gaps: Tensor,  # [bytes] uint8
) -> Tensor:  # [n] int64
    """Decode the positions that `encode_gaps` encoded."""
    ends = (gaps != _SKIP).nonzero().view(-1)
    return gaps.long().cumsum(0)[ends] + torch.arange(len(ends))


def checksum(
    weight: Tensor,  # contiguous, on the CPU
) -> int:
    """Return sum_i (2 i + 1) x_i modulo 2^64 over the 8-byte words x_i of the weight's bits, as a signed number.

    The factors are odd, so any change within one word changes the sum; so do words that change places.
    """
    data = weight.reshape(-1).view(torch.uint8)
    if rest := -len(data) % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    words, total = data.view(torch.int64), torch.zeros((), dtype=torch.int64)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        total += (part * (2 * torch.arange(start, start + len(part)) + 1)).sum()
    return int(total)


class Rebuilder:
    """The server's half: makes weights from parcels, using the weights of the last push or of its model folder.

    Args:
        base_files: returns the safetensors files of the model folder that the server started from.
    """

    def __init__(self, base_files: Callable[[], Sequence[Path]]) -> None:
        self._base_files = base_files
        self._base: dict[str, Any] = {}
        """The open safetensors file of each weight of the model folder; {} before the first adapter."""
        self._base_sums: dict[str, int] = {}
        self._held: dict[str, tuple[int, Tensor]] = {}
        """(version, values) of each weight that came as dense or delta, in host memory."""

    def rebuild(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) for each parcel.

        The weight is on the CPU and must not be written to. Other tensors are unchanged.

        Raises:
            ValueError: a parcel is damaged, or was made for other weights than this server has.
        """
        for name, tensor in named_tensors:
            if is_parcel(name):
                weight = name.removesuffix(SUFFIX)
                yield weight, self._open(weight, tensor.cpu())
            else:
                yield name, tensor

    def _open(self, name: str, parcel: Tensor) -> Tensor:
        header, data = _unpack(name, parcel)
        if header["form"] in ("adapter", "base"):
            return self._from_base(name, header, data)
        dtype, shape = getattr(torch, header["dtype"]), torch.Size(header["shape"])
        if header["form"] == "dense":
            weight = data[: dtype.itemsize * shape.numel()].view(dtype).view(shape).clone()
        else:
            weight = self._changed(name, header, data)
        if checksum(weight) != header["sum"]:
            self._held.pop(name, None)
            raise ValueError(f"{name}: the checksum of version {header['version']} is wrong: the push was damaged")
        self._held[name] = (header["version"], weight)
        return weight

    def _changed(self, name: str, header: dict[str, Any], data: Tensor) -> Tensor:
        """Return the weight after a delta parcel. The weight of version `base` is no longer kept."""
        version, before = self._held.get(name, (None, torch.empty(0)))
        if version != header["base"] or list(before.shape) != header["shape"]:
            raise ValueError(
                f"{name}: the push has what changed since version {header['base']}, but this server holds "
                f"{'none' if version is None else f'version {version}'}"
            )
        weight = before.clone()  # the old values may be in use
        del self._held[name]
        end = header["changed"] * weight.element_size()
        bits = _bits(weight)
        bits[decode_gaps(data[end : end + header["gaps"]])] = data[:end].view(bits.dtype)
        return weight

    def _from_base(self, name: str, header: dict[str, Any], data: Tensor) -> Tensor:
        if not self._base:
            for path in self._base_files():
                file: Any = safe_open(path, framework="pt")
                self._base |= dict.fromkeys(file.keys(), file)
        if name not in self._base:
            raise ValueError(f"{name}: the model folder that this server was started from has no such tensor")
        weight, dtype = self._base[name].get_tensor(name).float(), getattr(torch, header["dtype"])
        if header["form"] == "base":
            return weight.to(dtype)
        if name not in self._base_sums:
            self._base_sums[name] = checksum(weight)
        if self._base_sums[name] != header["base_sum"]:
            raise ValueError(
                f"{name}: the model folder that this server was started from has other values than the learner's; "
                "model.path must hold the same model on all hosts"
            )
        a_shape, b_shape = torch.Size(header["a"]), torch.Size(header["b"])
        numbers = data[: 4 * (a_shape.numel() + b_shape.numel())].view(torch.float32)
        a, b = numbers[: a_shape.numel()].view(a_shape), numbers[a_shape.numel() :].view(b_shape)
        return torch.addmm(weight, b, a, alpha=header["scaling"]).to(dtype)  # as the learner merges


def _of(weight: Tensor, version: int) -> dict[str, Any]:
    return {
        "dtype": _name(weight.dtype), "shape": list(weight.shape), "version": version, "sum": checksum(weight),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bits(weight: Tensor) -> Tensor:  # [values] integers
    """Return a view of the values as integers with the same bits: -0.0 is not 0.0, and a NaN equals itself."""
    return weight.view(-1).view(_BITS[weight.element_size()])


def _pack(header: dict[str, Any], *sections: Tensor) -> Tensor:
    words = json.dumps(header).encode()
    words += b" " * (-(8 + len(words)) % _ALIGNMENT)
    parts = [torch.frombuffer(bytearray(struct.pack("<Q", len(words)) + words), dtype=torch.uint8)]
    parts += [section.contiguous().reshape(-1).view(torch.uint8) for section in sections]
    rest = -sum(len(part) for part in parts) % _ALIGNMENT
    return torch.cat([*parts, torch.zeros(rest, dtype=torch.uint8)])


def _unpack(name: str, parcel: Tensor) -> tuple[dict[str, Any], Tensor]:
    try:
        (length,) = struct.unpack("<Q", bytes(parcel[:8].tolist()))
        if length > len(parcel):
            raise ValueError(f"a header of {length} bytes")
        return json.loads(bytes(parcel[8 : 8 + length].tolist())), parcel[8 + length :]
    except ValueError as error:
        raise ValueError(f"{name}: its parcel is damaged: {error}") from None


class ChangedWeights:
    """The learner's half of weight_sync.delta: converts each push to parcels with the changes.

    It keeps the weights of the last push in the servers' type, in the host memory of rank 0. A member is any value that
    stands for one start of a server.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pushed: dict[str, Tensor] = {}
        self._version: int | None = None
        self._holders: frozenset[Hashable] = frozenset()
        """The members whose weights are exactly `_pushed`; empty during a push of a new version, and if it failed."""
        self.is_sparse = False
        """Whether the last push was of changes, not of whole weights."""
        self.changed_share = 1.0
        """The share of the values that changed in the last sparse push; 1 for a push of whole weights."""

    def parcels(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, members: Collection[Hashable]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parcel) of each weight for a push of `version` to `members`.

        All members get the same bytes. So all weights are sent whole if one member does not have the last push, because
        a push has failed. They are also sent whole if `version` is the version of the last push, so that servers that
        have joined since get it.
        """
        is_same = version == self._version
        base = self._version if members and self._holders.issuperset(members) and not is_same else None
        self.is_sparse = base is not None
        if not is_same:
            self._holders = frozenset()
        changed = total = 0
        for name, tensor in named_tensors:
            weight = tensor.detach().to("cpu", self._dtype).contiguous()
            total += weight.numel()
            before = self._pushed.get(name)
            if base is None or before is None:
                parcel, count = dense_parcel(weight, version), weight.numel()
            else:
                parcel, count = delta_parcel(weight, before, version, base)
            changed += count
            if before is None:
                self._pushed[name] = weight.clone()  # it may be the learner's own memory
            else:
                before.copy_(weight)
            yield name + SUFFIX, parcel
        self._version, self.changed_share = version, changed / max(1, total)

    def delivered(self, members: Iterable[Hashable]) -> None:
        """Record that the last push has reached all `members`."""
        self._holders |= frozenset(members)
