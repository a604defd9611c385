"""Reads sampled tokens as a message: the text, and the tool calls in the format of the model's family.

The two formats of JSON calls are read in this process, so that they work with every engine, and a call that can't be
read is answered and not lost. Other formats are read by the parser of an SGLang server, `rollout.tool_parser: <its
name>`, or by a function of the user's, `rollout.tool_parser: module:name`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from async_rl.base.errors import AsyncRLError, ConfigError, WaitTimeoutError, raised_at
from async_rl.base.seams import import_object
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.call_formats import FORMATS, format_of, read_call
from rollout_server.episodes.conversation.messages import Message, Schema, ToolCall
from rollout_server.episodes.user_code.faults import error_text

NUM_PARSE_ATTEMPTS = 4
"""How often an SGLang server is asked to read a reply, before it counts as lost."""
_SAME = {"qwen": "hermes", "qwen25": "hermes"}
"""Further names of SGLang's for these formats."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply's text before its first call, its calls, and a description of each call that can't be read."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text)"""
    errors: tuple[str, ...] = ()


ParseCalls = Callable[[str, Sequence[Schema]], Awaitable[Parsed] | Parsed]
"""Takes the text of a reply and the tools that it may call; returns the text and calls that it holds. A user's may be a
`def` or an `async def`, and must not block."""


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A reply as a message. Calls that can't be read are described in `errors`, and are part of the content."""

    message: Message
    errors: tuple[str, ...] = ()


class ReplyReader:
    """Reads the sampled tokens of a reply as a message with its tool calls.

    Args:
        parse: reads tool calls; not used for replies that may call no tool.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], parse: ParseCalls | None) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._parse = parse
        self._told: set[str] = set()
        """The errors of the parser that the log has, each by its kind and place."""
        self.notes: list[str] = []
        """Lines for the console, one for each of these errors."""

    @property
    def reads_calls(self) -> bool:
        """Whether there is a parser of the model's tool calls; without one, all of a reply is text."""
        return self._parse is not None

    def cut(self, reply: SampledReply, stop: Sequence[str]) -> SampledReply:
        """Return the reply up to the first token that completes one of the texts `stop`; all of it if none does."""
        tokens = reply.tokens.tolist()

        def is_complete(length: int) -> bool:
            text = self._tokenizer.decode(tokens[:length])
            return any(part in text for part in stop)

        if not is_complete(len(tokens)):
            return reply
        end = bisect_left(range(len(tokens)), True, key=is_complete)
        return dataclasses.replace(
            reply, tokens=reply.tokens[:end], logprobs=reply.logprobs[:end], versions=reply.versions[:end],
            finish_reason="stop",
        )  # fmt: skip

    async def read(self, tokens: Sequence[int], tools: Sequence[Schema], stop: Sequence[str] = ()) -> ReadMessage:
        """Return the reply as a message, whose text ends before a text of `stop`."""
        read = await self._read(tokens, tools)
        content = read.message["content"]
        ends = [content.index(part) for part in stop if part in content]
        read.message["content"] = content[: min(ends)] if ends else content
        return read

    async def _read(self, tokens: Sequence[int], tools: Sequence[Schema]) -> ReadMessage:
        if not (tools and self._parse):
            content: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
            return ReadMessage(Message(role="assistant", content=content))
        if tokens and tokens[-1] in self._end_tokens:
            tokens = tokens[:-1]
        parsed = await self._parsed(self._tokenizer.decode(tokens), tools)  # special tokens can be part of a call
        message = Message(role="assistant", content=parsed.content)
        if parsed.calls:
            message["tool_calls"] = [
                ToolCall(id=str(number), type="function", function={"name": name, "arguments": arguments})
                for number, (name, arguments) in enumerate(parsed.calls)
            ]
        return ReadMessage(message, parsed.errors)

    async def _parsed(self, text: str, tools: Sequence[Schema]) -> Parsed:
        """Return what the parser reads; if it raises on the reply or returns something else, that is a call's error.

        Raises:
            AsyncRLError: the server that has the parser does not answer, or refuses to read replies.
        """
        assert self._parse is not None
        try:
            parsed = self._parse(text, tools)
            return _checked(await parsed if inspect.isawaitable(parsed) else parsed)
        except AsyncRLError:
            raise
        except Exception as error:
            said, place = f"{type(error).__name__}: {error_text(error)}", raised_at(error)
            if (kind := f"{type(error).__name__} at {place}") not in self._told:
                self._told.add(kind)
                self.notes.append(
                    f"rollout.tool_parser failed on a reply: {said:.500}, at {place}. The model is told; further "
                    "errors of this kind are only counted, as failed calls (episode/failed_tool_calls)"
                )
                _log.warning("%s. The reply: %.500r", self.notes[-1], text, exc_info=error)
            return Parsed(text, errors=(f"the calls of this reply can't be read: {said}",))


def _checked(parsed: Any) -> Parsed:
    """Return what a parser has read, with the content None, which OpenAI has beside calls, as no text.

    Raises:
        TypeError: it is not what a parser must return.
    """
    if not isinstance(parsed, Parsed):
        raise TypeError(f"a parser must return a Parsed of {__name__}, got {parsed!r:.200}")
    content = "" if parsed.content is None else parsed.content
    if not isinstance(content, str):
        raise TypeError(f"the content of a Parsed must be text, got {content!r:.200}")
    if not isinstance(parsed.calls, tuple | list) or not all(map(_is_pair, parsed.calls)):
        raise TypeError(
            "the calls of a Parsed must be pairs of texts, the name and the arguments as JSON text, got "
            f"{parsed.calls!r:.200}"
        )
    if not isinstance(parsed.errors, tuple | list) or not all(isinstance(error, str) for error in parsed.errors):
        raise TypeError(f"the errors of a Parsed must be a tuple of texts, got {parsed.errors!r:.200}")
    return Parsed(content, tuple(parsed.calls), tuple(parsed.errors))


