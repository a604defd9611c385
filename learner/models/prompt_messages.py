"""Reads the chat messages of a prompt back out of its tokens, for a reward model with another chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.config import TaskConfig

Messages = list[dict[str, str]]

SYSTEM, USER, REPLY, _DATE = "\x00", "\x01", "\x02", "\x03"
"""The texts that stand for those of a message, or for the day that a template writes into a prompt."""


class PromptReader:
    """Reads prompts that were rendered as those of a run are: by the policy's chat template, with
    task.chat_template_kwargs and a place for the reply.

    A prompt is an optional system message, task.system_prompt or its own, and messages of the user and the assistant
    in turn, of which the last is the user's. The text of a message holds no token with which the template begins or
    ends one. Where a template shows no roles, or a policy has none, all but task.system_prompt is one message of the
    user.
    """

    def __init__(self, tokenizer: Any, task: TaskConfig) -> None:
        self._tokenizer = tokenizer
        self._settings = task.chat_template_kwargs
        self._own_system = task.system_prompt
        self._openings = list(self._find_openings())
        between = self._render(_user(USER), _reply(REPLY), _user(USER))
        parts = re.split(f"[{USER}{REPLY}]", between or "")
        self._before_reply = parts[1] if len(parts) == 4 else ""
        self._after_reply = parts[2] if len(parts) == 4 else ""
        self._markers = [
            token.content
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.content.strip()
            and (token.content in self._after_reply or (token.special and token.content in self._before_reply))
        ]

    def messages(self, prompt: Sequence[int]) -> Messages | None:
        """Return the messages of a prompt, which is given in the policy's tokens; None if it has another form."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=not self._tokenizer.chat_template)
        for system, form in self._openings:
            found = form.fullmatch(text)
            turns = self._turns(found["turns"]) if found else []
            if found and turns:
                system = found.groupdict().get("system", system)
                messages = [_system(system), *turns] if system else turns
                if not any(self._has_marker(message["content"]) for message in messages):
                    return messages
        return None

    def _find_openings(self) -> Iterator[tuple[str, re.Pattern[str]]]:
        """Yield each way in which a prompt may begin: its known system message, and the form of its whole text."""
        for system in dict.fromkeys([self._own_system, "", SYSTEM]):
            text = self._render(*([_system(system)] if system else []), _user(USER))
            if text and text.count(USER) == 1 and system.strip() in text:  # a template may leave it out
                form = re.escape(text).replace(USER, "(?P<turns>.*)").replace(_DATE, r"[^\n]*?")
                form = form.replace(SYSTEM, "(?P<system>.*?)", 1)
                yield system, re.compile(form, re.DOTALL)

    def _render(self, *messages: dict[str, str]) -> str | None:
        """Return the messages as a prompt, or None if the chat template refuses them."""
        if not self._tokenizer.chat_template:
            return "\n".join(message["content"] for message in messages)
        try:
            return str(self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, strftime_now=lambda _: _DATE,
                **self._settings,
            ))
        except Exception:  # a template is code, which may raise anything
            return None

    def _turns(self, text: str) -> Messages:
        """Return the messages of the user and the assistant in `text`, or nothing if they are not in turn."""
        if not self._has_marker(text):
            return [_user(text)]
        if not self._after_reply:  # the template writes nothing there, so replies and questions can't be told apart
            return []
        *exchanges, last = text.split(self._after_reply)
        turns = []
        for exchange in exchanges:
            asked, found, reply = exchange.partition(self._before_reply)
            if not found:
                return []
            turns += [_user(asked), _reply(reply)]
        return [*turns, _user(last)]

    def _has_marker(self, text: str) -> bool:
        return any(marker in text for marker in self._markers)


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
