"""A finished episode, its trainable rows, the rows of a group for the learner, and the player of single-turn tasks.

Other tasks are played by rollout_server/episodes/multi_turn.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from async_rl.base.errors import AsyncRLError
from async_rl.base.telemetry.metrics import ENDED_EPISODES, Metric
from async_rl.base.types import (
    BoolArray,
    EpisodeEnd,
    EpisodeFacts,
    FloatArray,
    IntArray,
    RoutingArray,
    Row,
    Support,
)
from rollout_server.engines.base import GenerationRequest, SampledReply

if TYPE_CHECKING:
    from rollout_server.episodes.conversation.chat_messages import Message

End = Literal[EpisodeEnd, "failed"]
ENDS: tuple[End, ...] = get_args(End)
GenerateReplies = Callable[[GenerationRequest], Awaitable[list[SampledReply]]]
"""Sends a request to the engine and returns its replies."""

Waiting = Callable[[str, str, float, str], AbstractContextManager[None]]
"""Makes a context that shows a wait in the worker's status; see WorkerStats.waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRow:
    """One trainable row, prompt included. It has S >= 2 tokens; the last token is trained."""

    tokens: IntArray  # [S]
    logprobs: FloatArray  # [S] behaviour logprobs, 0 where the mask is False
    versions: IntArray  # [S] token versions, non-decreasing. Other tokens have the version of the sampled one before
    mask: BoolArray  # [S] True where the token is trained: the model sampled it, and no other row trains it
    num_start_tokens: int
    """The number of tokens before the first sampled one."""
    turn_ends: tuple[int, ...]
    """The position of the last token of each turn that this row trains."""
    turn_rewards: tuple[float, ...]
    """The reward of each turn that this row trains."""
    finish_reason: str
    """`stop` or `length`: why the last reply ended."""
    support: Support | None = None
    """[S] the ids that each trained token was drawn from, if the engine has recorded them."""
    routing: RoutingArray | None = None
    """[S - 1, layers, k] the experts that each token except the last was fed through in its first forward pass, if
    the engine has recorded them."""


@dataclass(slots=True, eq=False)
class Node:
    """A part of a conversation in tokens: a context (rendered) or a reply (sampled)."""

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


def whole_row(path: Sequence[Node], trained: Collection[Node] = ()) -> WholeRow:
    """Return the row of a path from a context to a reply.

    Args:
        trained: the replies that other rows train.
    """
    leaf = path[-1].sampled
    assert leaf is not None and path[0].sampled is None, "a path leads from a context to a reply"
    logprobs = [np.zeros(len(node.tokens), np.float32) for node in path]
    mask = [np.zeros(len(node.tokens), np.bool_) for node in path]
    supports = [Support.none(len(node.tokens)) for node in path]
    turn_ends, turn_rewards, end = [], [], 0
    for position, node in enumerate(path):
        end += len(node.tokens)
        if node.sampled is not None and node not in trained:
            logprobs[position] = node.sampled.logprobs
            mask[position][:] = True
            supports[position] = node.sampled.support or supports[position]
            turn_ends.append(end - 1)
            turn_rewards.append(node.reward)
    return WholeRow(
        tokens=np.array(path[-1].all_tokens(), np.int32),
        logprobs=np.concatenate(logprobs),
        versions=np.concatenate(list(_versions(path))),
        mask=np.concatenate(mask),
        support=leaf.support and Support.joined(supports),
        num_start_tokens=len(path[0].tokens),
        turn_ends=tuple(turn_ends),
        turn_rewards=tuple(turn_rewards),
        finish_reason=leaf.finish_reason,
        routing=_routing(path),
    )


def _routing(path: Sequence[Node]) -> RoutingArray | None:
    """Return the experts that each token of the path, except the last, was fed through in its first forward pass.

    The routing recorded with a reply also covers the conversation before it, which the engine may have computed again
    with newer weights. That part is ignored.
    """
    parts: list[RoutingArray] = []
    known = 0
    for node in path:
        if node.sampled is not None:
            if node.sampled.routing is None:
                return None
            parts.append(node.sampled.routing[known:])
            known = node.num_tokens - 1
    return np.concatenate(parts)


