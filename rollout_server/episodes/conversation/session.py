"""A session: the append-only, token-exact conversation of one episode with the engine.

Each request for a reply contains the whole conversation, from an environment's loop or from an agent over HTTP. The
session finds the longest part that it knows, renders only the messages after it, and appends the sampled reply. So a
session is a tree of token sequences: contexts (rendered) and replies (sampled) alternate.

    context ── reply ── context ── reply          one row
                  └──── context ── reply          another continuation: a second row
    context ── reply                              a history that was rewritten: a new root, all of it masked

Each leaf gives one trainable row. A sampled token is trained in one row only, and only if a caller has received it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, Schema, extended_digest, prefix_digests
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.episode import Node, WholeRow, whole_row

CLOSE_S = 10.0
"""How long `close` waits for the engine to end cancelled requests."""

Generate = Callable[[list[int], int], Awaitable[SampledReply]]
"""A function from (the tokens so far, the most tokens to sample) to the engine's reply."""


RequestKey = tuple[bytes, int | None, tuple[str, ...]]
"""(Digest of the conversation, max_tokens, stop texts). Requests with the same key are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The limits of one session."""

    max_tokens: int
    """The most tokens of a row, prompt included."""
    max_reply_tokens: int
    max_turns: int
    """The most replies, in all rows together."""
    max_rows: int = 0
    """The most trained rows; only the last ones are kept. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's reply to a conversation."""

    message: Message
    call_errors: tuple[str, ...]
    """A description of each tool call that can't be read."""
    finish_reason: str
    """`stop` (the model ended the reply) or `length` (it reached a limit)."""
    turn: int
    """The number of the reply in its session, from 0."""
    num_prompt_tokens: int
    num_tokens: int
    stop_text: str = ""
    """The text of `stop` that ended the reply, if one did."""


