"""Renders messages to tokens. Only new messages are rendered, so earlier tokens are never made again from text.

The text that a chat template writes after a reply does not depend on the messages before the reply. So new messages are
rendered after a made-up reply, and the text that follows it is used. `TurnRenderer` checks this property of its
template, with replies without calls. DeepSeek's templates are an exception: they mark the start of tool results only
once in a conversation. Here each round of calls is written like the first, in sampling and in training.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import TEMPLATE_DATE
from rollout_server.episodes.conversation.chat_messages import ROLES, Message, Schema, tools_text, user

_REPLY = "\u2402reply\u2402"
"""The made-up reply. No template trims or escapes this text in an assistant message."""
_PROBE = "qzq"
"""The content of the messages with which templates are checked."""
NUM_CACHED_STARTS = 256
"""How many rendered conversation starts are cached. The episodes of a group share theirs."""
LARGE_CHARACTERS = 100_000
"""Tokenizing a text of this length takes about 0.1 s. Longer texts are rendered in a thread, and not cached."""
_PROBE_TOOL: Schema = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class TurnRenderer:
    """Renders the start of a conversation, and the messages between one reply and the next.

    Texts of special tokens are removed from all messages, so that, for example, a tool's output can't end its own
    message. Some models mark roles with added tokens that are not special. The added tokens that the template writes
    around messages are removed from all messages except the model's replies. Tool results lose all added tokens that
    the template contains, such as `<tool_call>`.

    Args:
        end_tokens: the tokens that end a reply.
        settings: further arguments of the chat template (task.chat_template_kwargs).

    Raises:
        ConfigError: the template writes a user message differently if the conversation before it differs.
    """

    def __init__(
        self, tokenizer: Any, end_tokens: Sequence[int], settings: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._end_tokens = frozenset(end_tokens)
        self._start = lru_cache(maxsize=NUM_CACHED_STARTS)(self._encoded_start)
        self._starting: dict[str, asyncio.Task[array[int]]] = {}
        """The large starts that are being rendered. The episodes of a group wait for one together."""
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        known = {str(token) for token in added if str(token) in (tokenizer.chat_template or "") and _is_mark(token)}
        self._removed: dict[str, re.Pattern[str] | None] = dict.fromkeys(ROLES, _any_of(special))
        """The texts to remove from the messages of each role."""
        written = self._text_around_messages()
        marks = {text for text in known if text in written}
        for role in ("system", "user"):
            self._removed[role] = _any_of(special | marks)
        self._removed["tool"] = _any_of(special | known)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.roles = frozenset(role for role in ("user", "tool", "system") if self._can_append(role))
        """The roles of messages that can be appended exactly. Other messages make the conversation be rendered anew."""
        if "user" not in self.roles:
            raise ConfigError(
                "the chat template writes a user message differently when the conversation before it differs, or "
                "refuses it after a reply, so a conversation can't be extended without tokenizing it anew. Use a "
                "template that only appends (chat_template.jinja in the model folder)"
            )
        self._closing = self._common_start()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template. Without one, messages are lines of text, and tools can't be used.
        """
        return bool(self._tokenizer.chat_template)

    def fits(self, messages: Sequence[Message], tools: Sequence[Schema], max_tokens: int) -> bool:
        """Return False if messages and tools certainly have more than `max_tokens` tokens.

        This check tokenizes nothing.
        """
        return _num_characters(messages) + len(tools_text(tools)) <= max_tokens * self._longest_token

    def start(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens of a whole conversation, followed by the template's text that opens a reply.

        Raises:
            ValueError: the template refuses the messages, or there are tools and no template.
        """
        return list(self._start(json.dumps([list(messages), list(tools)])))

    async def start_async(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the same as `start`. A large text is rendered in a thread, once for all simultaneous callers.

        Raises:
            ValueError: the template refuses the messages, or there are tools and no template.
        """
        said = json.dumps([list(messages), list(tools)])
        if len(said) <= LARGE_CHARACTERS:
            return list(self._start(said))
        if said not in self._starting:
            rendering = asyncio.create_task(asyncio.to_thread(self._encoded_start, said), name="large start")
            self._starting[said] = rendering
            rendering.add_done_callback(lambda _: self._starting.pop(said))
        return list(await asyncio.shield(self._starting[said]))

    def _encoded_start(self, said: str) -> array[int]:
        messages, tools = json.loads(said)
        # With a chat template, the text already has the special tokens.
        return array("i", self._encode(self._text(messages, tools), add_special_tokens=not self.has_template))

    async def next_async(self, reply: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the same as `next`. A large text is rendered in a thread.

        Raises:
            ValueError: the template refuses the messages, or one has a role that can't be appended.
        """
        if _num_characters(messages) <= LARGE_CHARACTERS:
            return self.next(reply, messages)
        return await asyncio.to_thread(self.next, reply, messages)

    def next(self, reply: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens to insert between the sampled `reply` and the model's next reply.

        They consist of the end of the reply (if it was cut off before its end token), the new messages, and the text
        that opens the next reply.

        Raises:
            ValueError: the template refuses the messages, or one has a role that can't be appended.
        """
        if wrong := {message["role"] for message in messages} - self.roles:
            raise ValueError(f"messages of the role {', '.join(sorted(wrong))} can't be appended to a conversation")
        tokens = self._after_reply(messages)
        if not reply or reply[-1] not in self._end_tokens:
            return tokens
        # The model has ended its reply. The end that the template writes would be a second one.
        for position, token in enumerate(tokens):
            if token in self._end_tokens:
                is_closing = token == reply[-1] or position < len(self._closing)
                return tokens[position + 1 :] if is_closing else tokens
            if self._tokenizer.decode([token]).strip():
                break
        return tokens

    def _after_reply(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self._text_after_reply(messages), add_special_tokens=False)

    def _text_after_reply(
        self, messages: Sequence[Message], before: Sequence[Message] = (), tools: Sequence[Schema] = ()
    ) -> str:
        if not self.has_template:
            return "".join("\n" + message["content"] for message in self._cleaned_messages(messages))
        made_up = [user("?"), Message(role="assistant", content=_REPLY)]
        return self._text([*before, *made_up, *messages], tools).partition(_REPLY)[2]

    def _text(self, messages: Sequence[Message], tools: Sequence[Schema], opens_reply: bool = True) -> str:
        said = self._cleaned_messages(messages)
        if not self.has_template:
            if tools:
                raise ValueError(
                    "the tokenizer has no chat template, so tools can't be described to the model: use another model"
                )
            return "\n".join(message["content"] for message in said)
        try:
            try:
                return self._templated(list(map(_with_objects, said)), tools, opens_reply)
            except TypeError:  # DeepSeek-V3's joins the arguments to other text
                return self._templated(said, tools, opens_reply)
        except Exception as error:  # a template is code, which may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template refuses messages of the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def _templated(self, said: list[dict[str, Any]], tools: Sequence[Schema], opens_reply: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                said,
                tools=_cleaned(list(tools), self._removed["user"]) or None,
                tokenize=False,
                add_generation_prompt=opens_reply,
                strftime_now=TEMPLATE_DATE.strftime,
                **self._settings,
            )
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return tokens

    def _cleaned_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [_cleaned(message, self._removed[message["role"]]) for message in messages]

    def _text_around_messages(self) -> str:
        """Return the text that the template writes around messages, for each role that it knows.

        The beginning of a reply is left out. Some templates begin the model's thinking there, which a prompt may quote.
        """
        made_up = Message(role="assistant", content=_REPLY)
        result = Message(role="tool", content=_PROBE, tool_call_id="call00000", name="f")
        texts = []
        for before, after in ([], []), ([Message(role="system", content=_PROBE)], []), ([], [result]):
            with suppress(ValueError):  # the template does not know the role
                texts.append(self._text([*before, user(_PROBE), made_up, *after, user(_PROBE)], (), opens_reply=False))
        return "".join(texts)

    def _can_append(self, role: str) -> bool:
        """Return whether messages of this role are rendered the same after every conversation (one or two of them)."""
        message = Message(role=role, content=_PROBE)
        if role == "tool":
            message["tool_call_id"], message["name"] = "call00000", "f"
        for count in (1, 2):
            messages = [message] * count
            try:
                text = self._text_after_reply(messages)
            except ValueError:
                return count > 1  # some templates want the roles in turn, and refuse two messages of a user
            if text.count(_PROBE) != count or any(other != text for other in self._texts_elsewhere(messages)):
                return False
        return True

    def _texts_elsewhere(self, messages: Sequence[Message]) -> Iterator[str]:
        """Yield how the template renders these messages after a longer conversation, without and with a tool."""
        before = (user("b"), Message(role="assistant", content="c"))
        yield self._text_after_reply(messages, before)
        with suppress(ValueError):  # the template knows no tools
            yield self._text_after_reply(messages, before, [_PROBE_TOOL] if self.has_template else ())

    def _common_start(self) -> list[int]:
        """Return the tokens that follow every reply: its end token, and in some templates a line feed.

        The list is empty for templates whose end tokens also name the next role (GLM).
        """
        options = [[Message(role=role, content=_PROBE)] for role in self.roles] + [[]]
        starts: list[list[int]] = []
        for messages in options:
            try:
                starts.append(self._after_reply(messages))
            except ValueError:  # some templates want a message after a reply
                continue
        same: Callable[[tuple[int, ...]], bool] = lambda tokens: len(set(tokens)) == 1  # noqa: E731
        return [tokens[0] for tokens in takewhile(same, zip(*starts, strict=False))]


def _num_characters(messages: Sequence[Message]) -> int:
    """Return a lower bound on the number of characters of the messages. Even an empty message has a line end."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    length = sum(1 + len(message["content"]) for message in messages)
    return length + sum(len(call["function"]["arguments"]) for call in calls)


def _is_mark(token: Any) -> bool:
    """Return whether an added token may be a mark of the template: it is neither a word nor white space."""
    return len(str(token)) > 2 and not str(token).isalnum() and not str(token).isspace()


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of these texts, trying longer ones first; None if there are no texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def _cleaned(value: Any, removed: re.Pattern[str] | None) -> Any:
    """Return a message, or a part of one, with every match of `removed` replaced by a space."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()  # JSON may hold halves of characters, tokenizers don't
        # A space takes its place, so that a removal can't join two parts into another mark.
        return removed.sub(" ", text) if removed else text
    if isinstance(value, dict):
        return {_cleaned(key, removed): _cleaned(part, removed) for key, part in value.items()}
    return [_cleaned(part, removed) for part in value] if isinstance(value, list | tuple) else value


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of tool calls as objects instead of JSON text, as most chat templates want.
    """
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
