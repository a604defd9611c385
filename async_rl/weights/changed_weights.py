"""The learner's half of weight_sync.delta: what of the weights has changed since the servers last got them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from async_rl.weights.parcels import SUFFIX, delta_parcel, dense_parcel


class ChangedWeights:
    """Turns each push into parcels of what has changed, or of whole weights where a server needs these.

    It holds the weights that were last pushed, in the servers' type, in the host memory of rank 0.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pushed: dict[str, Tensor] = {}
        self._version: int | None = None
        self._holders: dict[str, str] = {}
        """URLs of the servers that hold exactly `_pushed`, by name; {} during a push and after one that failed."""
        self.is_sparse = False
        """Whether the last push was of changes, not of whole weights."""
        self.changed_share = 1.0
        """The share of the values that changed in the last sparse push; 1 for a push of whole weights."""

    def parcels(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, servers: Mapping[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parcel) of each weight for a push of `version` to `servers`, {name: URL}.

        If one of them does not hold the last push, because it has joined since or a push has failed, all weights are
        whole: they all get the same bytes.
        """
        base = self._version if servers and servers.items() <= self._holders.items() else None
        self.is_sparse, self._holders = base is not None, {}
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

    def forget(self, name: str) -> None:
        """Note that the server `name` was started again, so that it does not hold the last push."""
        self._holders.pop(name, None)

    def delivered(self, servers: Mapping[str, str]) -> None:
        """Note that the last push has reached all of `servers`, {name: URL}."""
        self._holders = dict(servers)