def _versions(path: Sequence[Node]) -> Iterator[IntArray]:
    """Yield the token versions of each node of the path.

    Rendered tokens get the version of the sampled token before them, or at the start that of the first sampled token.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished episode."""

    rows: tuple[WholeRow, ...]
    """The trainable rows. Empty if the episode failed, was dropped, or sampled no reply."""
    answer: str
    """The content of the model's last reply."""
    end: End
    """Why the episode ended. done: the environment ended it, or it answered a question. length, turns: no room or no
    turn was left. timeout: see `error`. error: the agent raised because of the model's reply, and the reward is 0.
    failed: the environment or the agent failed, and the episode has no rows."""
    error: str = ""
    """Why the episode ended, as a sentence. Empty if `end` is done."""
    error_kind: str = ""
    """A text that is equal for errors of the same class and source line, whatever their messages."""
    traceback: str = ""
    """The traceback of the environment's or the agent's error."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics with the keys `EPISODE_METRICS`, and the environment's metrics as `env/<name>`. Empty for a question."""
    messages: tuple[Message, ...] = ()
    """The conversation that the model saw last, with its last reply."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Scores and metrics by the name of the reward. `env`: the reward of the environment or the agent."""
    has_verdict: bool = True
    """False: a reward could not score the episode, so it has no rows."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        return sum(reward for row in self.rows for reward in row.turn_rewards)

    def with_reward(self, reward: float, rewards: Mapping[str, float] = MappingProxyType({})) -> Episode:
        """Return a copy of the episode with `reward` added to its last turn.

        `rewards` are the parts of that reward, by name.
        """
        *rows, last = self.rows
        *earlier, last_reward = last.turn_rewards
        last = replace(last, turn_rewards=(*earlier, last_reward + reward))
        return replace(self, rows=(*rows, last), rewards={**self.rewards, **rewards})


EPISODE_METRICS = (
    "turns", "tool_calls", "failed_tool_calls", "tool_s", "generate_s", "duration_s", "sampled_tokens",
    "observed_tokens", "timeouts", "failed", "rewritten", "leaked_tasks", "given_up_calls",
)  # fmt: skip
"""The metrics of every multi-turn episode. `timeouts` counts overdue calls and an overdue episode; `failed` counts
failed attempts."""

_SUMMED = ("timeouts", "failed", "rewritten", "leaked_tasks", "given_up_calls", "dropped_rows")
"""Counts of rare events. The log has their sum over a step; for the other metrics it has the mean."""


def episode_metrics(episodes: Sequence[Mapping[str, float]]) -> Iterator[Metric]:
    """Yield the metrics `episode/<name>` over several episodes: the sum of rare counts, the mean of the others.

    `episode/ended`, the number of episodes, is the weight for averaging the means over steps.
    """
    if episodes:
        yield Metric(ENDED_EPISODES, len(episodes), "sum", unit="episodes")
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.items():
            values.setdefault(name, []).append(value)
    for name, found in values.items():
        if name in _SUMMED:
            yield Metric(f"episode/{name}", sum(found), "sum")
        else:
            yield Metric(f"episode/{name}", sum(found) / len(found), weight=len(found), by=ENDED_EPISODES)


class GroupRows(NamedTuple):
    """Four fields of `Group`, computed from a group's episodes."""

    prompt_tokens: IntArray  # [P]
    rows: tuple[Row, ...]
    episodes: tuple[EpisodeFacts, ...]
    left_out: tuple[str, ...]


def group_rows(episodes: Sequence[Episode], max_prompt_tokens: int, max_rows: int) -> GroupRows:
    """Return the shared prompt and the rows of a group of multi-turn episodes: each episode's last `max_rows` rows.

    Args:
        episodes: at least one has rows. Episodes without rows are left out.
        max_prompt_tokens: the longest prompt of the group. The rest of a longer common start belongs to each row's
            response, where it is masked.
    """
    played = [episode for episode in episodes if episode.rows]
    kept = [_last_rows(episode.rows, max_rows) for episode in played]
    num_prompt = num_shared_tokens([row for rows in kept for row in rows], max_prompt_tokens)
    rows = tuple(
        row for episode, rows in zip(played, kept, strict=True) for row in _rows(rows, num_prompt, episode.rewards)
    )
    facts = tuple(_facts(episode, len(rows)) for episode, rows in zip(played, kept, strict=True))
    return GroupRows(kept[0][0].tokens[:num_prompt], rows, facts, _left_out(episodes))


def _left_out(episodes: Sequence[Episode]) -> tuple[str, ...]:
    return tuple(episode.error for episode in episodes if not episode.rows)


def _last_rows(rows: Sequence[WholeRow], max_rows: int) -> Sequence[WholeRow]:
    """Return the last `max_rows` rows. The rewards of dropped rows are added to the first turn that is kept."""
    dropped, (first, *rest) = rows[:-max_rows], rows[-max_rows:]
    earned = sum(reward for row in dropped for reward in row.turn_rewards)
    reward, *later = first.turn_rewards
    return [replace(first, turn_rewards=(reward + earned, *later)), *rest]


