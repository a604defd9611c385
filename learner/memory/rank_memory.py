"""Computes how much memory a learner rank needs, by what it is for, before anything is loaded.

Sizes of weights are those of the model folders. The memory of forward and backward passes is measured with tensors
without data, see activations.py. The peak is that of the fullest moment of a step:

    loss       weights, optimizer state, gradients of earlier micro-batches, activations of a full micro-batch, and the
               logits with the gradient of the output head, or the backward pass of the last block
    embedding  in place of activations the gradients of what is no block, among them the embeddings, before they are
               split over the ranks
    push       weights, optimizer state, two buckets and the largest weight, gathered
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from async_rl.config import Config
from async_rl.storage.model_loading import load_without_weights
from async_rl.weights.base import serving_dtype
from learner.algorithms.objective import Objective
from learner.memory.activations import PassMemory, measure_pass
from learner.memory.optimizer_state import MASTER_BYTES, state_bytes
from learner.models import token_scores
from learner.models.frozen import freeze
from learner.models.lora import add_adapters
from learner.models.policy import layout_of

PROCESS_BYTES = {"cpu": 0, "cuda": 3 * 2**29}
"""Memory of a process with a GPU before it holds a tensor: the CUDA context and NCCL's buffers. An estimate, on a GPU
it was never measured; on a CPU only tensors are counted."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The bytes that one learner rank needs."""

    parts: dict[str, int]
    """The bytes on the rank's device by what they are for; not all of them are there at the same time."""
    host: dict[str, int]
    """The bytes in CPU memory that learner.offload, reference.offload and checkpoints take, by what they are for."""
    peaks: dict[str, int]
    """The bytes on the device at each moment that may be the fullest."""

    @property
    def peak(self) -> int:
        """The most bytes on the device at a time."""
        return max(self.peaks.values())


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
    lm = load_without_weights(key, path, "eager" if config.model.attn_implementation == "eager" else "sdpa")
    base = sum(parameter.numel() for parameter in lm.parameters())
    if role == "policy" and config.model.lora.rank:
        add_adapters(lm, config.model.lora)
    if role == "policy" and config.model.frozen:
        freeze(lm, config.model.frozen)
    shapes = [p.shape for p in lm.parameters() if p.requires_grad] if role in ("policy", "critic") else []
    sizes = {id(parameter): parameter.numel() for parameter in lm.parameters()}
    names = set(lm._no_split_modules or ())
    blocks = [module for module in lm.modules() if type(module).__name__ in names]
    in_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    head = lm.get_output_embeddings() if role in ("policy", "reference") else None
    return NetworkSizes(
        role=role, config=lm.config, parameters=sum(sizes.values()), base=base,
        trained=sum(shape.numel() for shape in shapes), state=state_bytes(config.learner, shapes),
        rest=sum(sizes.values()) - sum(in_blocks), block=max(in_blocks, default=0), largest=max(sizes.values()),
        head=head.weight.numel() if head is not None else 0,
    )


