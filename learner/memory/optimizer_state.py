"""Measures how much an optimizer keeps for the weights that it trains, in memory and in a checkpoint.

No optimizer says so itself: AdamW keeps two numbers for each weight, SGD none, Adafactor one for each row and column.
So one with small weights takes a step, and the sizes of the tensors that it keeps are compared with theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.config import Config, LearnerConfig
from async_rl.storage.model_folder import weight_shapes
from learner.optimizer_choice import open_optimizer, some_lr

MASTER_BYTES = 4
"""The bytes of a weight that is trained, in float32; its gradient has as many."""
ADAMW_BYTES = 8
"""The bytes of AdamW's two moments of a weight."""
_SIZES = (320, 192, 12, 5, 3)
"""The sizes of a small weight's dimensions, all different, so that the optimizer's tensors can be told apart by theirs.
"""
_TABLE = (20_000, 64)
"""The small form of a matrix with so many rows or more, as embeddings are: some optimizers tell these by their size."""

Shape = tuple[int, ...]


def state_bytes(config: LearnerConfig, shapes: Iterable[Sequence[int]]) -> int:
    """Return the bytes of the tensors that learner.optimizer keeps for weights of these shapes.

    An optimizer that takes no step on this host, because it needs a GPU, say, is counted as AdamW.

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
    except Exception:  # whatever an optimizer raises; learner/optimizer_choice.py tries it with the run's own weights
        return ADAMW_BYTES * sum(count * math.prod(shape) for shape, count in counts.items())
    total = 0.0
    for shape, count in counts.items():
        kept = [tensor for value in optimizer.state[weights[small[shape]]].values() for tensor in _tensors(value)]
        total += count * sum(_scaled_bytes(tensor, small[shape], shape) for tensor in kept if tensor.numel() > 1)
    return round(total)


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: trained weights in float32, the optimizer's tensors for them, and the average.

    Only headers of weight files are read. With adapters it is an upper bound, because not every matrix has one.
    """
    shapes = _shapes(config.model.path)
    if rank := config.model.lora.rank:
        matrices = [shape for shape in shapes.values() if len(shape) == 2]
        trained: list[Shape] = [part for out, into in matrices for part in ((rank, into), (out, rank))]
    else:
        frozen = config.model.frozen
        trained = [
            shape for name, shape in shapes.items() if not any(fnmatchcase(name, pattern) for pattern in frozen)
        ]
    average = MASTER_BYTES * sum(map(math.prod, trained)) if config.learner.ema_decay else 0
    if config.algorithm.advantage_entry.needs_critic:
        trained += _shapes(config.critic.path or config.model.path).values()
    return MASTER_BYTES * sum(map(math.prod, trained)) + average + state_bytes(config.learner, trained)


def _small(shape: Shape) -> Shape:
    """Return the shape of the small weight that stands for one of `shape`."""
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
    """Return the bytes that a tensor, kept for a weight of the shape `small`, has for one of `shape`."""
    own = [] if tensor.numel() == math.prod(small) else [small.index(size) for size in tensor.shape if size in small]
    dims = own or range(len(shape))  # what has a size of its own grows with the weight, as scales of blocks do
    return tensor.nbytes * math.prod(shape[dim] / small[dim] for dim in dims)


def _shapes(folder: str) -> dict[str, Shape]:
    """Return {name: shape} of a model's tensors; {} if there is no such folder, which other checks report."""
    found = weight_shapes(Path(folder)) if Path(folder).is_dir() else {}
    return {name: tuple(shape) for name, shape in found.items()}
