"""Memory of a learner rank, by use and by moment, computed before anything is loaded.

The peak is the fullest moment of a step: a weight push, or one of these moments in a network's backward pass.

    logits       the output head: all activations, logits, and the gradient of the head
    last block   the first block of the backward pass: all activations, and what the pass of one block makes
    first block  the last block of the backward pass: the activations of one block, and the gradients of all others
    embedding    the gradients of embeddings and other weights outside blocks, until they are split over the ranks

FSDP2 shards each block by itself and all the rest, the root, together: the root stays gathered during the whole pass,
and its gradients are split at the end. With learner.sequence_parallel, embeddings and head are units of their own: each
is gathered only while it computes, and the head's gradient is split before those of the blocks are computed, unless
both are the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from async_rl.base.config import Config
from async_rl.base.weights.transport import serving_dtype
from learner.algorithms.objective import Objective
from learner.memory.sizes import MASTER_BYTES, NetworkSizes, networks_of, surely_fits
from learner.models import token_scores
from learner.models.policy import layout_of

if TYPE_CHECKING:
    from learner.memory.passes import PassMemory

PROCESS_BYTES = {"cpu": 0, "cuda": 3 * 2**29}
"""[device] memory of a process before it has a tensor: the CUDA context and NCCL's buffers, 1.3 GiB on an H100. On a
CPU only tensors are counted."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that one learner rank needs, in bytes."""

    parts: dict[str, int]  # [use] on the rank's device, not all at the same time
    host: dict[str, int]  # [use] in CPU memory: what is offloaded, and checkpoints
    peaks: dict[str, int]  # [moment] on the device

    @property
    def peak(self) -> int:
        """The most bytes on the device at a time."""
        return max(self.peaks.values())