def _is_pair(call: Any) -> bool:
    return isinstance(call, tuple | list) and len(call) == 2 and all(isinstance(part, str) for part in call)


def json_calls(text: str, format_name: str) -> Parsed:
    """Return the text and the calls `{"name": ..., "arguments": {...}}` of a reply in the format hermes or llama3."""
    content, parts = FORMATS[format_name](text)
    calls, errors = [], []
    for part in parts:
        try:
            calls.append(read_call(part))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            errors.append(f"{part!r:.200} is no tool call: {error}")
    if not calls:
        return Parsed(text, errors=tuple(errors))
    return Parsed(content.strip(), tuple(calls), tuple(errors))


def open_parser(name: str, chat_template: str, server_url: str, headers: Mapping[str, str]) -> ParseCalls:
    """Return the parser of tool calls `name`, or without a name the one for the chat template.

    Args:
        name: rollout.tool_parser.
        server_url: the engine's address. Empty, if the engine has no parsers of its own.
        headers: of requests to the engine.

    Raises:
        ConfigError: there is no parser `name`, it can't be imported or called with a text and tools, or without a name
            the template has none of the known formats.
    """
    if ":" in name:
        parser: ParseCalls = import_object(name, "rollout.tool_parser")
        try:
            inspect.signature(parser).bind("", [])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"rollout.tool_parser {name!r} must be a function (text, tools) that returns a Parsed of {__name__}: "
                f"{error}"
            ) from None
        return parser
    name = _SAME.get(name, name) or format_of(chat_template)
    if name in FORMATS:
        return JsonParser(name)
    if name and server_url:
        return ServerParser(server_url, name, tuple(headers.items()))
    raise ConfigError(
        f"rollout.tool_parser must be {', '.join([*FORMATS, *_SAME])}, module:name, or with the engine sglang one of "
        f"its own, got {name!r}" + ("" if name else ", and the chat template has none of the known formats")
    )


@dataclass(frozen=True, slots=True)
class JsonParser:
    """Reads tool calls in the format `hermes` or `llama3` in this process, without a server."""

    format_name: str

    async def __call__(self, text: str, tools: Sequence[Schema]) -> Parsed:
        return json_calls(text, self.format_name)


@dataclass(frozen=True, slots=True)
class ServerParser:
    """Has an SGLang server read the calls with its parser `name`, e.g. deepseekv3, glm45, kimi_k2, qwen3_coder."""

    url: str
    name: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 30.0
    """The time limit of one attempt."""
    pause_s: float = 1.0
    """The time between two attempts."""

    async def __call__(self, text: str, tools: Sequence[Schema]) -> Parsed:
        """Return the text and calls that the server reads in the reply `text`; an error if it left out all calls.

        Raises:
            ValueError: the parser failed on this text.
            WaitTimeoutError: the server does not answer.
            AsyncRLError: the server refuses the request, or has no such parser.
        """
        body = {"text": text, "tool_call_parser": self.name, "tools": list(tools)}
        try:
            read = await self._read(body)
        except ValueError:
            await self._check_known(body)
            raise
        if read["calls"]:
            calls = tuple((call["name"], call["parameters"]) for call in read["calls"])
            return Parsed(read["normal_text"], calls)
        if read["normal_text"].strip() == text.strip():
            return Parsed(text)
        # The server's parser leaves out calls that it can't read, and calls of unknown tools.
        return Parsed(text, errors=("the reply has a tool call that is malformed, or of a tool that there is not",))

    async def _read(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer; while it is slow or refuses connections, ask NUM_PARSE_ATTEMPTS times."""
        errors: list[Exception] = []
        while len(errors) < NUM_PARSE_ATTEMPTS:
            if errors:
                await asyncio.sleep(self.pause_s)
            try:
                return await self._ask(body)
            except (TimeoutError, aiohttp.ClientError) as error:
                errors.append(error)
        raise WaitTimeoutError(
            f"the rollout worker waited {NUM_PARSE_ATTEMPTS} times, at most {self.timeout_s:g} s each, for the SGLang "
            f"server at {self.url} to read the tool calls of a reply with its parser {self.name}: {errors[-1]!r}"
        ) from errors[-1]

    async def _check_known(self, body: dict[str, Any]) -> None:
        """Check that the parser reads an empty text: SGLang answers a name that it does not know as it does a text."""
        try:
            await self._read(body | {"text": ""})
        except ValueError as error:
            raise AsyncRLError(
                f"the SGLang server at {self.url} reads no tool calls with rollout.tool_parser {self.name!r}, not even "
                "in an empty text: its version of SGLang may not have that parser. Set another, or see its log"
            ) from error

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout_s)) as session,
            session.post(f"{self.url}/parse_function_call", json=body, headers=dict(self.headers)) as reply,
        ):
            if reply.status == 500:  # SGLang's parsers raise on some texts, and SGLang lets that through
                raise ValueError(f"SGLang's parser {self.name} failed on it (HTTP 500); the server's log says why")
            if reply.status != 200:
                raise AsyncRLError(
                    f"the SGLang server refuses to read tool calls with rollout.tool_parser {self.name!r} (HTTP "
                    f"{reply.status}): {(await reply.text())[:300]}"
                )
            read: dict[str, Any] = await reply.json()
            return read
