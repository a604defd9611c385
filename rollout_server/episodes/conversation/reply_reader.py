"""Reads sampled tokens as a message: its text, and its tool calls in the format of the model's family.

The two formats with JSON calls, hermes and llama3, are read in this process. So they work with every engine, and the
model gets an error message for a call that can't be read. Other formats are read by a parser of the SGLang server
(`rollout.tool_parser: <its name>`) or by the user's function (`rollout.tool_parser: module:name`).

Reading must take linear time: a model can sample any text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from async_rl.base.errors import AsyncRLError, ConfigError, WaitTimeoutError, raised_at
from async_rl.base.seams import import_object
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, Schema, ToolCall
from rollout_server.episodes.user_code import error_text

NUM_PARSE_ATTEMPTS = 4
"""How often an SGLang server is asked to parse a reply before the server counts as lost."""
_SAME = {"qwen": "hermes", "qwen25": "hermes"}
"""SGLang's other names of the formats."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The result of parsing a reply: its text and its tool calls."""

    content: str
    """The text before the first call, and the calls that can't be read."""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text)"""
    errors: tuple[str, ...] = ()
    """A description of each call that can't be read."""


ParseCalls = Callable[[str, Sequence[Schema]], Awaitable[Parsed] | Parsed]
"""A parser: called with the text of a reply and the tools it may call. A user's parser may be a `def` or an `async
def`, and must not block."""


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A reply as a chat message. Tool calls that can't be read stay in its content, and `errors` describes them."""

    message: Message
    errors: tuple[str, ...] = ()
    stop_text: str = ""
    """The first text of `stop` in the reply, where its content ends."""


class ReplyReader:
    """Reads the sampled tokens of a reply as a message with its tool calls.

    Args:
        end_tokens: the tokens that end a reply; they are not part of its text.
        parse: parses tool calls, for replies that may call tools. None: a reply is only text.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], parse: ParseCalls | None) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._parse = parse
        self._told: set[str] = set()
        """The errors of the parser that were logged, each as its class and its line of code."""
        self.notes: list[str] = []
        """Lines for the console, one for each logged error of the parser."""

    @property
    def reads_calls(self) -> bool:
        """Whether the reader has a parser for tool calls. Without one, a reply is only text."""
        return self._parse is not None

    def cut(self, reply: SampledReply, stop: Sequence[str]) -> SampledReply:
        """Return the reply, cut after the first token that completes one of the texts `stop`; uncut if none does."""
        tokens = reply.tokens.tolist()

        def is_complete(length: int) -> bool:
            text = self._tokenizer.decode(tokens[:length])
            return any(part in text for part in stop)

        if not is_complete(len(tokens)):
            return reply
        end = bisect_left(range(len(tokens)), True, key=is_complete)
        return reply.cut(end)

    async def read(self, tokens: Sequence[int], tools: Sequence[Schema], stop: Sequence[str] = ()) -> ReadMessage:
        """Return the reply as a message. Its content ends before the first text of `stop` in it."""
        read = await self._read(tokens, tools)
        content = read.message["content"]
        if not (ends := [(content.index(part), part) for part in stop if part in content]):
            return read
        end, stop_text = min(ends)
        read.message["content"] = content[:end]
        return replace(read, stop_text=stop_text)

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
        """Parse a reply.

        If the parser fails, the result has that failure as the error of a tool call, for the model to read.

        Raises:
            AsyncRLError: the server with the parser does not answer, or refuses to read replies.
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
    """Check the result of a parser. The content None, which OpenAI writes next to calls, becomes "".

    Raises:
        TypeError: a parser must not return this value.
    """
    if isinstance(parsed, Parsed):
        content, calls = "" if parsed.content is None else parsed.content, parsed.calls
        are_pairs = isinstance(calls, tuple | list) and all(_are_texts(call) and len(call) == 2 for call in calls)
        if isinstance(content, str) and are_pairs and _are_texts(parsed.errors):
            return Parsed(content, tuple(calls), tuple(parsed.errors))
    raise TypeError(
        f"a parser must return a Parsed of {__name__} with a text as content, pairs of texts as calls, and texts as "
        f"errors, got {parsed!r:.200}"
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)


def json_calls(text: str, format_name: str) -> Parsed:
    """Parse the tool calls `{"name": ..., "arguments": {...}}` of a reply. Returns its text and calls.

    Calls that can't be read stay in the text: if others can be read, at its end and without their marks.

    Args:
        format_name: `hermes` or `llama3`.
    """
    content, parts = FORMATS[format_name](text)
    calls, errors, unread = [], [], []
    for part in parts:
        try:
            calls.append(read_call(part))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            errors.append(f"{part!r:.200} is no tool call: {error}")
            unread.append(part)
    if not calls:
        return Parsed(text, errors=tuple(errors))
    return Parsed("\n".join([content.strip(), *unread]).strip(), tuple(calls), tuple(errors))


