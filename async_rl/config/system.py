"""The sections that say where it runs and how its processes talk."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from async_rl.config.check import check

LONGEST_WAIT_S = 1e6
"""Eleven days. ZMQ counts the milliseconds of a wait in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    steps: int = 100
    """Learner steps (batches) to take in this run."""
    seconds: float = 0.0
    """Ends the run after the learner step in which so much time has passed since the first one; 0: no limit."""
    resume: str = ""
    """Run directory to continue, from its newest checkpoint, or one of its checkpoints. `--resume` sets it."""

    def __post_init__(self) -> None:
        check(0 <= self.seed < 2**32, "run.seed", self.seed, "0 to 2**32 - 1", "Engines take no other seeds.")
        check(self.steps >= 1, "run.steps", self.steps, "at least 1")
        check(self.seconds >= 0, "run.seconds", self.seconds, "0 (no limit) or more")
        check(bool(self.name) and "/" not in self.name, "run.name", self.name, "a folder name without '/'")


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    transport: Literal["auto", "nccl", "gloo", "cuda_ipc", "disk"] = "auto"
    """auto: gloo on CPU, nccl where learner and servers have GPUs of their own, cuda_ipc where SGLang and one learner
    rank share one, else disk."""
    on_update: Literal["in_place", "retract", "drain", "abort"] = "in_place"
    """Requests that run when new weights come: in_place: pause, keep their KV, continue; retract: recompute it; drain:
    finish first; abort: resubmit what there is of the answer."""
    every_steps: int = 1
    background: bool = False
    """Servers generate on while new weights arrive beside the old, and pause to swap them. rollout.engine hf only."""
    bucket_bytes: int = 512 * 2**20
    verify: bool = True
    """After the first push, compare the server's logprobs of a probe text with the learner's."""

    def __post_init__(self) -> None:
        check(self.every_steps >= 1, "weight_sync.every_steps", self.every_steps, "at least 1")
        check(self.bucket_bytes >= 1024, "weight_sync.bucket_bytes", self.bucket_bytes, "at least 1024")


@dataclass(frozen=True, kw_only=True)
class LearnerPlacement:
    nodes: int = 1
    gpus_per_node: int = 0
    """Ranks on each node, a GPU of its own each. 0: `ranks` says how many, on the GPUs that there are, else on CPU."""
    ranks: int = 0
    """On all nodes together. 0: nodes * gpus_per_node, or one a node."""
    resource: str = ""
    """Ray resource a node must offer (`ray start --resources`), to tell kinds of hosts apart; empty: any node will do.
    """

    def __post_init__(self) -> None:
        check(self.nodes >= 1, "placement.learner.nodes", self.nodes, "at least 1")
        check(self.gpus_per_node >= 0, "placement.learner.gpus_per_node", self.gpus_per_node, "0 or more")
        derived = self.nodes * max(1, self.gpus_per_node)
        ranks = self.ranks or derived
        check(
            ranks == derived if self.gpus_per_node else ranks >= 1 and ranks % self.nodes == 0,
            "placement.learner.ranks", ranks,
            f"nodes * gpus_per_node = {derived}" if self.gpus_per_node else f"a multiple of {self.nodes} nodes",
        )
        object.__setattr__(self, "ranks", ranks)


