"""The memory of each learner rank and server, as a table before the start, and what would fit where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from async_rl.config import Config
from async_rl.driver.gpu_driver import smallest_gpu_bytes
from async_rl.driver.placement import gpus_here, runs_here, servers_per_gpu
from async_rl.driver.resources import host_demands
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from learner.memory.rank_memory import RankMemory, RankMemoryEstimate

GIB = 2**30
PROCESS_BYTES = 2**30 // 2
"""CPU memory of a process without weights: the interpreter and its libraries."""
UNKNOWN_SIZE = "the CUDA driver does not say how large this host's GPUs are"


class MemoryPlan:
    """The memory that the processes of a run need and have. Models are measured without their weights.

    Args:
        gpus: the number of GPUs of `gpu_bytes`; with 0 all processes share the `host_bytes` of one host.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(self, config: Config, gpus: int, gpu_bytes: int, host_bytes: int) -> None:
        from learner.memory.rank_memory import RankMemoryEstimate
        from learner.memory.room import GRAPHS_BYTES, batch_bytes
        from rollout_server.engines.kv_cache import kv_token_bytes

        self.config = config
        self.on_gpu = gpus > 0
        self.estimate: RankMemoryEstimate = RankMemoryEstimate(config, "cuda" if gpus else "cpu")
        policy, dtype, tp = self.estimate.networks[0], self.estimate.dtype, config.placement.rollout.tp
        model = policy.config.get_text_config()
        self.weights = dtype.itemsize * policy.base // tp
        """The bytes of a server's weights on one device."""
        self.kv_token = kv_token_bytes(model, str(dtype).removeprefix("torch."), tp)
        """The bytes of one token in its KV cache."""
        self.answer_tokens = config.max_running_replies * config.longest_tokens
        """The tokens of all answers that may be in flight at a server."""
        self.extra = GRAPHS_BYTES + batch_bytes(config, model)
        """The bytes that a server takes of a GPU beside its share."""
        self.total = gpu_bytes if gpus else host_bytes
        """The bytes of the smallest GPU, or of this host."""
        self.rank_room, self.server_room, self.is_shared = self._rooms(gpus)
        asked = config.learner.gradient_checkpointing
        self.checkpoints = asked is True or (asked == "auto" and not self.estimate.fits_plain(self.rank_room))

    def _rooms(self, gpus: int) -> tuple[int, int, bool]:
        """Return the bytes that a learner rank may use, and a server for weights and KV cache; and whether servers hold
        a share of the rank's GPU while it trains. On a CPU a server may use all that is free.
        """
        from learner.memory.room import IN_TURNS_BYTES

        config, placement, total = self.config, self.config.placement, self.total
        if not gpus:
            servers = placement.eval.servers if config.rollout.server_url else placement.num_servers
            taken = servers * (self.weights + self.kv_token * self.answer_tokens + PROCESS_BYTES)
            ranks = placement.learner.ranks
            return max(0, (total - taken - ranks * PROCESS_BYTES) // ranks), total // max(1, servers), False
        demands = host_demands(config, float(gpus))
        shares = [share for demand in demands for name, share in demand.gpus_of.items() if name.startswith("learner")]
        is_shared = min(shares) < 1 and not config.rollout.server_url
        per_gpu = 1 if placement.colocated or not is_shared else placement.num_servers
        rank = total
        if config.shares_gpus:
            rank = total - IN_TURNS_BYTES
        elif is_shared:
            rank = round(total * (1 - config.rollout.mem_fraction)) - per_gpu * self.extra
        server = round(total * config.rollout.mem_fraction / per_gpu)
        return max(0, rank), server, is_shared and not config.shares_gpus

    def rank_memory(self) -> RankMemory:
        """Return the memory of a learner rank as it is configured; NotImplementedError: it can't be computed."""
        return self.estimate.rank_memory(checkpoints=self.checkpoints)

    def check(self) -> list[str]:
        """Return cautions that say what would fit where the configuration may not.

        Raises:
            ConfigError: a rank has too little memory even for a single row, or a server for the weights, or they take
                turns and a server has too little for its share beside what the rank keeps.
        """
        self.check_servers()
        return self.check_ranks()

    def check_ranks(self) -> list[str]:
        """Return cautions about the learner's ranks alone; raises ConfigError as `check` does."""
        try:
            needed = self.rank_memory().peak
        except NotImplementedError as error:
            return [f"the learner's memory is not checked: {error}"]
        if needed <= self.rank_room:
            return []
        place = "a GPU" if self.on_gpu else "this host"
        has = f"of {place} with {_size(self.total)} it has {_size(self.rank_room)}"
        text = f"a learner rank needs {_size(needed)}, {has}"
        offload = "learner.offload: moments or all, more learner ranks on GPUs of their own, or " if self.on_gpu else ""
        beside = "a lower rollout.mem_fraction, " if self.is_shared else ""
        least = -(-self.config.longest_tokens // self.config.learner.sequence_parallel)
        fewest = self.estimate.rank_memory(checkpoints=True, max_tokens=least).peak
        if fewest > self.rank_room:
            raise ConfigError(
                f"memory: {text}, and with checkpointing and the smallest micro-batches {_size(fewest)}. Set {beside}"
                f"{offload}a smaller model"
            )
        return [
            f"memory: where micro-batches are full, {text}. Set learner.gradient_checkpointing: auto, "
            f"learner.max_tokens_per_microbatch down to {least}, {beside}{offload}a smaller model"
        ]

    def table(self) -> list[str]:
        """Return the table of `async-rl train --dry-run`: lines by rank and server."""
        config, placement = self.config, self.config.placement
        lines = [f"{'smallest GPU' if self.on_gpu else 'host'}: {_size(self.total)}"]
        ranks = f"each of {placement.learner.ranks} learner rank(s):"
        try:
            memory = self.rank_memory()
        except NotImplementedError as error:
            lines.append(f"{ranks} not computed: {error}")
        else:
            fullest = max(memory.peaks, key=memory.peaks.__getitem__)
            how = "with" if self.checkpoints else "without"
            lines.append(
                f"{ranks} at most {_size(memory.peak)} at a time ({fullest}, {how} gradient checkpointing), has "
                f"{_size(self.rank_room)}"
            )
            held = memory.parts | {f"{name} (host)": size for name, size in memory.host.items()}
            lines += [_line(name, size) for name, size in held.items() if size]
        if config.rollout.server_url:
            return lines
        evaluating = f" and {placement.eval.servers} evaluation" if placement.eval.servers else ""
        lines += [f"each of {placement.rollout.servers} rollout{evaluating} server(s):", _line("weights", self.weights)]
        if self._staged_bytes:
            lines.append(_line("staged weights", self._staged_bytes))
        if config.weight_sync.delta:  # the weights that a sparse push is made against
            pushed = self.estimate.networks[0].has.all * self.estimate.dtype.itemsize
            lines.append(_line("pushed weights (host)", pushed) + "  of each GPU's process, and once at learner rank 0")
        kv = _line("KV cache", self.kv_tokens * self.kv_token)
        return [*lines, f"{kv}  {self.kv_tokens} tokens; answers in flight have {self.answer_tokens}"]

    @property
    def _staged_bytes(self) -> int:
        """The bytes of a server's device that hold its next weights while they arrive."""
        return self.weights if self.config.weight_sync.staging == "device" else 0

    @property
    def kv_tokens(self) -> int:
        """The tokens for which the KV cache of a server has room."""
        left = max(0, self.server_room - self.weights) // self.kv_token
        return left if self.on_gpu else min(left, self.answer_tokens)

    def check_servers(self) -> None:
        """Raise ConfigError if a server has too little memory for its weights and one answer, or in its turn for its
        share.
        """
        rollout, left = self.config.rollout, self.total - self.server_room
        if not self.on_gpu:
            return
        if self._staged_bytes and left < self._staged_bytes + self.extra:
            raise ConfigError(
                f"weight_sync.staging device needs {_size(self._staged_bytes)} of a server's GPU once more, beside "
                f"{_size(self.extra)} for activations; rollout.mem_fraction {rollout.mem_fraction} leaves "
                f"{_size(left)} of {_size(self.total)}. Lower it, or set weight_sync.staging: host"
            )
        if rollout.server_url:
            return
        least = self.weights + self.config.longest_tokens * self.kv_token
        if self.server_room < least:
            raise ConfigError(
                f"rollout.mem_fraction {rollout.mem_fraction} gives a server {_size(self.server_room)} of a GPU with "
                f"{_size(self.total)}: too little for its weights and one answer, {_size(least)}. "
                "Raise it, or placement.rollout.tp"
            )
        kept = self.estimate.kept()
        if self.config.shares_gpus and left < self.extra + kept:
            fits = max(0, int(100 * (self.total - self.extra - kept) / self.total)) / 100
            raise ConfigError(
                f"memory: in its turn a server has rollout.mem_fraction {rollout.mem_fraction} of a GPU with "
                f"{_size(self.total)}, {_size(self.server_room)}, and {_size(self.extra)} for activations beside what "
                f"the learner keeps there, {_size(kept)}: together more than the GPU has. Set rollout.mem_fraction "
                f"to {fits} or less, learner.offload: moments or all, or more learner ranks"
            )


def plan_memory(config: Config) -> MemoryPlan | None:
    """Return the plan for a run on this host; None: the size of its GPUs is not known."""
    total = _bytes_here()
    gpus = int(gpus_here())
    return MemoryPlan(config, gpus, total, total) if total else None


def plan_dry_run(config: Config, gpu_gb: float, gpus_there: float) -> MemoryPlan | None:
    """Return the plan that a dry run shows, on other hosts for GPUs of `gpu_gb`; None: their size is not known.

    Args:
        gpu_gb: in units of 1e9 bytes; 0: not known.
        gpus_there: number of GPUs of all other hosts together; 0: not known, and taken to be as many as it asks for.

    Raises:
        ConfigError: `gpu_gb` is given for a run on this host alone.
    """
    if not runs_here(config):
        return plan_elsewhere(config, round(1e9 * gpu_gb), gpus_there or inf) if gpu_gb else None
    if gpu_gb:
        raise ConfigError("--gpu-gb is for runs over several hosts: this one is on this host, which is measured")
    return plan_memory(config)


def plan_elsewhere(config: Config, gpu_bytes: int, gpus_there: float, *, is_placed: bool = False) -> MemoryPlan:
    """Return the plan for a run over other hosts with `gpus_there` GPUs of `gpu_bytes` together.

    Args:
        is_placed: `config` is as `resolve_placement` returns it: rollout.mem_fraction is what each server of a GPU has.
    """
    demands = host_demands(config, gpus_there)
    if is_placed:
        share = config.rollout.mem_fraction * servers_per_gpu(demands)
        config = replace(config, rollout=replace(config.rollout, mem_fraction=share))
    return MemoryPlan(config, round(sum(demand.gpus for demand in demands)), gpu_bytes, host_bytes=0)


def check_memory(config: Config) -> list[str]:
    """Return cautions about memory, see MemoryPlan.check, unless the run is far smaller than this host. In turns on
    GPUs that is not enough: a server's share may be too large whatever the size of the model.
    """
    from learner.memory.room import is_surely_small

    processes = config.placement.learner.ranks + config.placement.num_servers
    in_turns = gpus_here() > 0 and config.shares_gpus
    if not in_turns and is_surely_small(config, _bytes_here() // (2 * processes)):
        return []
    plan = plan_memory(config)
    return plan.check() if plan else [f"memory: not checked, because {UNKNOWN_SIZE}"]


def _bytes_here() -> int:
    """Return the memory of this host's smallest GPU, 0 if it is not known; of the host if it has no GPU."""
    from learner.memory.room import host_bytes

    return smallest_gpu_bytes() if gpus_here() else host_bytes()


def _line(name: str, num_bytes: int) -> str:
    return f"  {name:<32} {_size(num_bytes):>11}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
