"""A session: the append-only, token-exact conversation of one episode with the engine.

A session is given the whole conversation each time, by an environment's loop or by an agent over HTTP. It finds the
longest part that it knows, renders only the messages that follow, and appends the sampled reply. It is a tree of
stretches of tokens, contexts (rendered) and replies (sampled) in turn:

    context ── reply ── context ── reply          one row
                  └──── context ── reply          another continuation: a second row
    context ── reply                              a history that was rewritten: a new root, all of it masked

Each leaf gives one trainable row. A sampled token is trained in one row only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout_server.engines.base import Completion
from rollout_server.episodes.messages import Message, Schema, extended_digest, prefix_digests
from rollout_server.episodes.rendering import TurnRenderer
from rollout_server.episodes.reply_reader import ReplyReader
from rollout_server.episodes.rows import Node, Row, make_rows

CLOSE_S = 10.0
"""How long `close` waits for the engine to end the requests that it cancels."""

Generate = Callable[[list[int], int], Awaitable[Completion]]
"""Takes the tokens so far and the largest number of tokens to sample; returns what the engine sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The largest sizes of one session: tokens of a row, tokens of a reply, and number of replies."""

    max_tokens: int
    """The number of tokens of a row, prompt included."""
    max_reply_tokens: int
    max_turns: int
    """The number of replies, in all rows together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's reply to a conversation, with why it ended, its number in the session, and counts of tokens."""

    message: Message
    call_errors: tuple[str, ...]
    """A description of each tool call that can't be read."""
    finish_reason: str
    """`stop` (the model ended the reply) or `length` (it ran into a limit)."""
    turn: int
    """The number of the reply in its session, from 0."""
    num_prompt_tokens: int
    num_tokens: int


