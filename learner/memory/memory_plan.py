"""Plans the memory of learner ranks and servers before a run starts: does it fit, a table, and advice if it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from learner.memory.rank_memory import RankMemory, RankMemoryEstimate
from learner.memory.sizes import GIB, IN_TURNS_BYTES, PROCESS_BYTES, batch_bytes, surely_fits

GRAPHS_BYTES = 2 * GIB
"""GPU memory of a server outside its share: CUDA context and graphs. An estimate."""


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
        # Bytes of a server on one device: weights, one token in its KV cache, and what it takes outside its share.
        self.weights = dtype.itemsize * policy.base // tp
        self.kv_token = kv_token_bytes(model, str(dtype).removeprefix("torch."), tp)
        self.extra = GRAPHS_BYTES + batch_bytes(config, model)
        # Tokens of all answers that may be in flight at a server.
        self.answer_tokens = config.max_running_replies * config.longest_tokens
        # Servers may use a share of the rank's GPU while it trains, or in turn with it.
        is_shared = 0 < rank_gpus < 1 and not rollout.server_url
        self.is_shared = is_shared and not config.shares_gpus
        if self.on_gpu:
            per_gpu = 1 if placement.colocated or not is_shared else placement.num_servers
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
        # Bytes of a server's device for its next weights while they arrive.
        self.staged = self.weights if config.weight_sync.double_buffer == "device" else 0
        left = max(0, self.server_room - self.weights) // self.kv_token  # tokens that the KV cache has room for
        self.kv_tokens = left if self.on_gpu else min(left, self.answer_tokens)

    def rank_memory(self) -> RankMemory:
        """Return the memory of a learner rank as it is configured. Raises NotImplementedError if it can't be computed.
        """
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
        if surely_fits(self.config, self.rank_room):
            return []
        try:
            needed = self.rank_memory().peak
        except NotImplementedError as error:
            return [f"the learner's memory is not checked: {error}"]
        if needed <= self.rank_room:
            return []
        place = "a GPU" if self.on_gpu else "this host"
        text = (
            f"a learner rank needs {_size(needed)}, of {place} with {_size(self.total)} it has {_size(self.rank_room)}"
        )
        offload = "learner.offload: moments or all, more learner ranks on GPUs of their own, or " if self.on_gpu else ""
        mend = f"{'a lower rollout.gpu_memory_utilization, ' if self.is_shared else ''}{offload}a smaller model"
        least = -(-self.config.longest_tokens // self.config.learner.sequence_parallel)
        fewest = self.estimate.rank_memory(checkpoints=True, max_tokens=least).peak
        if fewest > self.rank_room:
            raise ConfigError(
                f"memory: {text}, and with checkpointing and the smallest micro-batches {_size(fewest)}. Set {mend}"
            )
        return [
            f"memory: if micro-batches are full, {text}. Set learner.gradient_checkpointing: auto, "
            f"learner.max_tokens_per_microbatch down to {least}, {mend}"
        ]

    def check_servers(self) -> None:
        """Raise ConfigError if a GPU has too little memory for a server's share, its weights and one answer."""
        if not self.on_gpu:
            return
        left, total, share = self.total - self.server_room, _size(self.total), _size(self.server_room)
        asked = f"rollout.gpu_memory_utilization {self.config.rollout.gpu_memory_utilization}"
        if self.staged and left < self.staged + self.extra:
            raise ConfigError(
                f"weight_sync.double_buffer device needs {_size(self.staged)} of a server's GPU once more, and "
                f"activations {_size(self.extra)}; {asked} leaves {_size(left)} of {total}. Lower it, or set "
                "weight_sync.double_buffer: host"
            )
        if self.config.rollout.server_url:
            return
        least = self.weights + self.config.longest_tokens * self.kv_token
        if self.server_room < least:
            raise ConfigError(
                f"{asked} gives a server {share} of a GPU with {total}: too little for its weights and one answer, "
                f"{_size(least)}. Raise it, or placement.rollout.tp"
            )
        kept = self.estimate.kept()
        if self.config.shares_gpus and left < self.extra + kept:
            fits = max(0, int(100 * (self.total - self.extra - kept) / self.total)) / 100
            raise ConfigError(
                f"memory: {asked} gives a server in its turn {share} of a GPU with {total}; its activations take "
                f"{_size(self.extra)} and the learner keeps {_size(kept)}: more than the GPU has. Set rollout."
                f"gpu_memory_utilization to {fits} or less, learner.offload: moments or all, or more learner ranks"
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
            lines += [_line(name, size) for name, size in memory.parts.items() if size]
            lines += [_line(f"{name} (host)", size) for name, size in memory.host.items() if size]
        except NotImplementedError as error:
            lines.append(f"{rank} not computed: {error}")
        if self.config.rollout.server_url:
            return lines
        evaluating = f" and {placement.eval.servers} evaluation" if placement.eval.servers else ""
        lines += [f"each of {placement.rollout.servers} rollout{evaluating} server(s):", _line("weights", self.weights)]
        if self.staged:
            lines.append(_line("staged weights", self.staged))
        if self.config.weight_sync.delta:  # the weights that a sparse push is made against
            pushed = self.estimate.networks[0].has.all * self.estimate.dtype.itemsize
            lines.append(_line("pushed weights (host)", pushed) + "  of each GPU's process, and once at learner rank 0")
        kv = _line("KV cache", self.kv_tokens * self.kv_token)
        return [*lines, f"{kv}  {self.kv_tokens} tokens; answers in flight have {self.answer_tokens}"]


def _line(name: str, num_bytes: int) -> str:
    return f"  {name:<32} {_size(num_bytes):>11}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