class EpisodeOver(Exception):
    """Raised if the session samples no further reply. `reason` is `length`, `turns` or `ended`."""

    def __init__(self, reason: Literal["length", "turns", "ended"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class SessionCounts:
    """What a session counts for the metrics."""

    rewritten: int = 0
    """Conversations that did not continue a known one, and were rendered from the start."""
    joined: int = 0
    """Requests that received the reply to an earlier, equal request whose caller was gone."""
    tool_calls: int = 0
    """Tool calls in received replies, also those that can't be read."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A reply that no caller has received yet. It is finished or still being sampled."""

    key: RequestKey
    sampling: asyncio.Task[Reply]
    has_caller: bool = True
    """Whether a caller is waiting for the reply or receiving it. If not, the next equal request gets the reply."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller has received the reply or is gone, or when sampling has failed."""


class PendingReplies:
    """The pending replies of one session, oldest first.

    A request may get the reply to an earlier, equal request whose caller is gone. A reply is received at most once.
    """

    def __init__(self) -> None:
        self._replies: list[PendingReply] = []

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, key: RequestKey, sampling: asyncio.Task[Reply]) -> PendingReply:
        """Add a reply that is being sampled and whose caller waits. It is removed if the sampling fails."""
        pending = PendingReply(key, sampling)
        self._replies.append(pending)

        def remove_failed(task: asyncio.Task[Reply]) -> None:
            if task.cancelled() or task.exception() is not None:  # marks it as seen: a caller that has gone does not
                self.remove(pending)

        sampling.add_done_callback(remove_failed)
        return pending

    def remove(self, pending: PendingReply) -> None:
        """Remove a reply that was received, failed or was given up. Does nothing if it is not in the list."""
        if pending in self._replies:
            self._replies.remove(pending)
        pending.settled.set()

    def release(self, pending: PendingReply) -> None:
        """Mark a reply as free because its caller is gone. The next equal request can take it."""
        pending.has_caller = False
        pending.settled.set()

    def take(self, key: RequestKey) -> PendingReply | None:
        """Return the oldest free reply to requests with this key, and mark it as taken. None if no such reply is free.
        """
        for pending in self._replies:
            if pending.key == key and not pending.has_caller:
                pending.has_caller = True
                pending.settled.clear()
                return pending
        return None

    async def wait(self, key: RequestKey) -> bool:
        """Wait until the oldest pending reply for `key` was received, became free or failed.

        Returns False at once if no reply is pending for that key.
        """
        oldest = next((pending for pending in self._replies if pending.key == key), None)
        if oldest is not None:
            await oldest.settled.wait()
        return oldest is not None

    def wake_all(self) -> None:
        """End all calls of `wait`, because the session ends."""
        for pending in self._replies:
            pending.settled.set()

    def can_give_up(self) -> bool:
        """Return whether any pending reply has no caller."""
        return any(not pending.has_caller for pending in self._replies)

    def give_up(self) -> None:
        """Remove the oldest pending reply that has no caller, and cancel its sampling."""
        pending = next(pending for pending in self._replies if not pending.has_caller)
        pending.sampling.cancel()
        self.remove(pending)


class Session:
    """The conversation of one episode with the engine. Environments and agents ask it for the model's replies.

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
        """The nodes of contexts, each by the digest of the conversation up to the context's end."""
        self._known_replies: dict[bytes, Node] = {}
        """The nodes of replies, each by the digest of the conversation up to the reply's end."""
        self._replies: list[Node] = []
        """The nodes of all replies, in the order of their ends, also of replies that nobody has received."""
        self._received: set[Node] = set()
        self._pending: PendingReplies = PendingReplies()
        self._running: set[asyncio.Task[Reply]] = set()
        self.is_closed = False
        self.last_answer = ""
        """The text of the newest reply that was received."""
        self.last_messages: tuple[Message, ...] = ()
        """The conversation up to the newest reply that was received, with that reply."""
        self.generate_s = 0.0
        """The seconds for which the engine sampled, summed over all replies, also over failed ones."""
        self.counts = SessionCounts()

    @property
    def num_turns(self) -> int:
        """The number of replies that callers have received, which are the episode's turns."""
        return len(self._received)

    @property
    def num_undelivered(self) -> int:
        """The number of finished replies that no caller has received."""
        return len(self._replies) - len(self._received)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(node.tokens) for node in self._received)

    @property
    def num_observed_tokens(self) -> int:
        """The number of tokens appended after a reply without being sampled: messages of users, tools and environments.
        """
        return sum(len(node.tokens) for node in self.contexts.values() if node.parent)

    async def reply(self, messages: Sequence[Message], tools: Sequence[Schema] = (), **options: Any) -> Reply:
        """Return the model's next message in a conversation; see `offer` for the arguments and errors."""
        async with self.offer(messages, tools, **options) as reply:
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
        """Sample the model's next message in the conversation `messages`, and yield it. Leaving the block receives it.

        If the block raises, or the caller is cancelled before, the reply is not received. The next equal request gets
        it. If none comes, the reply is in no row and takes no turn. Equal requests that run simultaneously get
        different samples.

        Args:
            max_tokens: the most tokens of this reply, if lower than the session's limits.
            stop: the reply is cut after the first token that completes one of these texts.
            is_retry: the caller did not receive the reply to an earlier, equal request. If such a request is running,
                this one waits to see whether its reply becomes free.

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
        """Raise EpisodeOver or ValueError if the model can't reply to these messages."""
        self._check_open()
        if not messages or messages[-1]["role"] == "assistant":
            roles = [message["role"] for message in messages[-5:]]
            raise ValueError(f"a conversation must end with a message to reply to, got {roles}")
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
            raise EpisodeOver("ended", "the episode has ended, and samples no further reply")

    async def _free_reply(self, key: RequestKey, is_retry: bool) -> PendingReply | None:
        """Take the free reply to an earlier, equal request whose caller is gone; None if there is none.

        A retry waits for replies that still have callers: one of these may be its own earlier request, whose broken
        connection was not noticed yet. The wait ends with the sampling, whose time is limited, or with `close`.
        """
        while (pending := self._pending.take(key)) is None and is_retry:
            if not await self._pending.wait(key):
                break
            self._check_open()
        self.counts.joined += pending is not None
        return pending

    async def _begin(
        self, messages: Sequence[Message], tools: Sequence[Schema], digests: list[bytes], key: RequestKey
    ) -> PendingReply:
        """Start sampling a reply. If no turn is left, the oldest reply without a caller is given up for it.

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
        """Return the number of turns left. Raises EpisodeOver if none is left and no pending reply can be given up."""
        left = self._limits.max_turns - self.num_turns - len(self._pending)
        if left == 0 and not self._pending.can_give_up():
            raise EpisodeOver("turns", f"all {self._limits.max_turns} turns of the episode are taken")
        return left

    def add_reward(self, turn: int, reward: float) -> None:
        """Add `reward` to the reward of reply number `turn`."""
        self._replies[turn].reward += reward

    def rows(self) -> list[WholeRow]:
        """Return the trainable rows of all received replies, ordered by the last reply of each row."""
        return make_rows([reply for reply in self._replies if reply in self._received], self._limits.max_rows)

    async def close(self) -> None:
        """Cancel all running requests and accept no further requests. Later calls do nothing."""
        self.is_closed = True
        self._pending.wake_all()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_S)

    async def _new_context(self, messages: Sequence[Message], tools: Sequence[Schema], digests: list[bytes]) -> Node:
        """Return a new node for a conversation, attached to the longest part that the session knows.

        The node is a new root if no part is known, or if the messages after that part can't be rendered alone.
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
        """Return how many tokens the next reply may have. Raises EpisodeOver if there is no room for one."""
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
            call["id"] = _call_id(turn, number)
        return Reply(
            message=message,
            call_errors=read.errors,
            finish_reason=sampled.finish_reason,
            turn=turn,
            num_prompt_tokens=context.num_tokens,
            num_tokens=len(node.tokens),
            stop_text=read.stop_text,
        )


def _call_id(turn: int, number: int) -> str:
    """Return the id of a reply's call: nine letters and digits, because some chat templates demand that."""
    return f"c{turn:04x}{number:04x}"


def is_same_reply(one_id: Any, other_id: Any) -> bool:
    """Return whether these are ids of calls in the same reply of a session."""
    one, other = (re.fullmatch("c([0-9a-f]{4})[0-9a-f]{4}", str(each)) for each in (one_id, other_id))
    return one is not None and other is not None and one[1] == other[1]


def make_rows(replies: Sequence[Node], max_rows: int = 0) -> list[WholeRow]:
    """Return one row for each leaf of a session's tree, in the order of the leaves.

    A reply that several leaves share is trained in only one of their rows: the first row that will be kept, or the
    first of all if none will.

    Args:
        replies: the tree's received replies.
        max_rows: the caller will keep so many rows, the last ones; 0: all.
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
        rows[leaf] = whole_row(path, trained)
        trained.update(path)
    return [rows[leaf] for leaf in leaves]
