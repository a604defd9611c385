"""Measures how many bytes an optimizer keeps for the weights that it trains.

No optimizer says so itself: AdamW keeps two numbers for each weight, SGD none, Adafactor one for each row and column.
So the optimizer takes a step with small weights, and the tensors that it keeps are compared with these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.base.config import LearnerConfig
from learner.loop.optimizer_choice import open_optimizer, some_lr

MASTER_BYTES = 4
"""The bytes of a weight that is trained, in float32; its gradient has as many."""
_SIZES = (320, 192, 12, 5, 3)
"""The sizes of a small weight's dimensions: all different, so that each can be recognised in the optimizer's tensors.
"""
_TABLE = (20_000, 64)
"""The small form of a matrix with this many rows or more: some optimizers recognise embeddings by their rows."""

Shape = tuple[int, ...]


def state_bytes(config: LearnerConfig, shapes: Iterable[Sequence[int]]) -> int:
    """Return the bytes of the tensors that learner.optimizer keeps for weights of these shapes.

    An optimizer that takes no step on this host, for example because it needs a GPU, is counted as AdamW.

    Raises:
        ConfigError: the optimizer can't be made.
    """
    counts = Counter(tuple(shape) for shape in shapes if len(shape))
    small = {shape: _small(shape) for shape in counts}
    weights = {each: nn.Parameter(torch.zeros(each)) for each in dict.fromkeys(small.values())}
    if not weights:
        return 0
    optimizer = open_optimizer(config, [*weights.values()], some_lr(config))
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    try:
        optimizer.step()
    except Exception:  # of any type; learner/loop/optimizer_choice.py tries it with the run's own weights
        return 2 * MASTER_BYTES * sum(count * math.prod(shape) for shape, count in counts.items())
    total = 0.0
    for shape, count in counts.items():
        kept = [tensor for value in optimizer.state[weights[small[shape]]].values() for tensor in _tensors(value)]
        total += count * sum(_scaled_bytes(tensor, small[shape], shape) for tensor in kept if tensor.numel() > 1)
    return round(total)


def _small(shape: Shape) -> Shape:
    return _TABLE if len(shape) == 2 and shape[0] >= _TABLE[0] else _SIZES[: len(shape)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value of an optimizer's state, and the parts of those that hold fewer bits a number."""
    if hasattr(value, "__tensor_flatten__"):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _scaled_bytes(tensor: Tensor, small: Shape, shape: Shape) -> float:
    """Return the bytes for a weight of `shape` of a tensor that is kept for a weight of the shape `small`."""
    own = [] if tensor.numel() == math.prod(small) else [small.index(size) for size in tensor.shape if size in small]
    dims = own or range(len(shape))  # a tensor of other sizes, such as scales of blocks, grows with the whole weight
    return tensor.nbytes * math.prod(shape[dim] / small[dim] for dim in dims)