def question_rows(episodes: Sequence[Episode], prompt_tokens: IntArray) -> GroupRows:
    """Return the rows of a group without turns: each episode's answer to the question.

    Args:
        prompt_tokens: [P] the tokens of the question.
    """
    rows = (
        _row(row, len(prompt_tokens), row.turn_rewards[0], episode.rewards)
        for episode in episodes for row in episode.rows
    )
    return GroupRows(prompt_tokens, tuple(rows), (), _left_out(episodes))


def _rows(rows: Sequence[WholeRow], num_prompt: int, rewards: Mapping[str, float]) -> Iterator[Row]:
    """Yield the rows of one episode. Each has the episode's reward, which is the sum over all turns."""
    reward = float(sum(reward for row in rows for reward in row.turn_rewards))
    for row in rows:
        ends = tuple(end - num_prompt for end in row.turn_ends)
        yield _row(row, num_prompt, reward, rewards, ends, row.turn_rewards)


def _row(
    row: WholeRow, num_prompt: int, reward: float, rewards: Mapping[str, float],
    turn_ends: tuple[int, ...] = (), turn_rewards: tuple[float, ...] = (),
) -> Row:
    return Row(
        tokens=row.tokens[num_prompt:], logprobs=row.logprobs[num_prompt:], versions=row.versions[num_prompt:],
        mask=row.mask[num_prompt:], reward=reward, finish_reason=row.finish_reason,
        support=row.support and row.support.cut(num_prompt, len(row.tokens)),
        rewards=rewards, turn_ends=turn_ends, turn_rewards=turn_rewards, routing=row.routing,
    )  # fmt: skip


def _facts(episode: Episode, num_rows: int) -> EpisodeFacts:
    values, prefix = episode.metrics, "env/"
    return EpisodeFacts(
        rows=num_rows, turns=int(values["turns"]), tool_calls=int(values["tool_calls"]),
        generate_s=values["generate_s"], tool_s=values["tool_s"], duration_s=values["duration_s"], end=episode.end,
        metrics={key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)},
        error=episode.error,
    )  # fmt: skip


def num_shared_tokens(rows: Sequence[WholeRow], max_tokens: int) -> int:
    """Return the length of a group's prompt: the longest common start of its rows without a sampled token.

    It is at most `max_tokens`. Later tokens that were not sampled are in each row's response, where they are masked.
    """
    length = min([max_tokens, *(row.num_start_tokens for row in rows)])
    columns = np.stack([row.tokens[:length] for row in rows])
    differs = (columns != columns[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else length


class Player(ABC):
    """Plays all episodes of one worker, many at the same time."""

    @abstractmethod
    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play `request.n` episodes of a group, and return them in order. Failed episodes have no rows.

        Raises:
            AsyncRLError: the engine failed.
        """

    def drain_counts(self) -> dict[str, int]:
        """Return the counts of the agents' endpoint (`requests`, `retries`, ...) since the last call, and reset them.
        """
        return {}

    def drain_notes(self) -> list[str]:
        """Return the new lines for the console since the last call."""
        return []

    async def aclose(self) -> None:
        """Stop the endpoint and the process of agents, if there are any."""
        return None


class SingleTurnPlayer(Player):
    """Plays the episodes of a single-turn task.

    All answers to a question are one request to the engine. There are no sessions: they would take CPU from the engine,
    and the conversation ends with the first reply.
    """

    def __init__(self, tokenizer: Any, generate: GenerateReplies) -> None:
        self._tokenizer = tokenizer
        self._generate = generate

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Return `request.n` episodes in order, each with one answer and without a reward.

        Raises:
            AsyncRLError: the engine failed, or did not return `request.n` answers.
            ValueError: the prompt is empty or has a token that the model does not have.
        """
        replies = await all_replies(self._generate, request)
        question = request.prompt.question
        asked: list[Message] = [
            {"role": each["role"], "content": each["content"]} for each in (question.messages if question else ())
        ]
        context = Node(None, request.prompt.tokens.tolist())
        nodes = [Node(context, reply.tokens.tolist(), reply) for reply in replies]
        answers = self._tokenizer.batch_decode([node.tokens for node in nodes], skip_special_tokens=True)
        return [
            Episode(
                rows=(whole_row([context, node]),), answer=answer, end="done",
                messages=(*asked, {"role": "assistant", "content": answer}),
            )
            for node, answer in zip(nodes, answers, strict=True)
        ]  # fmt: skip


async def all_replies(generate: GenerateReplies, request: GenerationRequest) -> list[SampledReply]:
    """Send a request to the engine and return its replies. Raises AsyncRLError if their number is not `request.n`."""
    replies = await generate(request)
    if len(replies) != request.n:
        raise AsyncRLError(
            f"the engine must answer request {request.key} with {request.n} replies, got "
            f"{len(replies)}: correct the `generate` of the engine that rollout.engine names"
        )
    return replies
