"""Sizes of the learner's networks, their optimizer state and their checkpoints, from the headers of weight files.

No optimizer says how much state it has: AdamW has two numbers for each weight, SGD none, Adafactor one for each row and
column. So the optimizer takes one step with tensors that have shapes but no data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from async_rl.base.config import Config, LearnerConfig
from async_rl.base.models_and_data.model_loading import load_without_weights
from learner.loop.optimizer import open_optimizer, some_lr
from learner.memory.room import networks
from learner.models.network import freeze

MASTER_BYTES = 4
"""Bytes of a trained weight in float32. Its gradient has as many."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of parameters of a network: of all of them, or only of the trained ones."""

    all: int
    rest: int  # outside the transformer blocks: embeddings, output head, last norm
    block: int  # of the largest block
    head: int  # of the output head; 0 if the network computes no logits
    embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSizes:
    """Sizes of one network of the learner."""

    role: str  # policy, critic, reference or reward model
    config: Any  # of transformers
    has: Counts
    trains: Counts
    base: int  # parameters without adapters
    state: int  # bytes that the optimizer keeps
    average: int  # bytes of the moving average of its weights (learner.ema_decay)
    largest: int  # numbers in its largest tensor
    is_tied: bool  # whether the output head is the embeddings
    layers: int

    @property
    def saved(self) -> int:
        """Bytes of the network's checkpoint: trained weights in float32, their optimizer state and their average."""
        return MASTER_BYTES * self.trains.all + self.state + self.average if self.trains.all else 0


def networks_of(config: Config) -> list[NetworkSizes]:
    """Return the sizes of the learner's networks, the policy first. Only headers of weight files are read.

    Raises:
        ConfigError: a model can't be loaded.
    """
    return [_network(role, key, path, config) for role, (key, path) in networks(config).items()]


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint of all trained networks. Raises ConfigError if a model can't be loaded."""
    return sum(network.saved for network in networks_of(config))


def _network(role: str, key: str, path: str, config: Config) -> NetworkSizes:
    lm = load_without_weights(key, path, "eager")  # sizes are the same with any attention, and every model has eager
    lm.config._attn_implementation = config.model.attn_implementation
    base = sum(parameter.numel() for parameter in lm.parameters())
    if role == "policy" and config.model.lora.rank:
        from learner.models.lora import add_adapters

        add_adapters(lm, config.model.lora)
    if role == "policy" and config.model.frozen:
        freeze(lm, config.model.frozen)
    if role not in ("policy", "critic"):
        lm.requires_grad_(False)
    names = set(lm._no_split_modules or ())
    blocks = [list(module.parameters()) for module in lm.modules() if type(module).__name__ in names]
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    of_head = [head.weight] if head is not None and role in ("policy", "reference") else []
    parameters = list(lm.parameters())

    def counts(only_trained: bool) -> Counts:
        def count(tensors: Iterable[Tensor]) -> int:
            return sum(tensor.numel() for tensor in tensors if tensor.requires_grad or not only_trained)

        of_blocks = [*map(count, blocks)]
        number, largest_block = count(parameters), max(of_blocks, default=0)
        return Counts(number, number - sum(of_blocks), largest_block, count(of_head), count([embeddings.weight]))

    trains = counts(True)
    return NetworkSizes(
        role=role, config=lm.config, has=counts(False), trains=trains, base=base, layers=len(blocks),
        state=state_bytes(config.learner, [parameter.shape for parameter in parameters if parameter.requires_grad]),
        average=MASTER_BYTES * trains.all if role == "policy" and config.learner.ema_decay else 0,
        largest=max(parameter.numel() for parameter in parameters),
        is_tied=bool(of_head) and head.weight is embeddings.weight,
    )  # fmt: skip


class _ItemsAreOne(TorchDispatchMode):
    """A context: inside, `item()` of a tensor without data returns 1. Adafactor calls it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def state_bytes(config: LearnerConfig, shapes: Iterable[Sequence[int]]) -> int:
    """Return the bytes of optimizer state that learner.optimizer keeps for weights of these shapes.

    An optimizer that takes no step on this host, for example because it needs a GPU, is counted as AdamW.

    Raises:
        ConfigError: the optimizer can't be made.
    """
    counts = Counter(tuple(shape) for shape in shapes if len(shape))
    if not counts:
        return 0
    with FakeTensorMode(), _ItemsAreOne():
        weights = [nn.Parameter(torch.empty(shape)) for shape in counts]
        optimizer = open_optimizer(config, weights, some_lr(config))
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        try:
            optimizer.step()
        except Exception:  # of any type; learner/loop/optimizer.py tries it with the run's own weights
            return 2 * MASTER_BYTES * sum(count * math.prod(shape) for shape, count in counts.items())
    kept = [sum(t.nbytes for t in _tensors(optimizer.state[weight]) if t.numel() > 1) for weight in weights]
    return sum(count * num_bytes for count, num_bytes in zip(counts.values(), kept, strict=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's state. A tensor with fewer bits per number is yielded as its parts."""
    if hasattr(value, "__tensor_flatten__") and not isinstance(value, FakeTensor):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