@dataclass(frozen=True, kw_only=True)
class RolloutPlacement:
    nodes: int = 0
    """Of their own, without learner ranks. 0: servers run on the learner's nodes."""
    servers: int = 1
    tp: int = 1
    """GPUs of each server."""
    resource: str = ""
    """As placement.learner.resource, for nodes of their own."""
    max_restarts: int = 3
    """Times one server may die between two learner steps; once more, or 0, and its death ends the run."""

    def __post_init__(self) -> None:
        check(self.nodes >= 0, "placement.rollout.nodes", self.nodes, "0 (on the learner's nodes) or more")
        check(
            self.servers >= 1 and self.servers % max(1, self.nodes) == 0, "placement.rollout.servers", self.servers,
            f"a multiple of {self.nodes} nodes" if self.nodes > 1 else "at least 1",
        )
        check(self.tp >= 1, "placement.rollout.tp", self.tp, "at least 1")
        check(self.max_restarts >= 0, "placement.rollout.max_restarts", self.max_restarts, "0 or more")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    learner: LearnerPlacement = field(default_factory=LearnerPlacement)
    rollout: RolloutPlacement = field(default_factory=RolloutPlacement)
    colocated: bool = False
    """Learner ranks and servers share GPUs, one of each on a GPU; rollout.mem_fraction splits the memory."""
    pin_cpus: bool = False
    """Each rollout server and learner rank keeps to an equal share of this host's cores, all its own: without GPUs,
    overlap is real only then."""

    def __post_init__(self) -> None:
        check(
            not self.colocated or (self.rollout.nodes == 0 and self.rollout.tp == 1), "placement.colocated", True,
            "false where servers have nodes of their own, or span GPUs (placement.rollout.nodes, tp)",
        )
        check(
            self.rollout.nodes > 0 or self.rollout.servers % self.learner.nodes == 0, "placement.rollout.servers",
            self.rollout.servers, f"a multiple of the learner's {self.learner.nodes} nodes, which they share",
        )
        check(not (self.pin_cpus and self.num_nodes > 1), "placement.pin_cpus", True, "false on several nodes")

    @property
    def num_nodes(self) -> int:
        return self.learner.nodes + self.rollout.nodes

    @property
    def processes_per_node(self) -> int:
        """Learner ranks and servers on the fullest node: they share its cores."""
        ranks = self.learner.ranks // self.learner.nodes
        return max(ranks, self.servers_per_node) if self.rollout.nodes else ranks + self.servers_per_node

    @property
    def servers_per_node(self) -> int:
        return self.rollout.servers // (self.rollout.nodes or self.learner.nodes)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 100
    """Learner and buffer at one cut, in run_dir/checkpoints, every so many steps and at the end; 0: only after Ctrl-C
    or SIGTERM."""
    keep_last: int = 2
    keep_best: int = 0
    """Keep so many more: those with the highest `best_metric`."""
    best_metric: str = "eval/accuracy"

    def __post_init__(self) -> None:
        check(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "0 (off) or more")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
        check(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "0 (off) or more")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when the user is logged in, else off."""
    project: str = "async-rl"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Of this host's sockets. On several nodes each process listens on the address by which Ray knows its node
    (`ray start --node-ip-address` chooses it), and keys are made for the run where there are none."""

    host: str = "127.0.0.1"
    """IPv4 address that sockets bind and others reach. Beyond loopback only with keys, or insecure."""
    port: int = 0
    """Of the buffer. 0: a free one."""
    keys: str = ""
    """Folder made by `async-rl keys new`: groups and batches are encrypted, only who holds the client's key is let in,
    and rollout servers beyond loopback ask for an API key made from it."""
    insecure: bool = False
    """Accept that whoever reaches `host` can read, and write into, the training data."""

    def __post_init__(self) -> None:
        try:
            address = ipaddress.IPv4Address(self.host)
        except ValueError:
            address = ipaddress.IPv4Address(0)
        check(
            not address.is_unspecified, "network.host", self.host, "the IPv4 address of one interface, in numbers",
            "127.0.0.1 where all processes share a host; else an address of this host that the others reach.",
        )
        check(0 <= self.port < 2**16, "network.port", self.port, "0 (a free one) to 65535")
        check(
            address.is_loopback or bool(self.keys) or self.insecure, "network.host", self.host,
            "a loopback address unless network.keys or network.insecure is set",
            "Make keys with `async-rl keys new DIR` and set network.keys: DIR.",
        )

    @property
    def is_on_loopback(self) -> bool:
        return ipaddress.IPv4Address(self.host).is_loopback


class Limit(NamedTuple):
    """How long one wait may last, with the key that says so: who gives up names it."""

    seconds: float
    key: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s ({self.key})"


@dataclass(frozen=True, kw_only=True)
class TimeoutsConfig:
    """One per named wait, in seconds."""

    server_start_s: float = 600.0
    join_s: float = 120.0
    """Processes finding each other: torch.distributed, weight group, buffer."""
    generate_s: float = 1800.0
    """One group at the engine."""
    eval_s: float = 3600.0
    """The whole held-out set, before and after training, or while a push waits for it (eval.pin_version)."""
    reward_s: float = 30.0
    """One call of the reward function, from when a thread begins on it."""
    batch_s: float = 1800.0
    """The learner waiting for a batch."""
    push_s: float = 300.0
    """One weight push."""
    wire_s: float = 30.0
    """One request to the buffer."""
    silent_s: float = 60.0
    """A process that tells the driver nothing for so long counts as dead; a buffer with a journal after wire_s / 3."""
    shutdown_s: float = 30.0
    interrupt_s: float = 300.0
    """After Ctrl-C or SIGTERM: the step that runs, and its checkpoint. Then the run ends without."""
    checkpoint_s: float = 1800.0
    """One checkpoint on its way to the disk."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            check(0 < value <= LONGEST_WAIT_S, f"timeouts.{name}", value, f"above 0, at most {LONGEST_WAIT_S:.0f}")

    def limit(self, name: str) -> Limit:
        return Limit(getattr(self, name), f"timeouts.{name}")
