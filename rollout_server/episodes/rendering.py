"""Renders messages to tokens, only ever the new ones, so that no token of a conversation is made again from text.

The text that a chat template writes after a reply does not depend on what stood before the reply. So the new messages
are rendered behind a made-up reply, and what follows it is kept. `TurnRenderer` checks this property for its template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any

from async_rl.errors import ConfigError
from rollout_server.episodes.messages import Message, Schema, user

_REPLY = "\u2402reply\u2402"
"""The made-up reply. No template trims or escapes it in an assistant message."""
_PROBE = "qzq"
"""The content of the messages with which a template is checked."""
NUM_CACHED_STARTS = 256
"""Starts that are kept, because the episodes of a group begin with the same messages."""
_PROBE_TOOL: Schema = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_DATE = datetime(2024, 7, 26)
"""The date that templates write. Llama's would write today's, so that a group could differ at midnight."""


class TurnRenderer:
    """Renders the start of a conversation, and what comes between one reply and the next.

    The texts of special tokens are removed from all messages: whoever writes them did not sample them, and a tool's
    output must not be able to end its own message.

    Args:
        end_tokens: the tokens that end a reply.

    Raises:
        ConfigError: the template writes a user message differently when the conversation before it differs.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._start = lru_cache(maxsize=NUM_CACHED_STARTS)(self._encoded_start)
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.roles = frozenset(role for role in ("user", "tool", "system") if self._can_append(role))
        """The roles of messages that can be appended exactly. Others need the conversation to be rendered anew."""
        if "user" not in self.roles:
            raise ConfigError(
                "the chat template writes a user message differently when the conversation before it differs, or "
                "refuses it after a reply, so a conversation can't be extended without tokenizing it anew. Use a "
                "template that only appends (chat_template.jinja in the model folder)"
            )
        self._closing = self._common_start()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template. Without one messages are lines of plain text, without tools."""
        return bool(self._tokenizer.chat_template)

    def fits(self, messages: Sequence[Message], max_tokens: int) -> bool:
        """Return False if the messages are certainly longer than `max_tokens`, without tokenizing them."""
        calls = (call for message in messages for call in message.get("tool_calls", ()))
        length = sum(len(message["content"]) for message in messages)
        length += sum(len(call["function"]["arguments"]) for call in calls)
        return length <= max_tokens * self._longest_token

    def start(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the tokens of a whole conversation, up to and including the template's text that opens a reply.

        Raises:
            ValueError: the template refuses the messages, or there are tools and no template.
        """
        return list(self._start(json.dumps([list(messages), list(tools)])))

    def _encoded_start(self, said: str) -> tuple[int, ...]:
        messages, tools = json.loads(said)
        # With a chat template, the text already has the special tokens.
        return tuple(self._encode(self._text(messages, tools), add_special_tokens=not self.has_template))

    def next(self, reply: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the sampled `reply` and the next one.

        These are the end of the reply, if it was cut off before one, the messages, and the text that opens a reply.

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
            return "".join("\n" + message["content"] for message in self._cleaned(messages))
        made_up = [user("?"), Message(role="assistant", content=_REPLY)]
        return self._text([*before, *made_up, *messages], tools).partition(_REPLY)[2]

    def _text(self, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        said = [_for_template(message) for message in self._cleaned(messages)]
        if not self.has_template:
            if tools:
                raise ValueError(
                    "the tokenizer has no chat template, so tools can't be described to the model: use another model"
                )
            return "\n".join(message["content"] for message in said)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    said,
                    tools=self._cleaned(list(tools)) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    strftime_now=_DATE.strftime,
                )
            )
        except Exception as error:  # a template is code, which may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template refuses messages of the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return tokens

    def _cleaned(self, value: Any) -> Any:
        """Return a message, or a part of one, with a space in place of each text of a special token."""
        if isinstance(value, str):
            text = value.encode("utf-8", "replace").decode()  # JSON may hold halves of characters, tokenizers don't
            # A space takes its place, so that a removal can't join two parts into another special token.
            return self._special.sub(" ", text) if self._special else text
        if isinstance(value, dict):
            return {self._cleaned(key): self._cleaned(part) for key, part in value.items()}
        return [self._cleaned(part) for part in value] if isinstance(value, list | tuple) else value

    def _can_append(self, role: str) -> bool:
        """Return whether the template writes one or two messages of this role after a reply, whatever stood before."""
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
        """Yield the texts that the template writes for these messages after a longer conversation, and with a tool."""
        before = (user("b"), Message(role="assistant", content="c"))
        yield self._text_after_reply(messages, before)
        with suppress(ValueError):  # the template knows no tools
            yield self._text_after_reply(messages, before, [_PROBE_TOOL] if self.has_template else ())

    def _common_start(self) -> list[int]:
        """Return the tokens that follow a reply whatever comes next: its end, and in some templates a line feed.

        In templates whose end tokens also name the next role (GLM) there are none.
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


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as chat templates want it: the arguments of tool calls are objects, not JSON text."""
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
