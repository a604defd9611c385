"""Plans the memory of learner ranks and servers before a run starts: does it fit, a table, and advice if it doesn't.

The peak of a rank is the fullest moment of a step: a weight push, or one of these moments in a network's backward pass.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.weights.transport import serving_dtype
from learner.algorithms.objective import Objective
from learner.memory.sizes import GIB, IN_TURNS_BYTES, MASTER_BYTES, NetworkSizes, batch_bytes, networks_of, surely_fits
from learner.models import token_scores
from learner.models.policy import layout_of

if TYPE_CHECKING:
    from learner.memory.passes import PassMemory

CONTEXT_BYTES = {"cpu": 0, "cuda": 3 * 2**29}
"""[device] memory of a rank before it has a tensor: the CUDA context and NCCL's buffers, 1.3 GiB on an H100. On a CPU
only tensors are counted."""
PROCESS_BYTES = GIB // 2
"""CPU memory of a process without weights: the interpreter and its libraries."""
GRAPHS_BYTES = 2 * GIB
"""GPU memory of a server outside its share: CUDA context and graphs. An estimate."""


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
    """Estimates the memory of a learner rank. The headers of the models' files are read once, in the constructor."""

    def __init__(self, config: Config, device_type: str) -> None:
        learner = config.placement.learner
        self._config, self.device_type, self.dtype = config, device_type, serving_dtype(config, device_type)
        self.networks = networks_of(config)
        # The number of ranks that a row, the output head and the embeddings are split over, and that of the weights.
        self.slices = config.learner.sequence_parallel
        self.split = learner.ranks if config.learner.sharding == "full" else max(1, learner.ranks // learner.nodes)

    def fits_plain(self, room: int) -> bool:
        """Return whether `room` bytes are enough without gradient checkpointing; False if that can't be computed."""
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
        from learner.memory.passes import measure_pass

        config, longest, held = self._config, self._config.longest_tokens, list(self._held())
        parts = {use: size for use, size, is_on_host in held if not is_on_host}
        host = {use: size for use, size, is_on_host in held if is_on_host}
        host["checkpoint being written"] = sum(network.saved // self.split for network in self.networks)
        shares = config.algorithm.num_minibatches * config.batch_shares
        of_rank = -(-config.learner.prompts_per_step * config.max_rows_per_group // shares)
        tokens = max_tokens * self.slices or config.learner.max_tokens_per_forward
        rows = min(of_rank, max(1, tokens // longest))
        is_first = of_rank <= rows  # there are no gradients of earlier micro-batches
        may_mask = config.rollout.group_size > 1 and config.model.attn_implementation in ("sdpa", "eager")
        fixed, buckets, gathered = float(self.kept()), *self._push()
        peaks = {"push": fixed + buckets + gathered}
        fixed += buckets * (self.device_type == "cpu")  # there they are kept from push to push
        objective = Objective(config)
        critic_waits = not objective.trains_critic_first  # the policy's forward pass comes before its backward pass
        for network in [each for each in self.networks if each.trains.all]:
            role, masked = network.role, may_mask and layout_of([SimpleNamespace(config=network.config)]).masked
            row = measure_pass(
                network.config, longest, self.dtype, checkpoints=checkpoints, masked=masked, slices=self.slices
            )
            found = BackwardPass(
                self, network, row, rows=rows, tokens=rows * longest // self.slices, is_first=is_first,
                keeps_gradients=f"{role}: gradients" in parts,
            )  # fmt: skip
            if role == "policy":  # the critic's pass is over
                policy, there = found, fixed + parts.get("critic: gradients", 0)
            else:
                there = fixed + (0 if is_first else parts.get("policy: gradients", 0))
                there += policy.kept if critic_waits else 0
                there += policy.root if critic_waits or objective.computes_proximal else 0  # a pass has gathered it
            for moment, size in found.moments.items():
                peaks[moment] = max(peaks.get(moment, 0.0), there + size)
            parts[f"{role}: activations"], parts[f"{role}: gathered"] = round(found.kept), found.gathered
            parts[f"{role}: logits and head"] = found.scores
        parts |= {"push buffers": buckets + gathered, "process": CONTEXT_BYTES[self.device_type]}
        return RankMemory(parts, host, {moment: round(size) for moment, size in peaks.items()})

    def kept(self) -> int:
        """Return the bytes that a rank has on its device between its steps."""
        held = sum(size for use, size, is_on_host in self._held() if not (is_on_host or "gradients" in use))
        return held + CONTEXT_BYTES[self.device_type]

    def _held(self) -> Iterator[tuple[str, int, bool]]:
        """Yield (use, bytes, whether the host has it) of everything that a rank keeps in memory during a whole step."""
        offload, offloads_reference = self._config.learner.offload, self._config.reference.offload
        moves = self.device_type != "cpu"
        for network in self.networks:
            role, trained = network.role, network.trains.all
            moves_all = moves and (offload == "all" if trained else role == "reference" and offloads_reference)
            itemsize = MASTER_BYTES if trained else self.dtype.itemsize
            yield f"{role}: weights", itemsize * network.has.all // self.split, moves_all
            if trained:
                yield f"{role}: gradients", MASTER_BYTES * trained // self.split, moves_all
                yield f"{role}: optimizer state", network.state // self.split, moves and offload != "none"
            if network.average:
                yield f"{role}: average", network.average // self.split, moves_all

    def _push(self) -> tuple[int, int]:
        """Return the bytes of a push: its buckets, and the largest weight, gathered and converted.

        There are two buckets, or one if the whole model fits into it.
        """
        policy, bucket_bytes, itemsize = self.networks[0], self._config.weight_sync.bucket_bytes, self.dtype.itemsize
        model_bytes, is_converted = itemsize * policy.has.all, itemsize != MASTER_BYTES
        buckets = max(bucket_bytes, itemsize * policy.largest) * (1 if model_bytes <= bucket_bytes else 2)
        if self.device_type == "cpu":  # what is not used is not there
            buckets = min(model_bytes, buckets)
        each = itemsize if is_converted or self.split > 1 else 0
        if self._config.model.lora.rank:  # gathered in float32, merged with its adapter, and then converted
            each = MASTER_BYTES * (1 + (self.split > 1)) + itemsize * is_converted
        return buckets, policy.largest * each


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

        def splitting(numbers: int) -> int:
            """Return the bytes of gradients while they are split over ranks: copied to float32, then added in parts."""
            return max((itemsize + MASTER_BYTES) * numbers, MASTER_BYTES * (numbers + numbers // split))

        # Gathered weights: the block that computes and the next one, flat and taken apart; and those outside blocks.
        blocks = itemsize * has.block * (1 if split == 1 else 3)
        waits = slices == 1 or is_tied  # the head stays gathered, and its gradient whole, during the whole pass
        root = itemsize * (has.rest - has.embeddings - (0 if is_tied else has.head))
        embeddings, head = itemsize * (has.embeddings // slices), 0 if is_tied else itemsize * (has.head // slices)
        at_logits, at_embedding = root + head + embeddings * waits, root + embeddings + head * waits
        self.root = root + embeddings + head if waits else 0  # weights that a forward pass leaves gathered
        between = self.root or root
        self.gathered = blocks + max(at_logits, at_embedding)  # the most weights gathered at a time
        # Numbers of the last gradients, and what is made for them and, if tied, for those of the head.
        numbers = trains.rest if slices == 1 else trains.embeddings // slices
        made = itemsize * (numbers + trains.embeddings // slices * is_tied) + MASTER_BYTES * numbers * (slices > 1)
        of_block = rows * (row.peak - row.kept) + splitting(trains.block)
        of_block += itemsize * trains.head // slices if waits else 0
        self.kept = kept = rows * row.kept  # by the forward pass for the backward pass
        self.scores = _score_bytes(network, tokens, rank.device_type, itemsize, slices)
        before = 0 if waits else trains.head
        after = before + trains.all - trains.rest
        moments = {  # bytes that only the pass makes, and numbers of the gradients that are split already
            "logits": (kept + self.scores + at_logits, 0),
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


class MemoryPlan:
    """The memory that the processes of a run need and have. Models are measured without their weights.

    Args:
        rank_gpus: the share of a GPU of each learner rank. 0: all processes share one host without GPUs.
        total: the bytes of the smallest GPU, or of that host.
        kv_token_bytes: the function of rollout_server/engines/base.py.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(
        self, config: Config, rank_gpus: float, total: int, kv_token_bytes: Callable[[Any, str, int], int]
    ) -> None:
        placement, rollout, self.config, self.total = config.placement, config.rollout, config, total
        self.on_gpu = rank_gpus > 0
        self.estimate = RankMemoryEstimate(config, "cuda" if rank_gpus else "cpu")
        policy, dtype, tp = self.estimate.networks[0], self.estimate.dtype, placement.rollout.tp
        model = policy.config.get_text_config()
        # Bytes of a server on a device: weights, next ones as they arrive, a token's KV, and what is outside its share.
        self.weights = dtype.itemsize * policy.base // tp
        self.staged = self.weights if config.weight_sync.double_buffer == "device" else 0
        self.kv_token = kv_token_bytes(model, str(dtype).removeprefix("torch."), tp)
        self.extra = GRAPHS_BYTES + batch_bytes(config, model)
        # Tokens of all answers that may be in flight at a server.
        self.answer_tokens = config.max_running_replies * config.longest_tokens
        # Servers may use a share of the rank's GPU while it trains, or in turn with it.
        self.is_shared = 0 < rank_gpus < 1 and not rollout.server_url and not config.shares_gpus
        if self.on_gpu:
            per_gpu = placement.num_servers if self.is_shared and not placement.colocated else 1
            rank = total - IN_TURNS_BYTES if config.shares_gpus else total
            if self.is_shared:
                rank = round(total * (1 - rollout.gpu_memory_utilization)) - per_gpu * self.extra
            server = round(total * rollout.gpu_memory_utilization / per_gpu)
        else:
            servers = placement.eval.servers if rollout.server_url else placement.num_servers
            taken = servers * (self.weights + self.kv_token * self.answer_tokens + PROCESS_BYTES)
            rank = (total - taken) // placement.learner.ranks - PROCESS_BYTES
            server = total // max(1, servers)
        # Bytes that a learner rank may use, and a server for weights and KV cache.
        self.rank_room, self.server_room = max(0, rank), server
        asked = config.learner.gradient_checkpointing
        self.checkpoints = asked is True or (asked == "auto" and not self.estimate.fits_plain(self.rank_room))
        left = max(0, self.server_room - self.weights) // self.kv_token  # tokens that the KV cache has room for
        self.kv_tokens = left if self.on_gpu else min(left, self.answer_tokens)

    def rank_memory(self) -> RankMemory:
        """Return the memory of a learner rank as it is configured; NotImplementedError if it can't be computed."""
        return self.estimate.rank_memory(checkpoints=self.checkpoints)

    def check(self) -> list[str]:
        """Check that servers and learner ranks fit into memory: `check_servers` and `check_ranks`."""
        self.check_servers()
        return self.check_ranks()

    def check_ranks(self) -> list[str]:
        """Return warnings about full micro-batches that don't fit into the memory of a learner rank.

        Raises:
            ConfigError: even the smallest micro-batches don't.
        """
        try:
            if surely_fits(self.config, self.rank_room) or (needed := self.rank_memory().peak) <= self.rank_room:
                return []
        except NotImplementedError as error:
            return [f"the learner's memory is not checked: {error}"]
        of = f"{'a GPU' if self.on_gpu else 'this host'} with {_size(self.total)}"
        text = f"a learner rank needs {_size(needed)}, of {of} it has {_size(self.rank_room)}"
        offload = "learner.offload: moments or all, more learner ranks on GPUs of their own, or " if self.on_gpu else ""
        mend = f"{'a lower rollout.gpu_memory_utilization, ' if self.is_shared else ''}{offload}a smaller model"
        least = -(-self.config.longest_tokens // self.config.learner.sequence_parallel)
        if (fewest := self.estimate.rank_memory(checkpoints=True, max_tokens=least).peak) > self.rank_room:
            raise ConfigError(
                f"memory: {text}, and with checkpointing and the smallest micro-batches {_size(fewest)}. Set {mend}"
            )
        return [
            f"memory: if micro-batches are full, {text}. Set learner.gradient_checkpointing: auto, "
            f"learner.max_tokens_per_microbatch down to {least}, {mend}"
        ]

    def check_servers(self) -> None:
        """Raise ConfigError if a GPU has too little memory for a server's share, its weights and one answer."""
        if not self.on_gpu or self.config.rollout.server_url:
            return
        share, total = self.config.rollout.gpu_memory_utilization, _size(self.total)
        given = f"rollout.gpu_memory_utilization {share} gives a server {_size(self.server_room)} of a GPU with {total}"
        least = self.weights + self.config.longest_tokens * self.kv_token
        if self.server_room < least:
            raise ConfigError(
                f"{given}: too little for its weights and one answer, {_size(least)}. Raise it, or placement.rollout.tp"
            )
        kept = self.estimate.kept() if self.config.shares_gpus else 0
        for what, size, mend in (
            ("its next weights", self.staged, "weight_sync.double_buffer: host"),
            ("the learner", kept, "learner.offload: moments or all, or more learner ranks"),
        ):
            left = self.total - self.extra - size
            if size and left < self.server_room:
                raise ConfigError(
                    f"memory: {given}; next to it {_size(self.extra)} of activations and {what} ({_size(size)}) don't "
                    f"fit. Set rollout.gpu_memory_utilization to {max(0, int(100 * left / self.total)) / 100} or less, "
                    f"or {mend}"
                )

    def table(self) -> list[str]:
        """Return the lines of the table that `async-rl train --dry-run` prints: memory by rank and by server."""
        placement, rank = self.config.placement, f"each of {self.config.placement.learner.ranks} learner rank(s):"
        lines = [f"{'smallest GPU' if self.on_gpu else 'host'}: {_size(self.total)}"]
        try:
            memory = self.rank_memory()
            fullest = max(memory.peaks, key=memory.peaks.__getitem__)
            how = f"{fullest}, {'with' if self.checkpoints else 'without'} gradient checkpointing"
            lines.append(f"{rank} at most {_size(memory.peak)} at a time ({how}), has {_size(self.rank_room)}")
            uses = memory.parts | {f"{name} (host)": size for name, size in memory.host.items()}
            lines += [_line(name, size) for name, size in uses.items() if size]
        except NotImplementedError as error:
            lines.append(f"{rank} not computed: {error}")
        if self.config.rollout.server_url:
            return lines
        evaluating = f" and {placement.eval.servers} evaluation" if placement.eval.servers else ""
        lines += [f"each of {placement.rollout.servers} rollout{evaluating} server(s):", _line("weights", self.weights)]
        lines += [_line("staged weights", self.staged)] if self.staged else []
        if self.config.weight_sync.delta:  # the weights that a sparse push is made against
            pushed = self.estimate.networks[0].has.all * self.estimate.dtype.itemsize
            lines.append(_line("pushed weights (host)", pushed) + "  of each GPU's process, and once at learner rank 0")
        kv = _line("KV cache", self.kv_tokens * self.kv_token)
        return [*lines, f"{kv}  {self.kv_tokens} tokens; answers in flight have {self.answer_tokens}"]


def _line(name: str, num_bytes: int) -> str:
    return f"  {name:<32} {_size(num_bytes):>11}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
