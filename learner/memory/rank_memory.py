"""Computes how much memory a learner rank needs, by what it is for, before anything is loaded.

Sizes of weights are those of the model folders. The memory of forward and backward passes is measured with tensors
without data, see activations.py. The peak is that of the fullest moment of a step: one of a network's backward pass,
see moments.py, beside weights, optimizer state, gradients of earlier micro-batches and what other networks have there;
or the push: weights, optimizer state, two buckets and the largest weight, gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from async_rl.config import Config
from async_rl.weights.base import serving_dtype
from learner.algorithms.objective import Objective
from learner.memory.activations import PassMemory, measure_pass
from learner.memory.moments import Moments
from learner.memory.network_sizes import NetworkSizes, networks_of
from learner.memory.optimizer_state import MASTER_BYTES
from learner.models.policy import layout_of

PROCESS_BYTES = {"cpu": 0, "cuda": 3 * 2**29}
"""Memory of a process with a GPU before it holds a tensor: the CUDA context and NCCL's buffers. An estimate, on a GPU
it was never measured; on a CPU only tensors are counted."""


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
        objective = Objective(config)
        self._critic_waits = not objective.trains_critic_first
        """Whether the policy's forward pass comes before the critic's backward pass."""
        self._scores_first = objective.computes_proximal
        """Whether the policy has made a pass without gradient at the start of the step, which leaves it gathered."""
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
        moments = [
            Moments(
                network=network, passes=self.measure(network, checkpoints), rows=rows, split=split,
                tokens=rows * config.longest_tokens // self._slices, device_type=self._device_type,
                itemsize=self.dtype.itemsize, slices=self._slices, is_first=of_rank <= rows,
                keeps_gradients=f"{network.role}: gradients" in parts,
            )
            for network in trained
        ]  # fmt: skip
        peaks = self._peaks(moments, parts, split)
        for found in moments:
            parts[f"{found.network.role}: activations"] = round(found.kept)
            parts[f"{found.network.role}: gathered"] = found.gathered
            parts[f"{found.network.role}: logits and head"] = found.scores
        parts["push buffers"] = self._push(split)
        parts["process"] = PROCESS_BYTES[self._device_type]
        host["checkpoint being written"] = sum(
            (MASTER_BYTES * network.trained + network.state + self._average_bytes(network)) // split
            for network in trained
        )
        return RankMemory(parts=parts, host=host, peaks=peaks)

    def kept(self, offload: str) -> int:
        """Return the bytes that a rank has on its device between its steps, with this value of learner.offload."""
        split = self._split(self._config.placement.learner.ranks)
        held = [part for network in self.networks for part in self._held(network, split, offload)]
        kept = sum(size for name, size, is_offloaded in held if name != "gradients" and not is_offloaded)
        return kept + PROCESS_BYTES[self._device_type]

    def _peaks(self, moments: list[Moments], held: dict[str, int], split: int) -> dict[str, int]:
        """Return the bytes on the device at each moment that may be the fullest.

        Args:
            held: the bytes by what they are for, of what is held over the whole step, and of gradients.
        """
        gradients = {name.partition(":")[0]: size for name, size in held.items() if name.endswith("gradients")}
        fixed = sum(held.values()) - sum(gradients.values()) + PROCESS_BYTES[self._device_type]
        peaks = {"push": float(fixed + self._push(split))}
        if self._device_type == "cpu":  # there buckets are kept from push to push
            fixed += self._buckets()
        policy = moments[0]
        for found in moments:
            there = float(fixed)
            if found is policy:  # the critic's pass is over
                there += gradients.get("critic", 0)
            else:
                there += 0 if found.is_first else gradients.get("policy", 0)
                there += policy.kept if self._critic_waits else 0
                there += policy.root if self._critic_waits or self._scores_first else 0
            for name, size in found.at_each().items():
                peaks[name] = max(peaks.get(name, 0.0), there + size)
        return {name: round(size) for name, size in peaks.items()}

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

    @property
    def _slices(self) -> int:
        """Over how many ranks a row, the output head and the embeddings are split."""
        return self._config.learner.sequence_parallel

    @property
    def _trains_all(self) -> bool:
        return not self._config.model.lora.rank

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
