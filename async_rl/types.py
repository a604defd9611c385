"""The data types that all parts of the pipeline share. They have only derived properties, and do not import torch.

Letters of the axes in every shape comment of the project:
    B  sequences in a (micro-)batch     G  episodes of one group
    T  tokens of a response             P  tokens of a prompt
    S  tokens of a whole sequence (P + T, padded)     V  vocabulary
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
    data_row: int = -1
    """The number of the question in the task, in the task's own order: the row of task.path, from 0. -1: not known."""
    origin: str = ""
    """The same in words, for messages: `row 7 of data/train.parquet`."""


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
    """One row that is trained: an answer, or one path through the conversation of an episode of several turns.

    Its arrays have one entry for each of the T >= 1 tokens after the prompt. The last token is trained.
    """

    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T] behaviour logprobs, at the logged temperature; 0 where the model did not sample
    versions: IntArray  # [T] token versions, non-decreasing; of other tokens that of the sampled token before them
    mask: BoolArray  # [T] True where the token is trained: the model sampled it, and no earlier row trains it
    reward: float
    """The reward of the whole episode, equal in all its rows."""
    finish_reason: str
    """`stop` (the model ended its last reply), `length` (a limit on tokens or turns did), or `timeout`."""
    turn_ends: tuple[int, ...] = ()
    """The position of the last token of each turn that the row trains. Empty: it is one turn, with the whole reward."""
    turn_rewards: tuple[float, ...] = ()
    """The reward of each of these turns. Over all rows of an episode they add up to its reward."""
    num_too_old: int = 0
    """The number of tokens that are masked only because they are too old (`staleness.late: mask`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """The facts of an episode of several turns besides its tokens: counts of rows, turns and calls, times, and its end.
    """

    rows: int
    """The number of its rollouts, at least 1: more than one if the conversation was forked or rewritten."""
    turns: int
    """The number of replies of the model."""
    tool_calls: int
    """The number of calls of tools in these replies."""
    generate_s: float
    """The time that the engine took, summed over all replies."""
    tool_s: float
    """The time that its tools took, summed over all calls."""
    duration_s: float
    end: str
    """`done`, `length`, `turns` (a limit on tokens or on turns ended it), `timeout` or `error` (its agent raised)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the environment logged."""
    error: str = ""
    """The reason for an `end` other than `done`, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The `group_size` episodes of one prompt: the unit of admission, transport, staleness and training."""

    group_id: int
    prompt_index: int
    start_version: int
    temperature: float
    prompt_tokens: IntArray  # [P] the tokens with which all rows begin, none of them sampled
    rollouts: tuple[Rollout, ...]
    """The rows: one for each answer; of episodes those of the first one, then those of the second, and so on."""
    duration_s: float
    """The time from the grant of the slot to the last reward."""
    worker: str = ""
    baseline_reward: float | None = None
    """The reward of a greedy answer, which is not trained on; None unless the advantage needs it (remax)."""
    keeps_kv: bool = False
    """Whether the answers kept their KV cache over weight updates (`weight_sync.on_update: in_place`)."""
    episodes: tuple[EpisodeFacts, ...] = ()
    """The episodes. Empty if each rollout is an episode of one turn, the answer to a question."""
    data_row: int = -1
    """The `data_row` of the prompt."""
    left_out: tuple[str, ...] = ()
    """The errors of the episodes that have no rollout, because they failed or were dropped."""

    def old_kv(self, rollout: Rollout) -> BoolArray:
        """Return bools [T], True where the token may have been sampled on KV cache of older weights than its version's.

        The behaviour logprob of such a token is right, but recomputing it from scratch gives another value. Only tokens
        of the start version are sure to have KV of their own version.
        """
        return rollout.versions > self.start_version if self.keeps_kv else np.zeros(len(rollout.versions), np.bool_)

    @property
    def episode_rows(self) -> tuple[int, ...]:
        """The number of rollouts of each episode, in order."""
        return tuple(episode.rows for episode in self.episodes) or (1,) * len(self.rollouts)

    @property
    def episode_rewards(self) -> list[float]:
        """The reward of each episode, in order."""
        firsts = itertools.accumulate(self.episode_rows[:-1], initial=0)
        return [self.rollouts[first].reward for first in firsts]

    @property
    def oldest_version(self) -> int:
        """The lowest version of a trained token."""
        return min(int(r.versions[r.mask.argmax()]) for r in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """The number of trained tokens of all rollouts."""
        return sum(int(r.mask.sum()) for r in self.rollouts)


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