class EpisodeOver(Exception):
    """The session samples no further reply. `reason` says why."""

    def __init__(self, reason: Literal["length", "turns", "ended"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class SessionCounts:
    """Counts of one session: conversations rendered anew, retries and late requests; and the time of the engine."""

    rewritten: int = 0
    """Conversations that did not continue a known one, and were rendered from the start."""
    retried: int = 0
    """Requests that joined the reply to an earlier, equal request."""
    refused: int = 0
    """Requests after the end of the session."""


class Session:
    """The conversation of one episode with the engine; environments and agents ask it for the model's replies.

    Args:
        generate: samples a reply from the engine.
        reader: reads sampled replies as messages.
    """

    def __init__(
        self, generate: Generate, renderer: TurnRenderer, reader: ReplyReader, limits: SessionLimits
    ) -> None:
        self._generate = generate
        self._renderer = renderer
        self._reader = reader
        self._limits = limits
        self._contexts: dict[bytes, Node] = {}
        """By the digest of the conversation that the context completes."""
        self._known_replies: dict[bytes, Node] = {}
        """By the digest of the conversation up to and including the reply."""
        self._replies: list[Node] = []
        """In the order in which they ended."""
        self._requests: dict[tuple[bytes, int | None, tuple[str, ...]], asyncio.Task[Reply]] = {}
        """The last request for each conversation and its options, running or done: a retry joins it."""
        self._running: set[asyncio.Task[Reply]] = set()
        self._num_begun = 0
        self.is_closed = False
        self.last_answer = ""
        """The content of the last reply."""
        self.reply_times: list[tuple[float, float]] = []
        """The begin and end of each reply's sampling by the event loop's clock, also of replies that failed."""
        self.counts = SessionCounts()

    @property
    def num_turns(self) -> int:
        """The number of replies that were sampled to their end: the turns that the episode has taken."""
        return len(self._replies)

    @property
    def generate_s(self) -> float:
        """The time that the engine took, summed over all replies."""
        return sum(end_s - began_s for began_s, end_s in self.reply_times)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(node.tokens) for node in self._replies)

    @property
    def num_observed_tokens(self) -> int:
        """The number of tokens that were appended to a reply without being sampled."""
        return sum(len(node.tokens) for node in self._contexts.values() if node.parent)

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        is_retry: bool = False,
    ) -> Reply:
        """Return the model's next message in the conversation `messages`.

        The same conversation again gets another sample, unless the request is a retry. A caller that is cancelled does
        not end the sampling, because it may come back with a retry; `close` does.

        Args:
            max_tokens: lowers the limit of this reply.
            stop: cut the reply after the first token that completes one of these texts.
            is_retry: join the reply to an earlier, equal request, if there is one that has not failed.

        Raises:
            EpisodeOver: the session is closed, has no turn left, or the conversation leaves no room for a reply.
            ValueError: the conversation has no message to reply to, or the chat template refuses it.
        """
        if self.is_closed:
            self.counts.refused += 1
            raise EpisodeOver("ended", "the episode has ended, and samples no further reply")
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(f"a conversation must end with a message to reply to, got {_roles(messages)}")
        if tools and not self._reader.reads_calls:
            raise ValueError(
                "tools can't be called: the format of this model's calls is not known. Set rollout.tool_parser to the "
                "name of the format"
            )
        digests = prefix_digests(messages, tools)
        key = (digests[-1], max_tokens, tuple(stop))
        earlier = self._requests.get(key)
        if is_retry and earlier and not _has_failed(earlier):
            self.counts.retried += 1
            return await asyncio.shield(earlier)
        if self._num_begun >= self._limits.max_turns:
            raise EpisodeOver("turns", f"all {self._limits.max_turns} turns of the episode are taken")
        context = self._contexts.get(digests[-1]) or self._new_context(messages, tools, digests)
        room = self._room(context, max_tokens)
        if context.parent is None and self._contexts and digests[-1] not in self._contexts:
            self.counts.rewritten += 1
        self._contexts[digests[-1]] = context
        self._num_begun += 1
        task = asyncio.create_task(self._sample(context, room, digests[-1], tools, stop), name="session reply")
        self._requests[key] = task
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def add_reward(self, turn: int, reward: float) -> None:
        """Add `reward` to the reward of reply number `turn`, which its row gives at the reply's last token."""
        self._replies[turn].reward += reward

    def rows(self) -> list[Row]:
        """Return the trainable rows of all completed replies; a row's last reply decides its place in the list."""
        return make_rows(self._replies)

    async def close(self) -> None:
        """End all running requests and accept no further one. Later calls do nothing."""
        self.is_closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_S)

    def _new_context(self, messages: Sequence[Message], tools: Sequence[Schema], digests: list[bytes]) -> Node:
        """Return a node for a conversation: it continues the longest part that is known, or is a new root.

        Raises:
            EpisodeOver: the conversation is certainly too long.
        """
        if not self._renderer.fits(messages, self._limits.max_tokens):
            raise EpisodeOver("length", f"the messages do not fit into {self._limits.max_tokens} tokens")
        return self._continuation(messages, digests) or Node(None, self._renderer.start(messages, tools))

    def _continuation(self, messages: Sequence[Message], digests: list[bytes]) -> Node | None:
        """Return a node with the messages that follow the last known reply.

        It is None if no reply in the conversation is known, or if the messages can't be rendered after it.
        """
        for known in range(len(messages) - 1, 0, -1):
            reply = self._known_replies.get(digests[known])
            if reply is None:
                continue
            new = messages[known:]
            if not self._renderer.roles.issuperset(message["role"] for message in new):
                return None
            return Node(reply, self._renderer.next(reply.tokens, new))
        return None

    def _room(self, context: Node, max_tokens: int | None) -> int:
        limits, length = self._limits, context.num_tokens
        room = min(limits.max_tokens - length, limits.max_reply_tokens)
        if room < 1:
            raise EpisodeOver(
                "length", f"the conversation has {length} tokens, at most {limits.max_tokens} are allowed"
            )
        return room if max_tokens is None else max(1, min(room, max_tokens))

    async def _sample(
        self, context: Node, room: int, digest: bytes, tools: Sequence[Schema], stop: Sequence[str]
    ) -> Reply:
        began_s = asyncio.get_running_loop().time()
        try:
            sampled = await self._generate(context.all_tokens(), room)
        except BaseException:
            self._num_begun -= 1
            raise
        finally:
            self.reply_times.append((began_s, asyncio.get_running_loop().time()))
        if stop:
            sampled = self._reader.cut(sampled, stop)
        node = Node(context, sampled.tokens.tolist(), sampled)
        turn = len(self._replies)
        self._replies.append(node)
        read = await self._reader.read(node.tokens, tools, stop)
        message = read.message
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call{100 * turn + number:05}"  # nine letters and digits: some templates want that
        self.last_answer = message["content"]
        self._known_replies.setdefault(extended_digest(digest, message), node)
        return Reply(
            message=message,
            call_errors=read.errors,
            finish_reason=sampled.finish_reason,
            turn=turn,
            num_prompt_tokens=context.num_tokens,
            num_tokens=len(node.tokens),
        )

    def _on_done(self, task: asyncio.Task[Reply]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen, because a caller that went away does not


def _has_failed(task: asyncio.Task[Reply]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages[-5:]]
