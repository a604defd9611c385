"""Counts the bytes of the tensors that some code makes, on any device, also of tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within the `with` block while they live: `peak` is their most.

    What one operation allocates for itself alone is not seen.

    Args:
        existing: tensors from before the block, of which views may be made in it.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count((leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes
