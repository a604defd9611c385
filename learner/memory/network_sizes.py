"""Reads the sizes of the learner's networks from their folders, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from async_rl.config import Config
from async_rl.storage.model_loading import load_without_weights
from learner.algorithms.objective import Objective
from learner.memory.optimizer_state import state_bytes
from learner.models.frozen import freeze
from learner.models.lora import add_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSizes:
    """The sizes of a network of the learner in parameters, with its role."""

    role: str
    config: Any
    parameters: int
    base: int
    """How many it has without adapters."""
    trained: int
    """How many of the parameters are trained; with adapters only these."""
    state: int
    """The bytes that the optimizer keeps for them."""
    rest: int
    """How many are in no transformer block: embeddings, output head and the last norm."""
    block: int
    """How many a transformer block has."""
    largest: int
    """How many the largest tensor has."""
    head: int
    """How many the output head has; 0: the network computes no logits."""
    embeddings: int
    """How many the embeddings have."""
    is_tied: bool
    """Whether the output head is the embeddings."""
    layers: int
    """The number of transformer blocks."""
    trained_rest: int
    """How many of `rest` are trained."""
    trained_block: int
    """How many of a block are trained."""
    trained_head: int
    """How many of the output head are trained."""
    trained_embeddings: int
    """How many of the embeddings are trained."""


def networks_of(config: Config) -> list[NetworkSizes]:
    """Return the networks that the learner holds; only headers of weight files are read.

    Raises:
        ConfigError: a model can't be loaded.
    """
    objective, model = Objective(config), config.model
    policy = _network("policy", "model.path", model.path, config)
    networks = [policy]
    if objective.advantage.needs_critic:
        path = config.critic.path
        networks.append(_network("critic", "critic.path", path or model.path, config))
    if objective.needs_reference and (not model.lora.rank or config.reference.path):
        networks.append(_network("reference", "reference.path", config.reference.path or model.path, config))
    if config.reward_model.path:
        networks.append(_network("reward model", "reward_model.path", config.reward_model.path, config))
    return networks


def _network(role: str, key: str, path: str, config: Config) -> NetworkSizes:
    lm = load_without_weights(key, path, "eager")  # which every model has, and sizes are the same with any other
    lm.config._attn_implementation = config.model.attn_implementation
    base = _count(lm.parameters())
    if role == "policy" and config.model.lora.rank:
        add_adapters(lm, config.model.lora)
    if role == "policy" and config.model.frozen:
        freeze(lm, config.model.frozen)
    if role not in ("policy", "critic"):
        lm.requires_grad_(False)
    names = set(lm._no_split_modules or ())
    blocks = [list(module.parameters()) for module in lm.modules() if type(module).__name__ in names]
    in_blocks = [parameter for block in blocks for parameter in block]
    parameters = list(lm.parameters())
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    of_head = [head.weight] if head is not None and role in ("policy", "reference") else []
    return NetworkSizes(
        role=role, config=lm.config, parameters=_count(parameters), base=base, trained=_trained(parameters),
        state=state_bytes(config.learner, [parameter.shape for parameter in parameters if parameter.requires_grad]),
        rest=_count(parameters) - _count(in_blocks), block=max(map(_count, blocks), default=0),
        largest=max(parameter.numel() for parameter in parameters),
        head=_count(of_head), embeddings=embeddings.weight.numel(),
        is_tied=bool(of_head) and head.weight is embeddings.weight, layers=len(blocks),
        trained_rest=_trained(parameters) - _trained(in_blocks), trained_block=max(map(_trained, blocks), default=0),
        trained_head=_trained(of_head), trained_embeddings=_trained([embeddings.weight]),
    )  # fmt: skip


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _trained(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