class RankMemoryEstimate:
    """Estimates the memory of a learner rank of a configuration, whose models are looked at once.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(self, config: Config, device_type: str) -> None:
        self._config = config
        self._device_type = device_type
        self.dtype = serving_dtype(config, device_type)
        self.networks = networks_of(config)
        self._trains_critic_first = Objective(config).trains_critic_first
        self._passes: dict[tuple[str, bool], PassMemory] = {}

    def measure(self, network: NetworkSizes, checkpoints: bool) -> PassMemory:
        """Return the memory of the longest row, or of this rank's slice of it, in a pass of the network.

        Raises:
            NotImplementedError: it can't be measured without data.
        """
        key = (network.role, checkpoints)
        if key not in self._passes:
            shares_rows = layout_of([SimpleNamespace(config=network.config)]).masked
            has_mask = self._config.model.attn_implementation in ("sdpa", "eager")
            self._passes[key] = measure_pass(
                network.config, self._config.longest_tokens, self.dtype, checkpoints=checkpoints,
                masked=shares_rows and has_mask and self._config.rollout.group_size > 1, slices=self._slices,
            )
        return self._passes[key]

    def rank_memory(
        self, *, checkpoints: bool, max_tokens: int | None = None, offload: str | None = None, ranks: int | None = None
    ) -> RankMemory:
        """Return the memory of a rank, with other settings than those of the configuration where they are given.

        Raises:
            NotImplementedError: a pass can't be measured without data.
        """
        config = self._config
        ranks = ranks or config.placement.learner.ranks
        split = self._split(ranks)
        offload = offload or config.learner.offload
        tokens = (max_tokens or config.learner.max_tokens_per_microbatch) * self._slices
        in_step = config.learner.prompts_per_step * config.max_rows_per_group
        of_rank = -(-in_step // (config.algorithm.minibatches * (ranks // self._slices)))
        rows = min(of_rank, max(1, tokens // config.longest_tokens))
        trained = [network for network in self.networks if network.trained]
        parts: dict[str, int] = {}
        host: dict[str, int] = {}
        for network in self.networks:
            for name, num_bytes, is_offloaded in self._held(network, split, offload):
                where = host if is_offloaded and self._device_type != "cpu" else parts
                where[f"{network.role}: {name}"] = num_bytes
        held = sum(parts.values())
        gradients = sum(num_bytes for name, num_bytes in parts.items() if name.endswith("gradients"))
        passes = {network.role: self.measure(network, checkpoints) for network in trained}
        for network in trained:
            parts[f"{network.role}: activations"] = round(rows * passes[network.role].kept)
            parts[f"{network.role}: gathered"] = self._gathered(network, split)
        kept = {role: rows * memory.kept for role, memory in passes.items()}
        gathered = sum(self._gathered(network, split) for network in trained)
        fixed = held + gathered + PROCESS_BYTES[self._device_type]
        earlier = gradients if of_rank > rows else 0  # with a single micro-batch there are none yet
        loss, embedding = 0.0, 0.0
        for network in trained:  # the critic goes first
            together = network.role == "critic" and not self._trains_critic_first
            alive = sum(kept.values()) if together else kept[network.role]
            scores = self._scores(network, rows * config.longest_tokens // self._slices)
            parts[f"{network.role}: logits and head"] = scores
            block = rows * (passes[network.role].peak - passes[network.role].kept)
            block += self._unsharded(network.block, split)
            there = earlier or (parts.get("critic: gradients", 0) if network.role == "policy" else 0)
            loss = max(loss, fixed - gradients + there + alive + max(scores, block))
            others = sum(kept.values()) - kept[network.role] if together else 0.0
            embedding = max(embedding, fixed + others + self._unsharded(network.rest // self._slices, split))
        buffers = self._push(split)
        parts["push buffers"] = buffers
        push = held - gradients + buffers + PROCESS_BYTES[self._device_type]
        if self._device_type == "cpu":  # there they are kept from push to push
            loss, embedding = loss + self._buckets(), embedding + self._buckets()
        parts["process"] = PROCESS_BYTES[self._device_type]
        copies = sum(
            (MASTER_BYTES * network.trained + network.state + self._average_bytes(network)) // split
            for network in trained
        )
        host["checkpoint being written"] = copies
        peaks = {"loss": round(loss), "embedding": round(embedding), "push": push}
        return RankMemory(parts=parts, host=host, peaks=peaks)

    def _split(self, ranks: int) -> int:
        """Return over how many ranks weights are split."""
        learner = self._config.placement.learner
        return ranks if self._config.learner.sharding == "full" else max(1, ranks // learner.nodes)

    def _held(self, network: NetworkSizes, split: int, offload: str) -> Iterator[tuple[str, int, bool]]:
        """Yield (name, bytes, whether it is offloaded) of what a rank holds of a network over the whole step."""
        if not network.trained:
            offloads = network.role == "reference" and self._config.reference.offload
            yield "weights", self.dtype.itemsize * network.parameters // split, offloads
            return
        yield "weights", MASTER_BYTES * network.parameters // split, offload == "all"
        yield "gradients", MASTER_BYTES * network.trained // split, offload == "all"
        yield "optimizer state", network.state // split, offload in ("moments", "all")
        if average_bytes := self._average_bytes(network):
            yield "average", average_bytes // split, offload == "all"

    def _average_bytes(self, network: NetworkSizes) -> int:
        """Return the bytes of the moving average of a network's weights (learner.ema_decay)."""
        has_average = network.role == "policy" and self._config.learner.ema_decay
        return MASTER_BYTES * network.trained if has_average else 0

    def _gathered(self, network: NetworkSizes, split: int) -> int:
        """Return the bytes of weights in the compute type: those of no block stay gathered, and a block or three."""
        blocks = 1 if split == 1 else 3  # the one that computes, and the next one, flat and taken apart
        return self.dtype.itemsize * (network.rest // self._slices + blocks * network.block)

    def _unsharded(self, parameters: int, split: int) -> int:
        """Return the bytes of gradients before they are split: in the compute type, and as float32 to be summed."""
        copies = MASTER_BYTES if split > 1 or self.dtype.itemsize != MASTER_BYTES else 0
        return parameters * (self.dtype.itemsize + copies) if self._trains_all else 0

    @property
    def _slices(self) -> int:
        """Over how many ranks a row, the output head and the embeddings are split."""
        return self._config.learner.sequence_parallel

    @property
    def _trains_all(self) -> bool:
        return not self._config.model.lora.rank

    def _scores(self, network: NetworkSizes, tokens: int) -> int:
        """Return the bytes of logits and of the head's gradient; see token_scores.py and split_vocabulary.py.

        Args:
            tokens: those of the rank's slices of rows.
        """
        if not network.head:
            return 0
        limit = token_scores.LOGITS_BYTES[self._device_type]
        wanted, narrow = 4 * tokens * -(-network.config.vocab_size // self._slices), self.dtype.itemsize < MASTER_BYTES
        logits = min(wanted, limit)
        is_summed = self._slices > 1 or (narrow and wanted > limit)
        head = network.head // self._slices * (MASTER_BYTES + self.dtype.itemsize if is_summed else self.dtype.itemsize)
        return round(logits * (1.5 if narrow else 1.3)) + head * self._trains_all

    def _buckets(self) -> int:
        """Return the bytes of the buckets in which weights are pushed: two, or one that holds them all."""
        policy, bucket_bytes = self.networks[0], self._config.weight_sync.bucket_bytes
        model_bytes = self.dtype.itemsize * policy.parameters
        most = max(bucket_bytes, self.dtype.itemsize * policy.largest) * (1 if model_bytes <= bucket_bytes else 2)
        return min(model_bytes, most) if self._device_type == "cpu" else most  # on a CPU what is not used is not there

    def _push(self, split: int) -> int:
        """Return the bytes of the buckets and of the largest weight, which is converted and gathered.

        Where it may have an adapter, it is gathered in float32, summed up with it, and then converted.
        """
        is_converted = self.dtype.itemsize != MASTER_BYTES
        each = self.dtype.itemsize if is_converted or split > 1 else 0
        if not self._trains_all:
            each = MASTER_BYTES * (1 + (split > 1)) + self.dtype.itemsize * is_converted
        return self._buckets() + self.networks[0].largest * each
