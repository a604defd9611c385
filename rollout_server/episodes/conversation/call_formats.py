"""Splits a reply into its text and its tool calls, in the two formats whose calls are JSON text.

What a model samples must not take the square of its length to read.
"""

from __future__ import annotations

import json
import re

THINK, END_OF_THINKING = "<think>", "</think>"
"""The marks around the model's thinking; calls within it do not count. Some chat templates write the first one, so that
a reply may begin within thinking."""
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
"""The marks around a call of Qwen 2.5, Qwen 3 and Hermes. The last one may lack its end."""
_MARK = re.compile(f"{THINK}|{END_OF_THINKING}|{_CALL}")
_PYTHON_TAG = "<|python_tag|>"
"""The mark before a call of Llama's, which the model may leave out."""
_SEPARATOR = re.compile(r"\s*;?\s*")
"""The end of a call of Llama's; another call follows a semicolon. It matches always, and so never tries twice."""


def _hermes_calls(text: str) -> tuple[str, list[str]]:
    """Return (text before the first call, JSON text of each call) of a reply with tags around its calls."""
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
    """Return (text before the first call, JSON text of each call) of a reply that is one call, or several with
    semicolons between them, after thinking if there is some.
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
    """Return whether the arguments of one of these calls hold the mark of the end of thinking."""
    return any(END_OF_THINKING in call and _is_call(call) for call in calls)


def _llama_parts(text: str) -> list[str]:
    """Return the JSON text of each call in a text that begins with one; the last may be malformed."""
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
"""The function that splits a reply into its text and its calls, for each format."""


def read_call(text: str) -> tuple[str, str]:
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


def _is_call(text: str) -> bool:
    try:
        read_call(text)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return True


def format_of(template: str) -> str:
    """Return the name of the format that a chat template uses for calls; "" if it is none of these."""
    if "<tool_call>" in template and '"arguments"' in template and "<function=" not in template:
        return "hermes"
    return "llama3" if "ipython" in template and '"parameters"' in template else ""
