"""Defines the largest sizes of the rollout groups of a run, as messages."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config import Config
from async_rl.messages.message_reader import MAX_NAME_CHARS

MAX_METRICS = 64
"""The most metrics that the environment may log in one episode; their names have at most MAX_NAME_CHARS characters."""
MAX_CAUSE_CHARS = 2000
"""The longest text of the error of an episode or a group; the rest is cut off."""
_EPISODE_BYTES = 512 + MAX_METRICS * (4 * MAX_NAME_CHARS + 16) + 4 * MAX_CAUSE_CHARS
_TURN_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The sizes that a rollout group of this run may have; a message outside these limits is refused."""

    group_size: int
    """The number of answers to a question, and the most episodes of several turns."""
    fewest_episodes: int
    """The fewest episodes of several turns, because those that failed are left out."""
    max_rows: int
    """The most rollouts of all episodes of several turns together."""
    max_turns: int
    """The most turns of an episode; 0 if only answers to a question are allowed."""
    max_prompt_tokens: int
    max_response_tokens: int

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        return cls(
            group_size=config.rollout.group_size,
            fewest_episodes=config.fewest_episodes,
            max_rows=config.max_rows_per_group,
            max_turns=config.rollout.max_turns if config.task.has_turns else 0,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_response_tokens=config.longest_response_tokens,
        )

    @classmethod
    def of_stored(cls, data: bytes, num_episodes: int) -> Limits:
        """Return limits that the bytes of a stored group with `num_episodes` episodes are within, whatever its sizes.

        A resume may have changed the config since the group was checked and stored.
        """
        size = len(data)
        return cls(
            group_size=num_episodes, fewest_episodes=num_episodes, max_rows=size, max_turns=size,
            max_prompt_tokens=size, max_response_tokens=size,
        )  # fmt: skip

    @property
    def max_group_bytes(self) -> int:
        """The most bytes of a valid group: 13 for each response token, 4 for each prompt token, some for the rest."""
        of_rows = self.max_rows * (512 + 13 * self.max_response_tokens)
        of_episodes = self.group_size * (_EPISODE_BYTES + _TURN_BYTES * self.max_turns) if self.max_turns else 0
        return 4096 + 4 * self.max_prompt_tokens + of_rows + of_episodes
