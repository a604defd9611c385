"""Answers before any run: memory by role, time to transfer weights, what overlap can gain. Decimal units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WEIGHT_BYTES = 2  # bf16
GRADIENT_BYTES = 2  # bf16
ADAM_BYTES = 12  # float32 master weights and two moments
TRAINED_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES

Method = Literal["ppo", "grpo"]
ROLES: dict[Method, dict[str, int]] = {
    "ppo": {
        "policy": TRAINED_BYTES, "critic": TRAINED_BYTES, "reference": WEIGHT_BYTES, "reward model": WEIGHT_BYTES
    },
    "grpo": {"policy": TRAINED_BYTES, "reference": WEIGHT_BYTES},
}  # fmt: skip
"""Bytes a parameter of every network a method holds, all of the policy's size. GRPO: no critic, a verifiable reward."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Networks and optimizer states of the learner; activations, and the rollout servers' copies with their KV
    caches, come on top.
    """

    by_role: dict[str, float]
    """Bytes."""
    devices: int
    """The fewest that hold it."""

    @property
    def total_bytes(self) -> float:
        return math.fsum(self.by_role.values())


def learner_memory(parameters: float, method: Method, device_bytes: float) -> Memory:
    """Mixed-precision Adam: bf16 weights and gradients, float32 master weights and moments."""
    by_role = {role: parameters * role_bytes for role, role_bytes in ROLES[method].items()}
    return Memory(by_role, math.ceil(math.fsum(by_role.values()) / device_bytes))


def transfer_seconds(num_bytes: float, link_bits_per_s: float) -> float:
    """Time on the wire of one copy at the link's full rate."""
    return 8 * num_bytes / link_bits_per_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """Generation and learning in turn, against both at once."""

    learner_in_turn: float
    """Share of time the learner works."""
    learner_overlapped: float
    speedup: float


def overlap_gain(rollout_s: float, train_s: float) -> Overlap:
    """A step takes rollout_s + train_s in turn, and no less than the longer of the two when they overlap."""
    step_s = max(rollout_s, train_s)
    return Overlap(train_s / (rollout_s + train_s), train_s / step_s, (rollout_s + train_s) / step_s)