class RankMemoryEstimate:
    """Estimates the memory of a learner rank. The headers of the models' files are read once, in the constructor.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(self, config: Config, device_type: str) -> None:
        learner = config.placement.learner
        self._config, self._process = config, PROCESS_BYTES[device_type]
        self.networks = networks_of(config)
        self.device_type, self.dtype = device_type, serving_dtype(config, device_type)
        # The number of ranks that a row, the output head and the embeddings are split over, and that of the weights.
        self.slices = config.learner.sequence_parallel
        self.split = learner.ranks if config.learner.sharding == "full" else max(1, learner.ranks // learner.nodes)

    def measure(self, network: NetworkSizes, checkpoints: bool) -> PassMemory:
        """Return the memory that the longest row takes on this rank in a pass of the network.

        Raises:
            NotImplementedError: the pass can't be measured without data.
        """
        from learner.memory.passes import measure_pass

        config = self._config
        shares_rows = layout_of([SimpleNamespace(config=network.config)]).masked and config.rollout.group_size > 1
        return measure_pass(
            network.config, config.longest_tokens, self.dtype, checkpoints=checkpoints, slices=self.slices,
            masked=shares_rows and config.model.attn_implementation in ("sdpa", "eager"),
        )

    def fits_plain(self, room: int) -> bool:
        """Return whether a rank with `room` bytes trains without gradient checkpointing; False if it can't be computed.
        """
        try:
            return surely_fits(self._config, room) or self.rank_memory(checkpoints=False).peak <= room
        except NotImplementedError:
            return False

    def rank_memory(self, *, checkpoints: bool, max_tokens: int = 0) -> RankMemory:
        """Return the memory of a rank, with or without gradient checkpointing (`checkpoints`).

        Args:
            max_tokens: replaces learner.max_tokens_per_microbatch, unless it is 0.

        Raises:
            NotImplementedError: a pass can't be measured without data.
        """
        config, learner, longest = self._config, self._config.learner, self._config.longest_tokens
        tokens = (max_tokens or learner.max_tokens_per_microbatch) * self.slices
        in_step = learner.prompts_per_step * config.max_rows_per_group
        of_rank = -(-in_step // (config.algorithm.num_minibatches * (config.placement.learner.ranks // self.slices)))
        rows = min(of_rank, max(1, tokens // longest))
        parts: dict[str, int] = {}
        host: dict[str, int] = {}
        for name, num_bytes, is_offloaded in self._held():
            (host if is_offloaded and self.device_type != "cpu" else parts)[name] = num_bytes
        passes = [
            BackwardPass(
                self, network, self.measure(network, checkpoints), rows=rows, tokens=rows * longest // self.slices,
                is_first=of_rank <= rows, keeps_gradients=f"{network.role}: gradients" in parts,
            )
            for network in self.networks if network.trains.all
        ]  # fmt: skip
        peaks = self._peaks(passes, parts)
        for each in passes:
            role = each.network.role
            parts[f"{role}: activations"], parts[f"{role}: gathered"] = round(each.kept), each.gathered
            parts[f"{role}: logits and head"] = each.scores
        parts |= {"push buffers": self._push(), "process": self._process}
        host["checkpoint being written"] = sum(each.network.saved // self.split for each in passes)
        return RankMemory(parts, host, peaks)

    def kept(self) -> int:
        """Return the bytes that a rank has on its device between its steps."""
        held = sum(size for name, size, is_offloaded in self._held() if not (is_offloaded or "gradients" in name))
        return held + self._process

    def _peaks(self, passes: list[BackwardPass], held: dict[str, int]) -> dict[str, int]:
        """Return [moment] bytes on the device.

        Args:
            passes: the backward pass of each trained network, the policy's first.
            held: [use] bytes on the device during a whole step.
        """
        gradients = {name.partition(":")[0]: size for name, size in held.items() if name.endswith("gradients")}
        fixed = sum(held.values()) - sum(gradients.values()) + self._process
        peaks = {"push": float(fixed + self._push())}
        if self.device_type == "cpu":  # there buckets are kept from push to push
            fixed += self._buckets()
        objective, policy = Objective(self._config), passes[0]
        critic_waits = not objective.trains_critic_first  # the policy's forward pass comes before its backward pass
        for each in passes:
            there = float(fixed)
            if each is policy:  # the critic's pass is over
                there += gradients.get("critic", 0)
            else:
                there += 0 if each.is_first else gradients.get("policy", 0)
                there += policy.kept if critic_waits else 0
                there += policy.root if critic_waits or objective.computes_proximal else 0  # a pass has gathered it
            for name, size in each.moments.items():
                peaks[name] = max(peaks.get(name, 0.0), there + size)
        return {name: round(size) for name, size in peaks.items()}

    def _held(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (use, bytes, whether it is offloaded) of everything that a rank keeps in memory during a whole step."""
        split, offload = self.split, self._config.learner.offload
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
        """Return the bytes of the buckets in which weights are pushed: two, or one if the whole model fits into it."""
        policy, bucket_bytes = self.networks[0], self._config.weight_sync.bucket_bytes
        model_bytes = self.dtype.itemsize * policy.has.all
        most = max(bucket_bytes, self.dtype.itemsize * policy.largest) * (1 if model_bytes <= bucket_bytes else 2)
        return min(model_bytes, most) if self.device_type == "cpu" else most  # on a CPU what is not used is not there

    def _push(self) -> int:
        """Return the bytes that only a push needs: the buckets, and the largest weight, gathered and converted."""
        is_converted = self.dtype.itemsize != MASTER_BYTES
        each = self.dtype.itemsize if is_converted or self.split > 1 else 0
        if self._config.model.lora.rank:  # gathered in float32, merged with its adapter, and then converted
            each = MASTER_BYTES * (1 + (self.split > 1)) + self.dtype.itemsize * is_converted
        return self._buckets() + self.networks[0].largest * each


