"""The moving average of the policy's weights (learner.ema_decay). Evaluations use it, and it is saved as the result.

A run without one does not load this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class WeightAverage:
    """An exponential moving average of the trained weights of a module. Each average is sharded like its weight.

        average = decay * average + (1 - decay) * weights    after each optimizer step

    The average starts as the weights themselves. Source: Polyak averaging, as in Mean Teacher, arXiv 1703.01780,
    equation 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self._averages: dict[Tensor, Tensor] = {p: p.detach().clone() for p in self._weights}

    def of(self, parameter: Tensor) -> Tensor:
        """Return the average of a parameter, not a copy."""
        return self._averages[parameter]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average, after an optimizer step."""
        for weight, average in self._pairs():
            average.lerp_(weight, 1 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the present weights."""
        for weight, average in self._pairs():
            average.copy_(weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context: inside, the module's weights are the averages. Every rank must enter and leave it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        if isinstance(self._module, FSDPModule):
            self._module.reshard()  # a forward pass without a backward leaves the root's parameters gathered
        for weight, average in self._pairs():
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (this rank's shard of a weight, this rank's shard of the weight's average)."""
        for weight, average in self._averages.items():
            yield _shard(weight.detach()), _shard(average)


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
