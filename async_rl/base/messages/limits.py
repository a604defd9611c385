"""The largest sizes of a run's groups in messages, and what each group must contain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from async_rl.base.config import Config
from async_rl.base.models_and_data.experts import recorded_experts
from async_rl.base.types import (
    MAX_METRICS,
    MAX_NAME_CHARS,
    Array,
    EpisodeFacts,
    GroupFacts,
    Kind,
    Metrics,
    PerToken,
    PerTurn,
    Row,
    Scalar,
    Text,
    kinds_of,
)

MAX_VOCABULARY = 2**20
"""The most token ids of a model."""
MAX_COLUMN_BYTES = 2**29
"""The largest packed column of a group before compression (messages/packed.py)."""
VARINT_BYTES = 4
"""The longest varint in a packed column, for a number below 2^28."""
MAX_EXPERTS = 2**16
"""The most experts of a layer."""
MESSAGE_BYTES = 64
"""The most bytes of a prompt's chat messages for each token of max_prompt_tokens. An average token has about 4."""


def _most_bytes(kind: Kind) -> int:
    """Return the most bytes of a field in a message; for an array, of one element."""
    match kind:
        case Array(dtype=dtype):
            return np.dtype(dtype).itemsize
        case Text(max_chars=max_chars):
            return 4 * max_chars
        case Metrics():
            return MAX_METRICS * (4 * MAX_NAME_CHARS + 16)
    return 16


def _most_bytes_of(declared: type, kind: type[Kind]) -> int:
    """Return the most bytes of all fields of this kind in a class, together."""
    return sum(map(_most_bytes, kinds_of(declared, kind).values()))


def most_support_bytes(tokens: int, max_ids: int) -> int:
    """Return the most bytes of the supports of `tokens` tokens before compression, including a logprob of each id.

    Args:
        max_ids: the most ids of a token's support.
    """
    return min(tokens * VARINT_BYTES * (1 + 2 * max_ids), MAX_COLUMN_BYTES)


_GROUP_BYTES = 4096 + _most_bytes_of(GroupFacts, Scalar)
_EPISODE_BYTES = 512 + _most_bytes_of(EpisodeFacts, Scalar)
_ROW_BYTES = 512 + _most_bytes_of(Row, Scalar)
_TOKEN_BYTES, _TURN_BYTES = _most_bytes_of(Row, PerToken), _most_bytes_of(Row, PerTurn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed sizes of a group in this run. A message outside these limits is refused."""

    group_size: int
    """The most episodes of a group: answers to a question, or multi-turn episodes."""
    fewest_episodes: int
    """The fewest episodes of a group, from which failed ones and those without a verdict are left out."""
    max_rows: int
    """The most rows of all episodes of a group together."""
    max_turns: int
    """The most turns of an episode; 0: only answers to a question are allowed."""
    max_prompt_tokens: int
    max_response_tokens: int
    needs_baseline: bool = False
    """Whether a group must have the reward of a greedy answer. A group from before a resume may lack it."""
    needs_support: bool = False
    """Whether a group must have each token's support (the ids it was drawn from). One from before a resume may lack it.
    """
    needs_support_logprobs: bool = False
    """Whether each id in a support must have its logprob."""
    max_support_ids: int = 0
    """The most ids in a token's support; 0: groups must not have supports."""
    needs_routing: bool = False
    """Whether a group must have the experts of each token. A group from before a resume may lack them."""
    num_experts: int = 0
    """The number of experts in a layer; 0: groups must not have a routing."""
    router_layers: int = 0
    """The number of layers with a router; 0: any number of layers, and of experts per token, is allowed."""
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        experts = recorded_experts(config)
        return cls(
            group_size=config.rollout.group_size,
            fewest_episodes=config.fewest_episodes,
            max_rows=config.max_rows_per_group,
            max_turns=config.rollout.max_turns if config.task.has_turns else 0,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_response_tokens=config.longest_response_tokens,
            needs_baseline=config.algorithm.advantage_entry.needs_greedy_baseline,
            needs_support=config.records_support,
            needs_support_logprobs=config.algorithm.loss_entry.needs_heads,
            max_support_ids=(config.rollout.top_k or MAX_VOCABULARY) if config.records_support else 0,
            needs_routing=experts is not None,
            num_experts=experts.count if experts else 0,
            router_layers=len(experts.layers) if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
        )

    @classmethod
    def of_stored(cls, data: bytes, num_episodes: int | None) -> Limits:
        """Return limits that a stored group meets whatever its sizes are.

        They are for groups that were checked before they were stored: a resume may have changed the config since then.

        Args:
            data: the bytes of the group.
            num_episodes: the number of its episodes; None: not known.
        """
        size = len(data)
        return cls(
            group_size=num_episodes or size, fewest_episodes=num_episodes or 1, max_rows=size, max_turns=size,
            max_prompt_tokens=size, max_response_tokens=size, max_support_ids=MAX_VOCABULARY,
            num_experts=MAX_EXPERTS,
        )  # fmt: skip

    @property
    def max_left_out(self) -> int:
        """The most errors of left-out episodes in a group."""
        return self.max_rows

    @property
    def max_group_bytes(self) -> int:
        """The most bytes of a valid group: 13 for each response token, 68 for each prompt token, some for the rest.

        Supports and routing may take more than everything else.
        """
        of_rows = self.max_rows * (_ROW_BYTES + _TOKEN_BYTES * self.max_response_tokens)
        of_episodes = self.group_size * (_EPISODE_BYTES + _TURN_BYTES * self.max_turns) if self.max_turns else 0
        of_prompt = (4 + MESSAGE_BYTES) * self.max_prompt_tokens
        choices = (1 if self.num_experts <= 256 else 2) * self.router_layers * self.experts_per_token
        of_routing = self.max_rows * (self.max_prompt_tokens + self.max_response_tokens) * choices
        # What zstd can't compress grows by less than 1 %.
        of_supports = most_support_bytes(self.max_rows * self.max_response_tokens, self.max_support_ids)
        return _GROUP_BYTES + of_prompt + of_rows + of_episodes + (of_supports + of_routing) * 101 // 100
