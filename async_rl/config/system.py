"""The sections that say where it runs and how its processes talk."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal

from async_rl.config.check import check


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    steps: int = 100
    """Learner steps (batches) to take in this run."""
    seconds: float = 0.0
    """Ends the run after the learner step in which so much time has passed since the first one; 0: no limit."""

    def __post_init__(self) -> None:
        check(self.steps >= 1, "run.steps", self.steps, "at least 1")
        check(self.seconds >= 0, "run.seconds", self.seconds, "0 (no limit) or more")
        check(bool(self.name) and "/" not in self.name, "run.name", self.name, "a folder name without '/'")


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    transport: Literal["auto", "nccl", "gloo", "disk"] = "auto"
    """auto: gloo on CPU, nccl where learner and servers have GPUs of their own, disk where they share one."""
    on_update: Literal["in_place", "retract", "drain", "abort"] = "in_place"
    """Requests that run when new weights come: in_place: pause, keep their KV, continue; retract: recompute it; drain:
    finish first; abort: resubmit what there is of the answer."""
    every_steps: int = 1
    bucket_bytes: int = 512 * 2**20
    verify: bool = True
    """After the first push, compare the server's logprobs of a probe text with the learner's."""

    def __post_init__(self) -> None:
        check(self.every_steps >= 1, "weight_sync.every_steps", self.every_steps, "at least 1")
        check(self.bucket_bytes >= 1024, "weight_sync.bucket_bytes", self.bucket_bytes, "at least 1024")


@dataclass(frozen=True, kw_only=True)
class LearnerPlacement:
    ranks: int = 1

    def __post_init__(self) -> None:
        check(self.ranks >= 1, "placement.learner.ranks", self.ranks, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RolloutPlacement:
    servers: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        check(self.servers >= 1, "placement.rollout.servers", self.servers, "at least 1")
        check(self.tp >= 1, "placement.rollout.tp", self.tp, "at least 1")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    learner: LearnerPlacement = field(default_factory=LearnerPlacement)
    rollout: RolloutPlacement = field(default_factory=RolloutPlacement)
    pin_cpus: bool = False
    """Each rollout server and learner rank keeps to an equal share of this host's cores, all its own: without GPUs,
    overlap is real only then."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when the user is logged in, else off."""
    project: str = "async-rl"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Of the buffer's socket, which carries groups and batches."""

    host: str = "127.0.0.1"
    """IPv4 address it binds, by which learner and workers reach it. Beyond loopback only with keys, or insecure."""
    port: int = 0
    """0: a free one."""
    keys: str = ""
    """Folder made by `async-rl keys new`: everything is encrypted, and only who holds the client's key is let in."""
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


@dataclass(frozen=True, kw_only=True)
class TimeoutsConfig:
    """One per named wait, in seconds."""

    server_start_s: float = 600.0
    join_s: float = 120.0
    """Processes finding each other: torch.distributed, weight group, buffer."""
    generate_s: float = 1800.0
    """One group at the engine."""
    reward_s: float = 30.0
    """One call of the reward function."""
    batch_s: float = 1800.0
    """The learner waiting for a batch."""
    push_s: float = 300.0
    """One weight push."""
    wire_s: float = 30.0
    """One request to the buffer."""
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check(getattr(self, name) > 0, f"timeouts.{name}", getattr(self, name), "above 0")