class BackwardPass:
    """Bytes of one network's backward pass over a micro-batch on one rank, without stored weights and optimizer state.

    Args:
        row: the memory of one row in a pass.
        rows: rows of full length in the micro-batch.
        tokens: tokens of these rows that this rank has.
        is_first: there are no gradients of earlier micro-batches.
        keeps_gradients: gradients stay on the device once they are split; with learner.offload all they don't.
    """

    def __init__(
        self, rank: RankMemoryEstimate, network: NetworkSizes, row: PassMemory, *, rows: int, tokens: int,
        is_first: bool, keeps_gradients: bool,
    ) -> None:  # fmt: skip
        itemsize, split, slices = rank.dtype.itemsize, rank.split, rank.slices
        has, trains, is_tied = network.has, network.trains, network.is_tied
        # Gathered blocks: the one that computes, and the next one, flat and taken apart.
        blocks = itemsize * has.block * (1 if split == 1 else 3)
        waits = slices == 1 or is_tied  # the head stays gathered, and its gradient whole, during the whole pass

        def splitting(numbers: int) -> int:
            """Return the bytes of gradients while they are split over ranks: copied to float32, then added in parts."""
            return max(itemsize * numbers + MASTER_BYTES * numbers, MASTER_BYTES * (numbers + numbers // split))

        if slices == 1:  # weights outside the blocks, gathered; numbers of embeddings, and what is made for them
            at_logits = between = at_embedding = itemsize * has.rest
            numbers = trains.rest
            made = itemsize * (numbers + trains.embeddings * is_tied)  # and those of the head
        else:
            root = has.rest - has.embeddings - (0 if is_tied else has.head)
            between = itemsize * (root + is_tied * (has.embeddings // slices))
            at_logits = between if is_tied else itemsize * (root + has.head // slices)
            at_embedding = itemsize * (root + has.embeddings // slices)
            numbers = trains.embeddings // slices
            made = (MASTER_BYTES + itemsize + itemsize * is_tied) * numbers
        of_block = rows * (row.peak - row.kept) + splitting(trains.block)
        of_block += itemsize * trains.head // slices if waits else 0
        self.network, self.is_first = network, is_first
        self.kept = kept = rows * row.kept  # by the forward pass for the backward pass
        self.scores = scores = _score_bytes(network, tokens, rank.device_type, itemsize, slices)
        self.root = between if waits else 0  # weights that a forward pass leaves gathered
        self.gathered = blocks + max(at_logits, between, at_embedding)  # the most weights gathered at a time
        before = 0 if waits else trains.head
        after = before + trains.all - trains.rest
        moments = {  # bytes that only the pass makes, and numbers of the gradients that are split already
            "logits": (kept + scores + at_logits, 0),
            "last block": (kept + of_block + between, before),
            "first block": (kept / max(1, network.layers) + of_block + between, after),
            "embedding": (max(made + at_embedding, splitting(numbers)), after),
        }
        self.moments = {  # bytes at each moment that may be the fullest
            name: size + blocks + MASTER_BYTES * keeps_gradients * (done if is_first else trains.all) // split
            for name, (size, done) in moments.items()
        }


def _score_bytes(network: NetworkSizes, tokens: int, device_type: str, itemsize: int, slices: int) -> int:
    """Return the bytes of logits and of the head's gradient; see token_scores.py and split_vocabulary.py.

    The gradient of a chunk may be added to a sum. It is made when the logits are gone except for their gradient, in the
    compute type.
    """
    if not network.has.head:
        return 0
    limit, is_narrow = token_scores.LOGITS_BYTES[device_type], itemsize < MASTER_BYTES
    wanted = 4 * tokens * -(-network.config.vocab_size // slices)
    logits, head = min(wanted, limit), network.trains.head // slices
    is_added = slices > 1 or (is_narrow and wanted > limit)
    made = max(round(logits * (1.5 if is_narrow else 1.3)), logits * itemsize // 4 + head * itemsize * is_added)
    return head * (MASTER_BYTES if is_added else itemsize) + made
