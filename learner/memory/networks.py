"""Reads the sizes of the learner's networks from their folders, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.models_and_data.model_loading import load_without_weights
from learner.algorithms.objective import Objective
from learner.memory.optimizer_state import MASTER_BYTES, state_bytes
from learner.models.frozen import freeze
from learner.models.lora import add_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many parameters a network has, or how many are trained; with adapters only these are trained."""

    all: int
    rest: int
    """Weights in no transformer block: embeddings, output head and the last norm."""
    block: int
    """Weights in the largest block."""
    head: int
    """Weights in the output head; 0: the network computes no logits."""
    embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSizes:
    """The sizes of a network of the learner."""

    role: str
    config: Any
    has: Counts
    trains: Counts
    base: int
    """The number of its parameters without adapters."""
    state: int
    """The bytes that the optimizer keeps for the trained parameters."""
    average: int
    """The bytes of the moving average of its weights (learner.ema_decay)."""
    largest: int
    """How many numbers the largest tensor has."""
    is_tied: bool
    """Whether the output head is the embeddings."""
    layers: int

    @property
    def saved(self) -> int:
        """The bytes of a checkpoint of it."""
        return MASTER_BYTES * self.trains.all + self.state + self.average


def networks_of(config: Config) -> list[NetworkSizes]:
    """Return the networks that the learner holds, the policy first; only headers of weight files are read.

    Raises:
        ConfigError: a model can't be loaded.
    """
    objective, model = Objective(config), config.model
    paths = {"policy": ("model.path", model.path)}
    if objective.advantage.needs_critic:
        paths["critic"] = ("critic.path", config.critic.path or model.path)
    if objective.needs_reference and (not model.lora.rank or config.reference.path):
        paths["reference"] = ("reference.path", config.reference.path or model.path)
    if config.reward_model.path:
        paths["reward model"] = ("reward_model.path", config.reward_model.path)
    return [_network(role, key, path, config) for role, (key, path) in paths.items()]


def checkpoint_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint: trained weights in float32, the optimizer's tensors for them, and the average.

    Raises:
        ConfigError: a model can't be loaded.
    """
    return sum(network.saved for network in networks_of(config) if network.trains.all)


def _network(role: str, key: str, path: str, config: Config) -> NetworkSizes:
    lm = load_without_weights(key, path, "eager")  # which every model has, and sizes are the same with any other
    lm.config._attn_implementation = config.model.attn_implementation
    base = sum(parameter.numel() for parameter in lm.parameters())
    if role == "policy" and config.model.lora.rank:
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

        return Counts(
            all=count(parameters), rest=count(parameters) - sum(map(count, blocks)),
            block=max(map(count, blocks), default=0), head=count(of_head), embeddings=count([embeddings.weight]),
        )

    has_average, trains = role == "policy" and config.learner.ema_decay, counts(True)
    return NetworkSizes(
        role=role, config=lm.config, has=counts(False), trains=trains, base=base, layers=len(blocks),
        state=state_bytes(config.learner, [parameter.shape for parameter in parameters if parameter.requires_grad]),
        average=MASTER_BYTES * trains.all if has_average else 0,
        largest=max(parameter.numel() for parameter in parameters),
        is_tied=bool(of_head) and head.weight is embeddings.weight,
    )
