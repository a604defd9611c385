"""A session: the append-only, token-exact conversation of one episode with the engine.

A session is given the whole conversation each time, by an environment's loop or by an agent over HTTP. It finds the
longest part that it knows, renders only the messages that follow, and appends the sampled reply. It is a tree of
stretches of tokens, contexts (rendered) and replies (sampled) in turn:

    context ── reply ── context ── reply          one row
                  └──── context ── reply          another continuation: a second row
    context ── reply                              a history that was rewritten: a new root, all of it masked

Each leaf gives one trainable row. A sampled token is trained in one row only, and only if a caller has received it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.messages import Message, Schema, extended_digest, prefix_digests
from rollout_server.episodes.conversation.pending_replies import PendingReplies, PendingReply, RequestKey
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.rows import Node, WholeRow, make_rows

CLOSE_S = 10.0
"""How long `close` waits for the engine to end the requests that it cancels."""

Generate = Callable[[list[int], int], Awaitable[SampledReply]]
"""Takes the tokens so far and the largest number of tokens to sample; returns what the engine sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The largest sizes of one session: tokens of a row, tokens of a reply, and numbers of replies and of rows."""

    max_tokens: int
    """The number of tokens of a row, prompt included."""
    max_reply_tokens: int
    max_turns: int
    """The number of replies, in all rows together."""
    max_rows: int = 0
    """The number of rows that are trained, the last ones; 0: all of them."""


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
    """Counts of one session: conversations rendered anew, requests that joined another's reply, and late requests."""

    rewritten: int = 0
    """Conversations that did not continue a known one, and were rendered from the start."""
    joined: int = 0
    """Requests that got the reply to an earlier, equal request, which its caller had not received."""
    refused: int = 0
    """Requests after the end of the session."""
    tool_calls: int = 0
    """Calls of tools in the replies that were received, also those that can't be read."""


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
        self.contexts: dict[bytes, Node] = {}
        """By the digest of the conversation that the context completes."""
        self._known_replies: dict[bytes, Node] = {}
        """By the digest of the conversation up to and including the reply."""
        self._replies: list[Node] = []
        """In the order of their ends, also the ones that nobody has received."""
        self._received: set[Node] = set()
        self._pending: PendingReplies[Reply] = PendingReplies()
        self._running: set[asyncio.Task[Reply]] = set()
        self.is_closed = False
        self.last_answer = ""
        """The content of the last reply that was received."""
        self.last_messages: tuple[Message, ...] = ()
        """The conversation of the last reply that was received, with it at the end."""
        self.generate_s = 0.0
        """The time that the engine took, summed over all replies, also those that failed."""
        self.counts = SessionCounts()

    @property
    def num_turns(self) -> int:
        """The number of replies that were received: the turns that the episode has taken."""
        return len(self._received)

    @property
    def num_undelivered(self) -> int:
        """The number of replies that were sampled to their end, and that nobody has received."""
        return len(self._replies) - len(self._received)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(node.tokens) for node in self._received)

    @property
    def num_observed_tokens(self) -> int:
        """The number of tokens that were appended to a reply without being sampled."""
        return sum(len(node.tokens) for node in self.contexts.values() if node.parent)

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        is_retry: bool = False,
    ) -> Reply:
        """Return the model's next message in the conversation `messages`; see `offer` for the arguments and errors."""
        async with self.offer(messages, tools, max_tokens=max_tokens, stop=stop, is_retry=is_retry) as reply:
            return reply

    @asynccontextmanager
    async def offer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        is_retry: bool = False,
    ) -> AsyncIterator[Reply]:
        """Yield the model's next message in the conversation `messages`. It is received when the block ends.

        If the block raises, or the caller is cancelled before, nobody has received the reply: the next equal request
        gets it, and if there is none by the end, it is in no row and takes no turn. Equal requests whose callers are
        all there get a sample each.

        Args:
            max_tokens: lowers the limit of this reply.
            stop: cut the reply after the first token that completes one of these texts.
            is_retry: the caller did not receive the reply to an earlier, equal request. If one is under way, this
                request waits to see whether its reply becomes free.

        Raises:
            EpisodeOver: the session is closed, has no turn left, or the conversation leaves no room for a reply.
            ValueError: the conversation has no message to reply to, or the chat template refuses it.
        """
        self._check(messages, tools)
        digests = prefix_digests(messages, tools)
        key = (digests[-1], max_tokens, tuple(stop))
        pending = await self._free_reply(key, is_retry) or await self._begin(messages, tools, digests, key)
        try:
            reply = await asyncio.shield(pending.sampling)
            yield reply
        except BaseException:
            self._pending.release(pending)
            raise
        node = self._replies[reply.turn]
        self._received.add(node)
        self._known_replies.setdefault(extended_digest(digests[-1], reply.message), node)
        self.last_answer = reply.message["content"]
        self.last_messages = (*messages, reply.message)
        self.counts.tool_calls += len(reply.message.get("tool_calls", ())) + len(reply.call_errors)
        self._pending.remove(pending)

    def _check(self, messages: Sequence[Message], tools: Sequence[Schema]) -> None:
        """Raise EpisodeOver or ValueError if there can be no reply to these messages."""
        self._check_open()
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(f"a conversation must end with a message to reply to, got {_roles(messages)}")
        if tools and not self._reader.reads_calls:
            raise ValueError(
                "tools can't be called: the format of this model's calls is not known. Set rollout.tool_parser to the "
                "name of the format"
            )
        if not self._renderer.fits(messages, tools, self._limits.max_tokens):
            what = "messages and tools do" if tools else "messages do"
            most = f"{self._limits.max_tokens} tokens (rollout.max_episode_tokens)"
            raise EpisodeOver("length", f"the {what} not fit into {most}")

    def _check_open(self) -> None:
        if self.is_closed:
            self.counts.refused += 1
            raise EpisodeOver("ended", "the episode has ended, and samples no further reply")

    async def _free_reply(self, key: RequestKey, is_retry: bool) -> PendingReply[Reply] | None:
        """Return a reply to an equal request whose caller has gone; None if there is none.

        A retry waits for the replies whose callers are still there. One caller may be its own earlier request, because
        the end of a connection can be noticed late. This wait ends with the sampling, whose time is limited, and with
        `close`.
        """
        while (pending := self._pending.take(key)) is None and is_retry:
            if not await self._pending.wait(key):
                break
            self._check_open()
        self.counts.joined += pending is not None
        return pending

    async def _begin(
        self, messages: Sequence[Message], tools: Sequence[Schema], digests: list[bytes], key: RequestKey
    ) -> PendingReply[Reply]:
        """Start to sample a reply. If no turn is left, one is taken back from a reply that nobody waits for.

        Raises:
            EpisodeOver: the session is closed, no turn is left, or the conversation is too long.
        """
        self._check_turns()
        context = self.contexts.get(digests[-1]) or await self._new_context(messages, tools, digests)
        self._check_open()
        _, max_tokens, stop = key
        longest = self._longest_reply(context, max_tokens)
        if self._check_turns() == 0:
            self._pending.give_up()
        if context.parent is None and self.contexts and digests[-1] not in self.contexts:
            self.counts.rewritten += 1
        self.contexts[digests[-1]] = context
        sampling = asyncio.create_task(self._sample(context, longest, tools, stop), name="session reply")
        self._running.add(sampling)
        sampling.add_done_callback(self._running.discard)
        return self._pending.add(key, sampling)

    def _check_turns(self) -> int:
        """Return the number of turns that are left. EpisodeOver: none is, and none can be taken back."""
        left = self._limits.max_turns - self.num_turns - len(self._pending)
        if left == 0 and not self._pending.can_give_up():
            raise EpisodeOver("turns", f"all {self._limits.max_turns} turns of the episode are taken")
        return left

    def add_reward(self, turn: int, reward: float) -> None:
        """Add `reward` to the reward of reply number `turn`, which its row gives at the reply's last token."""
        self._replies[turn].reward += reward

    def rows(self) -> list[WholeRow]:
        """Return the trainable rows of all received replies; a row's last reply decides its place in the list."""
        return make_rows([reply for reply in self._replies if reply in self._received], self._limits.max_rows)

    async def close(self) -> None:
        """End all running requests and accept no further one. Later calls do nothing."""
        self.is_closed = True
        self._pending.wake_all()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_S)

    async def _new_context(self, messages: Sequence[Message], tools: Sequence[Schema], digests: list[bytes]) -> Node:
        """Return a node for a conversation: it continues the longest part that is known, or is a new root.

        It is a new root too if the messages after the known part can't be rendered without the others.
        """
        for known in range(len(messages) - 1, 0, -1):
            reply = self._known_replies.get(digests[known])
            if reply is None:
                continue
            new = messages[known:]
            if not self._renderer.roles.issuperset(message["role"] for message in new):
                break
            return Node(reply, await self._renderer.next_async(reply.tokens, new))
        return Node(None, await self._renderer.start_async(messages, tools))

    def _longest_reply(self, context: Node, max_tokens: int | None) -> int:
        """Return the most tokens that the next reply may have, `max_tokens` of them if the caller asked for fewer.

        EpisodeOver: the conversation is as long as it may be.
        """
        limits, length = self._limits, context.num_tokens
        longest = min(limits.max_tokens - length, limits.max_reply_tokens)
        if longest < 1:
            raise EpisodeOver(
                "length",
                f"the conversation has {length} tokens, and with a reply at most {limits.max_tokens} are allowed "
                "(rollout.max_episode_tokens)",
            )
        return longest if max_tokens is None else max(1, min(longest, max_tokens))

    async def _sample(self, context: Node, max_tokens: int, tools: Sequence[Schema], stop: Sequence[str]) -> Reply:
        began_s = asyncio.get_running_loop().time()
        try:
            sampled = await self._generate(context.all_tokens(), max_tokens)
        finally:
            self.generate_s += asyncio.get_running_loop().time() - began_s
        if stop:
            sampled = self._reader.cut(sampled, stop)
        node = Node(context, sampled.tokens.tolist(), sampled)
        read = await self._reader.read(node.tokens, tools, stop)
        message, turn = read.message, len(self._replies)
        self._replies.append(node)  # only now: a reply that can't be read is no reply
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call{100 * turn + number:05}"  # nine letters and digits: some templates want that
        return Reply(
            message=message,
            call_errors=read.errors,
            finish_reason=sampled.finish_reason,
            turn=turn,
            num_prompt_tokens=context.num_tokens,
            num_tokens=len(node.tokens),
        )


def _roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages[-5:]]
