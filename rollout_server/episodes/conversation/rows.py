"""Makes trainable rows of a session's tree, and splits them into the prompt that a group shares and their responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from async_rl.base.types import BoolArray, FloatArray, IntArray
from rollout_server.engines.base import SampledReply


@dataclass(slots=True, eq=False)
class Node:
    """A stretch of tokens of a conversation: a context (rendered) or a reply (sampled)."""

    parent: Node | None
    tokens: list[int]
    sampled: SampledReply | None = None
    """The reply; None for a context."""
    reward: float = 0.0
    num_tokens: int = field(init=False)
    """The number of tokens from the root to the end of this node."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens) + (self.parent.num_tokens if self.parent else 0)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def all_tokens(self) -> list[int]:
        """Return the tokens from the root to the end of this node."""
        return [token for node in self.path() for token in node.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRow:
    """One trainable row: a path of a session's tree from a root to a leaf. The last of its S >= 2 tokens is trained."""

    tokens: IntArray  # [S]
    logprobs: FloatArray  # [S] behaviour logprobs, 0 where the mask is False
    versions: IntArray  # [S] token versions, non-decreasing; of other tokens that of the sampled token before them
    mask: BoolArray  # [S] True where the token is trained: the model sampled it, and no other row trains it
    num_start_tokens: int
    """The number of tokens before the first sampled one."""
    turn_ends: tuple[int, ...]
    """The position of the last token of each turn that this row trains."""
    turn_rewards: tuple[float, ...]
    """The reward of each turn that this row trains."""
    finish_reason: str
    """`stop` or `length`, of the last reply."""


def make_rows(replies: Sequence[Node], max_rows: int = 0) -> list[WholeRow]:
    """Return one row for each leaf of a session's tree, whose replies are given, in their order.

    A reply that several leaves share is trained in the row of the first of them, or of the first of those that are
    kept, if one of them is.

    Args:
        max_rows: the number of rows, the last ones, that are kept; 0: all of them.
    """
    inner: set[Node | None] = {None}
    for reply in replies:
        node = reply.parent
        while node not in inner:
            inner.add(node)
            node = node.parent if node else None
    leaves = [reply for reply in replies if reply not in inner]
    kept, dropped = leaves[-max_rows:], leaves[:-max_rows]  # all and none if max_rows is 0
    trained: set[Node] = set()
    rows = {}
    for leaf in (*kept, *dropped):
        path = leaf.path()
        rows[leaf] = _make_row(path, trained)
        trained.update(path)
    return [rows[leaf] for leaf in leaves]


def _make_row(path: Sequence[Node], trained: set[Node]) -> WholeRow:
    leaf = path[-1].sampled
    assert leaf is not None and path[0].sampled is None, "a path leads from a context to a reply"
    logprobs = [np.zeros(len(node.tokens), np.float32) for node in path]
    mask = [np.zeros(len(node.tokens), np.bool_) for node in path]
    turn_ends, turn_rewards, end = [], [], 0
    for position, node in enumerate(path):
        end += len(node.tokens)
        if node.sampled is not None and node not in trained:
            logprobs[position] = node.sampled.logprobs
            mask[position][:] = True
            turn_ends.append(end - 1)
            turn_rewards.append(node.reward)
    return WholeRow(
        tokens=np.array(path[-1].all_tokens(), np.int32),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(list(_versions(path))),
        mask=np.concatenate(mask),
        num_start_tokens=len(path[0].tokens),
        turn_ends=tuple(turn_ends),
        turn_rewards=tuple(turn_rewards),
        finish_reason=leaf.finish_reason,
    )


def _versions(path: Sequence[Node]) -> Iterator[IntArray]:
    """Yield the token versions of each node. Rendered tokens have the version of the sampled token before them or, at
    the start, of the first sampled token.
    """
    first = path[1].sampled
    assert first is not None, "a reply follows each context"
    version = first.versions[0]
    for node in path:
        if node.sampled is not None:
            yield node.sampled.versions
            version = node.sampled.versions[-1]
        else:
            yield np.full(len(node.tokens), version, np.int32)


def num_shared_tokens(rows: Sequence[WholeRow], max_tokens: int) -> int:
    """Return the length of the prompt of a group: the longest common start of its rows without a sampled token.

    It is at most `max_tokens`. Tokens after it are in each row's response, where they are masked.
    """
    length = min([max_tokens, *(row.num_start_tokens for row in rows)])
    columns = np.stack([row.tokens[:length] for row in rows])
    differs = (columns != columns[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else length
