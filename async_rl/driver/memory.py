"""The memory of each learner rank and server, as a table before the start, and what would fit where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from async_rl.config import Config
from async_rl.driver.gpu_driver import smallest_gpu_bytes
from async_rl.driver.placement import gpus_here, runs_here, servers_per_gpu
from async_rl.driver.resources import host_demands
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from learner.memory.rank_memory import RankMemory, RankMemoryEstimate

GIB = 2**30
SERVER_EXTRA_BYTES = 3 * GIB
"""The bytes that a server takes of a GPU beside its share: activations and CUDA graphs. An estimate."""
PROCESS_BYTES = 2**30 // 2
"""CPU memory of a process without weights: the interpreter and its libraries."""
UNKNOWN_SIZE = "the CUDA driver does not say how large this host's GPUs are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that the processes of a run have."""

    device: str
    """`cuda`, or `cpu`."""
    total: int
    """The bytes of the smallest GPU, or of this host."""
    rank: int
    """The bytes of it that a learner rank may use."""
    server: int
    """The bytes of it that a server may use for weights and KV cache; on a CPU all that is free."""
    shared: bool = False
    """Whether servers hold a share of the rank's GPU while it trains: rollout.mem_fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeeds:
    """The bytes that a server needs on one device."""

    weights: int
    token: int
    """The KV cache of one token."""
    tokens: int
    """The tokens of all answers that may be in flight."""


def room_of(config: Config, gpus: int, gpu_bytes: int, host_bytes: int, server: ServerNeeds) -> Room:
    """Return the room on a host with `gpus` GPUs of `gpu_bytes`, or, without GPUs, with `host_bytes` of memory."""
    from learner.memory.room import IN_TURNS_BYTES

    placement = config.placement
    if not gpus:
        servers = placement.eval.servers if config.rollout.server_url else placement.num_servers
        taken = servers * (server.weights + server.token * server.tokens + PROCESS_BYTES)
        left = host_bytes - taken - placement.learner.ranks * PROCESS_BYTES
        rank = max(0, left // placement.learner.ranks)
        return Room(device="cpu", total=host_bytes, rank=rank, server=host_bytes // max(1, servers))
    demands = host_demands(config, float(gpus))
    shares = [share for demand in demands for name, share in demand.gpus_of.items() if name.startswith("learner")]
    shared = min(shares) < 1 and not config.rollout.server_url
    per_gpu = 1 if placement.colocated or not shared else placement.num_servers
    rank = gpu_bytes
    if config.shares_gpus:
        rank = gpu_bytes - IN_TURNS_BYTES
    elif shared:
        rank = round(gpu_bytes * (1 - config.rollout.mem_fraction)) - per_gpu * SERVER_EXTRA_BYTES
    server_bytes = round(gpu_bytes * config.rollout.mem_fraction / per_gpu)
    held = shared and not config.shares_gpus
    return Room(device="cuda", total=gpu_bytes, rank=max(0, rank), server=server_bytes, shared=held)


class MemoryPlan:
    """The memory that the processes of a run need and have. Models are measured without their weights.

    Raises:
        ConfigError: a model can't be loaded.
    """

    def __init__(self, config: Config, gpus: int, gpu_bytes: int, host_bytes: int) -> None:
        from learner.memory.rank_memory import RankMemoryEstimate

        self.config = config
        self.estimate: RankMemoryEstimate = RankMemoryEstimate(config, "cuda" if gpus else "cpu")
        self.server = _server_needs(config, self.estimate)
        self.room = room_of(config, gpus, gpu_bytes, host_bytes, self.server)
        asked = config.learner.gradient_checkpointing
        self.checkpoints = asked is True or (asked == "auto" and not self._fits(checkpoints=False))

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
        room = self.room.rank
        if needed <= room:
            return []
        place = "a GPU" if self.room.device == "cuda" else "this host"
        text = f"a learner rank needs {_size(needed)}, of {place} with {_size(self.room.total)} it has {_size(room)}"
        offers = " or ".join(self._offers()) or "more learner ranks on more GPUs, or a smaller model"
        fewest = self.estimate.rank_memory(checkpoints=True, max_tokens=self._fewest_tokens).peak
        if fewest > room:
            raise ConfigError(f"memory: {text}, and with the smallest micro-batches {_size(fewest)}. Set {offers}")
        return [f"memory: where micro-batches are full, {text}. Set {offers}"]

    def table(self) -> list[str]:
        """Return the table of `async-rl train --dry-run`: lines by rank and server."""
        config, room = self.config, self.room
        placement = config.placement
        ranks, evaluating = placement.learner.ranks, placement.eval.servers
        servers = f"{placement.rollout.servers} rollout" + (f" and {evaluating} evaluation" if evaluating else "")
        place = "smallest GPU" if room.device == "cuda" else "host"
        lines = [f"{place}: {_size(room.total)}"]
        try:
            memory = self.rank_memory()
        except NotImplementedError as error:
            lines.append(f"each of {ranks} learner rank(s): not computed: {error}")
        else:
            fullest = max(memory.peaks, key=memory.peaks.__getitem__)
            how = "with" if self.checkpoints else "without"
            lines.append(
                f"each of {ranks} learner rank(s): at most {_size(memory.peak)} at a time ({fullest}, {how} gradient "
                f"checkpointing), has {_size(room.rank)}"
            )
            lines += [f"  {name:<32} {_size(size):>11}" for name, size in memory.parts.items() if size]
            lines += [f"  {name + ' (host)':<32} {_size(size):>11}" for name, size in memory.host.items() if size]
        if config.rollout.server_url:
            return lines
        server, kv = self.server, self.kv_tokens
        lines += [
            f"each of {servers} server(s):",
            f"  {'weights':<32} {_size(server.weights):>11}",
            *([f"  {'staged weights':<32} {_size(self._staged_bytes):>11}"] if self._staged_bytes else []),
            *self._held_line,
            f"  {'KV cache':<32} {_size(kv * server.token):>11}  {kv} tokens; answers in flight have {server.tokens}",
        ]
        return lines

    @property
    def _staged_bytes(self) -> int:
        """The bytes of a server's device that hold its next weights while they arrive."""
        return self.server.weights if self.config.weight_sync.staging == "device" else 0

    @property
    def _held_line(self) -> list[str]:
        """The line for the weights that a sparse push is made against, if there are such pushes."""
        if not self.config.weight_sync.delta:
            return []
        held = self.estimate.networks[0].parameters * self.estimate.dtype.itemsize
        return [f"  {'pushed weights (host)':<32} {_size(held):>11}  of each GPU's process, and once at learner rank 0"]

    @property
    def _fewest_tokens(self) -> int:
        """The least value of learner.max_tokens_per_microbatch with which the longest row can be trained."""
        return -(-self.config.longest_tokens // self.config.learner.sequence_parallel)

    @property
    def kv_tokens(self) -> int:
        """The tokens for which the KV cache of a server has room."""
        left = max(0, self.room.server - self.server.weights) // self.server.token
        return left if self.room.device == "cuda" else min(left, self.server.tokens)

    @property
    def _least_server(self) -> int:
        """The bytes that a server needs for its weights and one answer."""
        return self.server.weights + self.config.longest_tokens * self.server.token

    def check_servers(self) -> None:
        """Raise ConfigError if a server has too little memory for its weights and one answer, or in its turn for its
        share.
        """
        rollout = self.config.rollout
        left = self.room.total - self.room.server
        if self.room.device == "cuda" and self._staged_bytes and left < self._staged_bytes + SERVER_EXTRA_BYTES:
            raise ConfigError(
                f"weight_sync.staging device needs {_size(self._staged_bytes)} of a server's GPU once more, beside "
                f"{_size(SERVER_EXTRA_BYTES)} for activations; rollout.mem_fraction {rollout.mem_fraction} leaves "
                f"{_size(left)} of {_size(self.room.total)}. Lower it, or set weight_sync.staging: host"
            )
        if self.room.device != "cuda" or rollout.server_url:
            return
        if self.room.server < self._least_server:
            raise ConfigError(
                f"rollout.mem_fraction {rollout.mem_fraction} gives a server {_size(self.room.server)} of a GPU with "
                f"{_size(self.room.total)}: too little for its weights and one answer, {_size(self._least_server)}. "
                "Raise it, or placement.rollout.tp"
            )
        if self.config.shares_gpus:
            self._check_turn()

    def _check_turn(self) -> None:
        """Raise ConfigError if a server's share does not fit beside what the learner keeps in the server's turn."""
        total, share, learner = self.room.total, self.config.rollout.mem_fraction, self.config.learner
        left = {offload: total - SERVER_EXTRA_BYTES - self.estimate.kept(offload) for offload in learner.offloads}
        if left[learner.offload] >= self.room.server:
            return
        fits = int(100 * left[learner.offload] / total) / 100
        offers = [f"rollout.mem_fraction: {fits}"] if fits * total > self._least_server else []
        offers += [f"learner.offload: {offload}" for offload, room in left.items() if room >= self.room.server]
        raise ConfigError(
            f"memory: in its turn a server has rollout.mem_fraction {share} of a GPU with {_size(total)}, "
            f"{_size(self.room.server)}, and {_size(SERVER_EXTRA_BYTES)} for activations beside what the learner "
            f"keeps there, {_size(self.estimate.kept(learner.offload))}: together more than the GPU has. Set "
            + (" or ".join(offers) or "more learner ranks on more GPUs, or a smaller model")
        )

    def _fits(self, **settings: Any) -> bool:
        try:
            return self.estimate.rank_memory(**settings).peak <= self.room.rank
        except NotImplementedError:
            return False

    def _offers(self) -> list[str]:
        """Return at most three settings with which a rank would fit, the cheapest first."""
        return list(islice((setting for setting, fits in self._settings() if fits), 3))

    def _settings(self) -> Iterator[tuple[str, bool]]:
        """Yield (settings that need less memory, whether a rank would fit with them), the cheapest first."""
        checkpoints = self.checkpoints
        if not checkpoints:
            yield "learner.gradient_checkpointing: auto", self._fits(checkpoints=True)
        tokens = self.config.learner.max_tokens_per_microbatch
        while (tokens := tokens // 2) >= self._fewest_tokens:
            fits = self._fits(checkpoints=checkpoints, max_tokens=tokens)
            yield f"learner.max_tokens_per_microbatch: {tokens}", fits
            if fits:
                break
        if self.room.shared:
            needed = self.estimate.rank_memory(checkpoints=True).peak + SERVER_EXTRA_BYTES
            share = int(100 * (1 - needed / self.room.total)) / 100
            yield f"rollout.mem_fraction: {share}, with checkpointing", share * self.room.total > self._least_server
        if self.room.device == "cpu":
            return
        for offload in self.config.learner.offloads[1:]:
            yield f"learner.offload: {offload}, with checkpointing", self._fits(checkpoints=True, offload=offload)
        for ranks in (self.config.placement.learner.ranks * more for more in (2, 4, 8)):
            yield f"{ranks} learner ranks, on a GPU each, with checkpointing", self._fits(checkpoints=True, ranks=ranks)


def _server_needs(config: Config, estimate: RankMemoryEstimate) -> ServerNeeds:
    from rollout_server.engines.kv_cache import kv_token_bytes, max_running_replies

    policy, tp = estimate.networks[0], config.placement.rollout.tp
    model = policy.config.get_text_config()
    name = str(estimate.dtype).removeprefix("torch.")
    return ServerNeeds(
        weights=estimate.dtype.itemsize * policy.base // tp, token=kv_token_bytes(model, name, tp),
        tokens=max_running_replies(config) * config.longest_tokens,
    )


def plan_memory(config: Config) -> MemoryPlan:
    """Return the plan for a run on this host."""
    from learner.memory.room import host_bytes

    gpus = int(gpus_here())
    return MemoryPlan(config, gpus, smallest_gpu_bytes() if gpus else 0, host_bytes())


def plan_dry_run(config: Config, gpu_gb: float, gpus_there: float) -> MemoryPlan | None:
    """Return the plan that a dry run shows, on other hosts for GPUs of `gpu_gb`; None: their size is not known.

    Args:
        gpu_gb: in units of 1e9 bytes; 0: not known.
        gpus_there: number of GPUs of all other hosts together; 0: not known, and taken to be as many as it asks for.

    Raises:
        ConfigError: `gpu_gb` is given for a run on this host alone.
    """
    if runs_here(config):
        if gpu_gb:
            raise ConfigError("--gpu-gb is for runs over several hosts: this one is on this host, which is measured")
        return plan_memory(config) if _bytes_here() else None
    return plan_elsewhere(config, round(1e9 * gpu_gb), gpus_there or inf) if gpu_gb else None


def plan_elsewhere(config: Config, gpu_bytes: int, gpus_there: float) -> MemoryPlan:
    """Return the plan for a run over other hosts with `gpus_there` GPUs of `gpu_bytes` together."""
    gpus = sum(demand.gpus for demand in host_demands(config, gpus_there))
    return MemoryPlan(config, round(gpus), gpu_bytes, host_bytes=0)


def plan_placed(config: Config, gpu_bytes: int, gpus_there: float) -> MemoryPlan:
    """Return the plan for a run that is placed on hosts with `gpus_there` GPUs.

    Args:
        config: as `resolve_placement` returns it, where rollout.mem_fraction is what each server of a GPU has of it.
    """
    share = config.rollout.mem_fraction * servers_per_gpu(host_demands(config, gpus_there))
    whole = replace(config, rollout=replace(config.rollout, mem_fraction=share))
    return plan_elsewhere(whole, gpu_bytes, gpus_there)


def check_memory(config: Config) -> list[str]:
    """Return cautions about memory, see MemoryPlan.check, unless the run is far smaller than this host. In turns on
    GPUs that is not enough: a server's share may be too large whatever the size of the model.
    """
    from learner.memory.room import is_surely_small

    total = _bytes_here()
    if not total:
        return [f"memory: not checked, because {UNKNOWN_SIZE}"]
    processes = config.placement.learner.ranks + config.placement.num_servers
    in_turns = gpus_here() > 0 and config.shares_gpus
    if not in_turns and is_surely_small(config, total // (2 * processes)):
        return []
    return plan_memory(config).check()


def _bytes_here() -> int:
    """Return the memory of this host's smallest GPU, 0 if it is not known; of the host if it has no GPU."""
    from learner.memory.room import host_bytes

    return smallest_gpu_bytes() if gpus_here() else host_bytes()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
