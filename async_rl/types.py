"""The data types that all parts of the pipeline share. They have only derived properties, and do not import torch.

Letters of the axes in every shape comment of the project:
    B  sequences in a (micro-)batch     G  rollouts of one group
    T  tokens of a response             P  tokens of a prompt
    S  tokens of a whole sequence (P + T, padded)     V  vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a task. Its `index` determines it: the same index gives the same prompt in every process."""

    index: int
    tokens: IntArray  # [P]
    text: str
    """The text that was tokenized, with the chat template applied."""
    reference: Any
    """The value that the reward function compares an answer with (an answer string, a dataset entry, ...)."""
    source: str = ""
    """The field `data_source` of the prompt's data row, or the task's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Permission to start one rollout group, which the buffer grants to a worker."""

    group_id: int
    """The number of the rollout group, unique in a run and ascending in the order of grants."""
    prompt_index: int
    start_version: int
    """The served version at the moment of the grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer. Its arrays have one entry for each of the T >= 1 response tokens."""

    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T] behaviour logprobs, at the logged temperature
    versions: IntArray  # [T] token versions, non-decreasing
    mask: BoolArray  # [T] True where the token is trained (the model sampled it)
    reward: float
    finish_reason: str
    """`stop` (the model ended the answer) or `length` (it ran into max_response_tokens)."""
    num_too_old: int = 0
    """The number of tokens that are masked only because they are too old (`staleness.late: mask`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The `group_size` rollouts of one prompt: the unit of admission, transport, staleness and training."""

    group_id: int
    prompt_index: int
    start_version: int
    temperature: float
    prompt_tokens: IntArray  # [P]
    rollouts: tuple[Rollout, ...]  # G of them
    duration_s: float
    """The time from the grant of the slot to the last reward."""
    worker: str = ""
    baseline_reward: float | None = None
    """The reward of a greedy answer, which is not trained on; None unless the advantage needs it (remax)."""
    keeps_kv: bool = False
    """Whether the answers kept their KV cache over weight updates (`weight_sync.on_update: in_place`)."""

    def old_kv(self, rollout: Rollout) -> BoolArray:
        """Return bools [T], True where the token may have been sampled on KV cache of older weights than its version's.

        The behaviour logprob of such a token is right, but recomputing it from scratch gives another value. Only tokens
        of the start version are sure to have KV of their own version.
        """
        return rollout.versions > self.start_version if self.keeps_kv else np.zeros(len(rollout.versions), np.bool_)

    @property
    def oldest_version(self) -> int:
        return min(int(r.versions[0]) for r in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """The number of response tokens of all rollouts."""
        return sum(len(r.tokens) for r in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The `prompts_per_step` groups on which the learner trains in one step."""

    version: int
    """The policy version at which the batch is trained; training it yields version + 1."""
    groups: tuple[RolloutGroup, ...]
    finished_versions: tuple[int, ...]
    """For each group, the served version when it reached the buffer; splits staleness into in flight and in queue."""
    counters: dict[str, float] = field(default_factory=dict)
    """The buffer's metrics when it handed out the batch, with keys like `buffer/depth`."""