def open_parser(name: str, chat_template: str, server_url: str, headers: Mapping[str, str]) -> ParseCalls:
    """Return the parser of tool calls called `name`. Without a name, return the one that fits the chat template.

    Args:
        name: rollout.tool_parser.
        server_url: the engine's address, or "" if the engine has no parsers.
        headers: HTTP headers of requests to the engine.

    Raises:
        ConfigError: there is no such parser, it can't be imported or called with (text, tools), or `name` is "" and the
            template has no known format.
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
    """Reads tool calls in the format `hermes` or `llama3` in this process."""

    format_name: str

    async def __call__(self, text: str, tools: Sequence[Schema]) -> Parsed:
        return json_calls(text, self.format_name)


@dataclass(frozen=True, slots=True)
class ServerParser:
    """Parses tool calls with the parser `name` of an SGLang server: deepseekv3, glm45, kimi_k2, qwen3_coder, ..."""

    url: str
    name: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 30.0
    """The time limit of one attempt."""
    pause_s: float = 1.0
    """The time between two attempts."""

    async def __call__(self, text: str, tools: Sequence[Schema]) -> Parsed:
        """Ask the server to separate the tool calls in a reply from its text, and return both.

        If the server finds calls but can't read any, the result has an error for the model.

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
        """Return the server's answer. Up to NUM_PARSE_ATTEMPTS attempts are made if it is slow or refuses connections.
        """
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
        """Raise AsyncRLError if the parser can't read an empty text.

        SGLang answers HTTP 500 also for an unknown parser.
        """
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


THINK, END_OF_THINKING = "<think>", "</think>"
"""The marks around the model's thinking, where calls are ignored. Some chat templates write the first mark themselves,
so a reply may begin inside the thinking."""
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
"""The marks around a call of Qwen 2.5, Qwen 3 and Hermes. The last call may lack its end mark."""
_MARK = re.compile(f"{THINK}|{END_OF_THINKING}|{_CALL}")
_PYTHON_TAG = "<|python_tag|>"
"""The mark before a call of Llama, which the model may leave out."""
_SEPARATOR = re.compile(r"\s*;?\s*")
"""What ends a call of Llama: nothing, or a semicolon before another call. It always matches, so it never backtracks."""


def _hermes_calls(text: str) -> tuple[str, list[str]]:
    """Split a reply in the hermes format. Returns (text before the first call, JSON text of each call)."""
    calls: list[tuple[int, str]] = []
    is_thinking, has_thought, position = False, False, 0
    last_end = text.rfind(END_OF_THINKING)
    while mark := _MARK.search(text, position):
        begins_here = not text[position : mark.start()].strip()
        position = mark.end()
        if mark[0] == THINK:  # one amid text that no end follows is only spoken of
            is_thinking = position <= last_end or begins_here
        elif mark[0] == END_OF_THINKING:
            if not (is_thinking or has_thought):
                calls.clear()  # the reply began within thinking
            is_thinking, has_thought = False, True
        elif not is_thinking:
            end = text.find(_END_OF_CALL, position)
            end = end if end >= 0 else len(text)
            call = text[position:end].strip()
            if not has_thought and END_OF_THINKING in call and not _is_call(call):
                position = text.index(END_OF_THINKING, position)  # the reply began within thinking, which ends there
                continue
            calls.append((mark.start(), call))
            position = end + len(_END_OF_CALL)  # marks in the arguments of a call are none
    return text[: calls[0][0]] if calls else text, [call for _, call in calls]


def _llama_calls(text: str) -> tuple[str, list[str]]:
    """Split a reply in Llama's format. Returns (text before the first call, JSON text of each call).

    After optional thinking, such a reply is one call, or several with semicolons between them.
    """
    start = 0
    while (end := text.find(END_OF_THINKING, start)) >= 0:
        if _after_tag(text[start:end]).startswith("{") and (start or _holds_mark(_llama_parts(_after_tag(text)))):
            break  # it is in the arguments of a call
        start = end + len(END_OF_THINKING)
    rest = _after_tag(text[start:])
    return (text[:start], _llama_parts(rest)) if rest.startswith("{") else (text, [])


def _after_tag(text: str) -> str:
    return text.lstrip().removeprefix(_PYTHON_TAG).lstrip()


def _holds_mark(calls: list[str]) -> bool:
    """Return whether one of these calls contains, in its arguments, the mark that ends thinking."""
    return any(END_OF_THINKING in call and _is_call(call) for call in calls)


def _llama_parts(text: str) -> list[str]:
    """Return the JSON text of each call in a text that begins with a call. The last call may be malformed."""
    parts: list[str] = []
    decoder, begin = json.JSONDecoder(), 0
    while begin < len(text):
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return [*parts, text[begin:]]
        parts.append(text[begin:end])
        separator = _SEPARATOR.match(text, end)
        begin = separator.end() if separator and ";" in separator[0] else len(text)
    return parts


FORMATS = {"hermes": _hermes_calls, "llama3": _llama_calls}
"""For each format, the function that splits a reply into its text and its calls."""


def read_call(text: str) -> tuple[str, str]:
    """Return (name, arguments as JSON text) of a call.

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


def _is_call(text: str) -> bool:
    try:
        read_call(text)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


def format_of(template: str) -> str:
    """Return the format of a chat template's calls: `hermes`, `llama3`, or "" for any other format."""
    if "<tool_call>" in template and '"arguments"' in template and "<function=" not in template:
        return "hermes"
    return "llama3" if "ipython" in template and '"parameters"' in template else ""
