"""Reads sampled tokens as a message: the text, and the tool calls in the format of the model's family.

The two formats of JSON calls are read here, so that they work with every engine, and a call that can't be read is
answered and not lost. Other formats are read by the parser of an SGLang server, `rollout.tool_parser: <its name>`, or
by a function of the user's, `rollout.tool_parser: module:name`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.seams import import_object
from rollout_server.engines.base import Completion
from rollout_server.episodes.messages import Message, Schema, ToolCall

_FORMATS = {
    "hermes": re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL),
    "llama3": re.compile(r"^\s*(?:<\|python_tag\|>)?\s*(\{.*)", re.DOTALL),
}
"""The pattern of a call. hermes: Qwen 2.5, Qwen 3, Hermes. llama3: the whole reply is one call."""
_SAME = {"qwen": "hermes", "qwen25": "hermes"}
"""Further names of SGLang's for these formats."""
_SEPARATOR = re.compile(r"\s*;\s*")
_NO_CALL = re.compile(r".*</think>", re.DOTALL)
"""The model's thinking, in which a call does not count."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply's text before its first call, its calls, and a description of each call that can't be read."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text)"""
    errors: tuple[str, ...] = ()


ParseCalls = Callable[[str, Sequence[Schema]], Awaitable[Parsed]]
"""Takes the text of a reply and the tools that it may call; returns the text and calls that it holds."""


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

    @property
    def reads_calls(self) -> bool:
        """Whether there is a parser of the model's tool calls; without one, all of a reply is text."""
        return self._parse is not None

    def cut(self, reply: Completion, stop: Sequence[str]) -> Completion:
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
        parsed = await self._parse(self._tokenizer.decode(tokens), tools)  # special tokens can be part of a call
        message = Message(role="assistant", content=parsed.content)
        if parsed.calls:
            message["tool_calls"] = [
                ToolCall(id=str(number), type="function", function={"name": name, "arguments": arguments})
                for number, (name, arguments) in enumerate(parsed.calls)
            ]
        return ReadMessage(message, parsed.errors)


def json_calls(text: str, format_name: str) -> Parsed:
    """Return the text and the calls `{"name": ..., "arguments": {...}}` of a reply in the format hermes or llama3."""
    thinking = _NO_CALL.match(text)
    start = thinking.end() if thinking else 0
    found = list(_FORMATS[format_name].finditer(text[start:]))
    parts = [part for match in found for part in _calls_in(match[1], format_name)]
    calls, errors = [], []
    for part in parts:
        try:
            calls.append(_json_call(part))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            errors.append(f"{part!r:.200} is no tool call: {error}")
    if not calls:
        return Parsed(text, errors=tuple(errors))
    return Parsed(text[: start + found[0].start()].strip(), tuple(calls), tuple(errors))


def _calls_in(text: str, format_name: str) -> list[str]:
    """Return the JSON text of each call in `text`, a match of the format. Llama separates calls by semicolons."""
    if format_name != "llama3":
        return [text]
    parts: list[str] = []
    decoder = json.JSONDecoder()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return [*parts, text]
        parts.append(text[:end])
        separator = _SEPARATOR.match(text, end)
        text = text[separator.end() :] if separator else ""
    return parts


def _json_call(text: str) -> tuple[str, str]:
    """Return (name, arguments as JSON text) of the call `text`.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: `text` is no call.
    """
    said = json.loads(text)
    if not isinstance(said, dict):
        raise TypeError("a tool call must be a JSON object")
    arguments = said["arguments"] if "arguments" in said else said.get("parameters")
    if not isinstance(said.get("name"), str):
        raise KeyError("a tool call must have a name")
    if not isinstance(arguments, dict):
        raise TypeError("the arguments of a tool call must be a JSON object")
    return said["name"], json.dumps(arguments)


def open_parser(name: str, chat_template: str, server_url: str, headers: Mapping[str, str]) -> ParseCalls:
    """Return the parser of tool calls `name`, or without a name the one for the chat template.

    Args:
        name: rollout.tool_parser.
        server_url: the engine's address. Empty, if the engine has no parsers of its own.
        headers: of requests to the engine.

    Raises:
        ConfigError: there is no parser `name`, it can't be imported, or without a name the template has none of the
            known formats.
    """
    if ":" in name:
        parser: ParseCalls = import_object(name, "rollout.tool_parser")
        return parser
    name = _SAME.get(name, name) or _format_of(chat_template)
    if name in _FORMATS:
        return JsonParser(name)
    if name and server_url:
        return ServerParser(server_url, name, tuple(headers.items()))
    raise ConfigError(
        f"rollout.tool_parser must be {', '.join([*_FORMATS, *_SAME])}, module:name, or with the engine sglang one of "
        f"its own, got {name!r}" + ("" if name else ", and the chat template has none of the known formats")
    )


def _format_of(template: str) -> str:
    if "<tool_call>" in template and '"arguments"' in template and "<function=" not in template:
        return "hermes"
    return "llama3" if "ipython" in template and '"parameters"' in template else ""


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

    async def __call__(self, text: str, tools: Sequence[Schema]) -> Parsed:
        """Return the text and calls that the server reads in the reply `text`; an error if it left out all calls.

        Raises:
            AsyncRLError: the server does not know the parser, or does not answer.
        """
        body = {"text": text, "tool_call_parser": self.name, "tools": list(tools)}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout_s)) as session,
                session.post(f"{self.url}/parse_function_call", json=body, headers=dict(self.headers)) as reply,
            ):
                if reply.status != 200:
                    raise AsyncRLError(
                        f"the SGLang server can't read tool calls with rollout.tool_parser {self.name!r} (HTTP "
                        f"{reply.status}): {(await reply.text())[:300]}"
                    )
                read = await reply.json()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise AsyncRLError(f"the SGLang server at {self.url} did not read a tool call: {error!r}") from error
        if read["calls"]:
            calls = tuple((call["name"], call["parameters"]) for call in read["calls"])
            return Parsed(read["normal_text"], calls)
        if read["normal_text"].strip() == text.strip():
            return Parsed(text)
        # The server's parser leaves out calls that it can't read, and calls of unknown tools.
        return Parsed(text, errors=("the reply has a tool call that is malformed, or of a tool that there is not",))
