"""Sizes of networks, optimizer state and checkpoints from the headers of weight files, and the room that there is.

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
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from async_rl.base.config import Config, LearnerConfig
from async_rl.base.host import free_host_bytes
from async_rl.base.models_and_data.model_folder import num_weights
from async_rl.base.models_and_data.model_loading import load_without_weights
from learner.loop.optimizer import open_optimizer, some_lr
from learner.models.network import blocks_of
from learner.models.policy import choose_trained

GIB = 2**30
IN_TURNS_BYTES = 5 * GIB
"""GPU memory of a server that has released weights and KV cache, such as CUDA graphs. An estimate."""
_MOST_REPLIES, _PREFILL_TOKENS = 1024, 8192
"""The engines' largest batches, of replies and of prompts."""
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
        return MASTER_BYTES * self.trains.all + self.state + self.average


def networks(config: Config) -> dict[str, tuple[str, str]]:
    """Return {role: (key, path)} of the learner's networks, the policy first. `path` is the value of setting `key`."""
    algorithm, model = config.algorithm, config.model
    paths = {"policy": ("model.path", model.path)}
    if algorithm.advantage_entry.needs_critic:
        paths["critic"] = ("critic.path", config.critic.path or model.path)
    if algorithm.kl.kind != "none" and (not model.lora.rank or config.reference.path):
        paths["reference"] = ("reference.path", config.reference.path or model.path)
    if config.reward_model.path:
        paths["reward model"] = ("reward_model.path", config.reward_model.path)
    return paths


def networks_of(config: Config) -> list[NetworkSizes]:
    """Return the sizes of the learner's networks, the policy first. Raises ConfigError if a model can't be loaded."""
    return [_network(role, key, path, config) for role, (key, path) in networks(config).items()]


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint of all trained networks. Raises ConfigError if a model can't be loaded."""
    return sum(network.saved for network in networks_of(config))


def _network(role: str, key: str, path: str, config: Config) -> NetworkSizes:
    lm = load_without_weights(key, path, "eager")  # sizes are the same with any attention, and every model has eager
    lm.config._attn_implementation = config.model.attn_implementation
    base = sum(parameter.numel() for parameter in lm.parameters())
    if role == "policy":
        choose_trained(lm, config.model)
    elif role != "critic":
        lm.requires_grad_(False)
    parameters, blocks = list(lm.parameters()), blocks_of(lm)
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    has_head = head is not None and role in ("policy", "reference")

    def counts(only_trained: bool) -> Counts:
        of = {each: each.numel() if each.requires_grad or not only_trained else 0 for each in parameters}
        number, of_blocks = sum(of.values()), [sum(of[each] for each in block.parameters()) for block in blocks]
        of_head = of[head.weight] if has_head else 0
        return Counts(number, number - sum(of_blocks), max(of_blocks, default=0), of_head, of[embeddings.weight])

    trains = counts(True)
    return NetworkSizes(
        role=role, config=lm.config, has=counts(False), trains=trains, base=base, layers=len(blocks),
        state=state_bytes(config.learner, [parameter.shape for parameter in parameters if parameter.requires_grad]),
        average=MASTER_BYTES * trains.all if role == "policy" and config.learner.ema_decay else 0,
        largest=max(parameter.numel() for parameter in parameters),
        is_tied=has_head and head.weight is embeddings.weight,
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


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's state. A tensor with fewer bits per number is yielded as its parts."""
    for leaf in tree_leaves(state):
        if hasattr(leaf, "__tensor_flatten__") and not isinstance(leaf, FakeTensor):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            yield leaf


def surely_fits(config: Config, room: int) -> bool:
    """Return whether a rough upper bound of a rank's memory fits `room` bytes. It saves measuring a pass, seconds."""
    longest, is_eager, needed = config.longest_tokens, config.model.attn_implementation == "eager", 0
    for _, path in networks(config).values():
        model, weights = AutoConfig.from_pretrained(path).get_text_config(), num_weights(path)
        # for each token a layer makes about as many numbers as it has weights for each of its inputs
        numbers = 4 * weights // model.hidden_size
        pairs = longest * (3 * model.num_hidden_layers * model.num_attention_heads if is_eager else 4)
        # weight, gradient, AdamW's two moments and an average of each, in float32
        needed += 5 * MASTER_BYTES * weights + 4 * config.learner.max_tokens_per_forward * (numbers + pairs)
    return 2 * needed < room


def batch_bytes(config: Config, model: Any) -> int:
    """Return the GPU memory that a server's fullest batch takes. `model` is the text part of the model's config.

    It is the larger of two: logits in float32, their softmax, its logarithm and a bfloat16 product, 14 bytes for each
    reply and word; or gate, up and their product of a batch of prompts, in bfloat16.
    """
    replies = min(config.max_running_replies, _MOST_REPLIES)
    prompts = 6 * _PREFILL_TOKENS * int(getattr(model, "intermediate_size", 0) or 4 * model.hidden_size)
    return max(14 * replies * int(model.vocab_size), prompts // config.placement.rollout.tp)


def free_room(config: Config, device: torch.device) -> int:
    """Return the bytes on `device` that a rank may use, before it loads its models and after its servers have started.

    If other processes use much of a GPU, they are servers. Then memory is left for their fullest batch.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if config.shares_gpus:
            return total - IN_TURNS_BYTES
        if total - free < config.rollout.gpu_memory_utilization * total / 2:
            return free
        model = AutoConfig.from_pretrained(config.model.path).get_text_config()
        servers = 1 if config.placement.colocated else config.placement.num_servers
        return free - servers * batch_bytes(config, model)
    learner = config.placement.learner
    return free_host_bytes() * learner.nodes // learner.ranks
