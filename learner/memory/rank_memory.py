"""Computes how much memory a learner rank needs, for each use, before anything is loaded.

The peak is the fullest moment of a step: one of a network's backward pass (moments.py), with weights, optimizer state,
gradients of earlier micro-batches and what other networks have there; or the push: weights, optimizer state, two
buckets and the largest weight, gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from async_rl.base.config import Config
from async_rl.base.weights.transport import serving_dtype
from learner.algorithms.objective import Objective
from learner.memory.moments import Moments
from learner.memory.networks import NetworkSizes, networks_of
from learner.memory.optimizer_state import MASTER_BYTES
from learner.memory.passes import PassMemory, measure_pass
from learner.models.policy import layout_of

PROCESS_BYTES = {"cpu": 0, "cuda": 3 * 2**29}
"""Memory of a process with a GPU before it holds a tensor: the CUDA context and NCCL's buffers, 1.3 GiB on an H100; on
a CPU only tensors are counted."""


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
    """Estimates the memory of a learner rank. The models' headers are read once.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(self, config: Config, device_type: str) -> None:
        self._config = config
        self._device_type = device_type
        self._slices, learner = config.learner.sequence_parallel, config.placement.learner
        self._split = learner.ranks if config.learner.sharding == "full" else max(1, learner.ranks // learner.nodes)
        """The number of ranks that weights are split over."""
        self.dtype = serving_dtype(config, device_type)
        self.networks = networks_of(config)
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

    def fits_plain(self, room: int) -> bool:
        """Return whether a rank with `room` bytes trains without checkpointing; False where that can't be computed."""
        try:
            return self.is_surely_small(room) or self.rank_memory(checkpoints=False).peak <= room
        except NotImplementedError:
            return False

    def is_surely_small(self, room: int) -> bool:
        """Return whether half of `room` is enough at the very most: measuring a pass would take seconds."""
        learner, longest, total = self._config.learner, self._config.longest_tokens, 0
        for network in self.networks:
            model = network.config.get_text_config()
            # for each token a layer makes about as many numbers as it has weights for each of its inputs
            numbers = 4 * network.has.all // model.hidden_size
            is_eager = self._config.model.attn_implementation == "eager"
            pairs = longest * (3 * model.num_hidden_layers * model.num_attention_heads if is_eager else 4)
            total += 2 * MASTER_BYTES * network.has.all + network.state + network.average
            total += MASTER_BYTES * learner.max_tokens_per_forward * (numbers + pairs)
        return 2 * total < room

    def rank_memory(self, *, checkpoints: bool, max_tokens: int = 0) -> RankMemory:
        """Return the memory of a rank; `max_tokens` takes the place of learner.max_tokens_per_microbatch, if given.

        Raises:
            NotImplementedError: a pass can't be measured without data.
        """
        config, learner, longest = self._config, self._config.learner, self._config.longest_tokens
        tokens = (max_tokens or learner.max_tokens_per_microbatch) * self._slices
        in_step = learner.prompts_per_step * config.max_rows_per_group
        of_rank = -(-in_step // (config.algorithm.num_minibatches * (config.placement.learner.ranks // self._slices)))
        rows = min(of_rank, max(1, tokens // longest))
        parts: dict[str, int] = {}
        host: dict[str, int] = {}
        for name, num_bytes, is_offloaded in self._held():
            (host if is_offloaded and self._device_type != "cpu" else parts)[name] = num_bytes
        moments = [
            Moments(
                network=network, passes=self.measure(network, checkpoints), rows=rows, split=self._split,
                tokens=rows * longest // self._slices, device_type=self._device_type, itemsize=self.dtype.itemsize,
                slices=self._slices, is_first=of_rank <= rows, keeps_gradients=f"{network.role}: gradients" in parts,
            )
            for network in self.networks if network.trains.all
        ]  # fmt: skip
        peaks = self._peaks(moments, parts)
        for found in moments:
            parts[f"{found.network.role}: activations"] = round(found.kept)
            parts[f"{found.network.role}: gathered"] = found.gathered
            parts[f"{found.network.role}: logits and head"] = found.scores
        parts["push buffers"] = self._push()
        parts["process"] = PROCESS_BYTES[self._device_type]
        host["checkpoint being written"] = sum(found.network.saved // self._split for found in moments)
        return RankMemory(parts=parts, host=host, peaks=peaks)

    def kept(self) -> int:
        """Return the bytes that a rank has on its device between its steps."""
        held = sum(size for name, size, is_offloaded in self._held() if not (is_offloaded or "gradients" in name))
        return held + PROCESS_BYTES[self._device_type]

    def _peaks(self, moments: list[Moments], held: dict[str, int]) -> dict[str, int]:
        """Return the bytes on the device at each moment that may be the fullest.

        Args:
            held: what is held over the whole step, and gradients, in bytes.
        """
        gradients = {name.partition(":")[0]: size for name, size in held.items() if name.endswith("gradients")}
        fixed = sum(held.values()) - sum(gradients.values()) + PROCESS_BYTES[self._device_type]
        peaks = {"push": float(fixed + self._push())}
        if self._device_type == "cpu":  # there buckets are kept from push to push
            fixed += self._buckets()
        objective, policy = Objective(self._config), moments[0]
        critic_waits = not objective.trains_critic_first  # the policy's forward pass comes before its backward pass
        for found in moments:
            there = float(fixed)
            if found is policy:  # the critic's pass is over
                there += gradients.get("critic", 0)
            else:
                there += 0 if found.is_first else gradients.get("policy", 0)
                there += policy.kept if critic_waits else 0
                there += policy.root if critic_waits or objective.computes_proximal else 0  # a pass has gathered it
            for name, size in found.at_each().items():
                peaks[name] = max(peaks.get(name, 0.0), there + size)
        return {name: round(size) for name, size in peaks.items()}

    def _held(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (name, bytes, whether it is offloaded) of what a rank holds over the whole step."""
        split, offload = self._split, self._config.learner.offload
        for network in self.networks:
            role, trained = network.role, MASTER_BYTES * network.trains.all // split
            if not trained:
                offloads = role == "reference" and self._config.reference.offload
                yield f"{role}: weights", self.dtype.itemsize * network.has.all // split, offloads
                continue
            yield f"{role}: weights", MASTER_BYTES * network.has.all // split, offload == "all"
            yield f"{role}: gradients", trained, offload == "all"
            yield f"{role}: optimizer state", network.state // split, offload in ("moments", "all")
            if network.average:
                yield f"{role}: average", network.average // split, offload == "all"

    def _buckets(self) -> int:
        """Return the bytes of the buckets that weights are pushed in: two, or one that holds them all."""
        policy, bucket_bytes = self.networks[0], self._config.weight_sync.bucket_bytes
        model_bytes = self.dtype.itemsize * policy.has.all
        most = max(bucket_bytes, self.dtype.itemsize * policy.largest) * (1 if model_bytes <= bucket_bytes else 2)
        return min(model_bytes, most) if self._device_type == "cpu" else most  # on a CPU what is not used is not there

    def _push(self) -> int:
        """Return the bytes of the buckets and of the largest weight, which is converted and gathered.

        A weight that may have an adapter is gathered in float32, summed up with it, and then converted.
        """
        is_converted = self.dtype.itemsize != MASTER_BYTES
        each = self.dtype.itemsize if is_converted or self._split > 1 else 0
        if self._config.model.lora.rank:
            each = MASTER_BYTES * (1 + (self._split > 1)) + self.dtype.itemsize * is_converted
        return self._buckets() + self.networks[0].largest * each
