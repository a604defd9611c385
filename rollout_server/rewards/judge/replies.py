"""Reads the verdict in the reply of a judge: tolerant of its form, strict about its meaning.

A reply that a person could read in two ways has no verdict: two verdicts in JSON, a number outside of the scale, one
that was cut off within its thoughts or its JSON. The text of a candidate that a reply quotes is no verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_TITLED = re.compile(rf"(?:score|rating)\W{{0,6}}?{_NUMBER}(?!\w)", re.IGNORECASE)
_AFTER_COLON = re.compile(rf"^[^\n]{{0,40}}[:\uff1a]\W{{0,4}}{_NUMBER}\W*$", re.MULTILINE)
_BETTER = re.compile(r"(?:better|winner|verdict)\W{0,6}(a|b|tie)\b", re.IGNORECASE)
_BRACKETED = re.compile(r"\[\[(a|b|c|tie)\]\]", re.IGNORECASE)
_RANKING = re.compile(r"\d+(?:\s*[,>]\s*\d+)+")
_CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}


def read_score(reply: str, low: float, high: float) -> float | None:
    """Return the score in a reply, in low..high; None: there is none, or not one alone."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    found = list(_values_of(text, "score"))
    if found:
        value = _number(found[0]) if len(found) == 1 else None
    else:
        numbers = None if _is_cut_off(text) else _numbers(text, high)
        value = float(numbers[-1]) if numbers else None
    return value if value is not None and low <= value <= high else None


def read_choice(reply: str) -> float | None:
    """Return 1 if a reply says that A is better, 0 if B is, 0.5 if it calls them equal; None: it says none of these."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    found = list(_values_of(text, "better"))
    if not found and not _is_cut_off(text):
        bare = re.fullmatch(r"\W*(a|b|tie)\W*", text, re.IGNORECASE)
        titled = _BETTER.findall(text) or _BRACKETED.findall(text)
        found = [bare[1]] if bare else titled[-1:]
    return _CHOICES.get(str(found[0]).strip().lower()) if len(found) == 1 else None


def read_ranking(reply: str, size: int) -> list[int] | None:
    """Return the places 0..size - 1, best first, of the answers that a reply ranks by their numbers 1..size; None: it
    does not name each of them once.
    """
    text = _without_thoughts(reply)
    if text is None:
        return None
    found: list[Any] = list(_values_of(text, "ranking"))
    if not found and not _is_cut_off(text):
        found = [re.findall(r"\d+", each) for each in _RANKING.findall(text)[-1:]]
    if len(found) != 1 or not isinstance(found[0], list):
        return None
    try:
        ranking = [int(each) - 1 for each in found[0]]
    except (TypeError, ValueError):
        return None
    return ranking if sorted(ranking) == list(range(size)) else None


def _without_thoughts(reply: str) -> str | None:
    """Return what comes after the thoughts of a model; None: it was cut off in them."""
    if "<think>" in reply and "</think>" not in reply:
        return None
    return reply.rpartition("</think>")[2].strip()


def _values_of(text: str, key: str) -> Iterator[Any]:
    """Yield the value of `key` in each JSON object of a text that has it, whatever the case of the key."""
    decoder, start = json.JSONDecoder(), 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        named = {str(name).lower(): each for name, each in value.items()}
        if key in named:
            yield named[key]


def _is_cut_off(text: str) -> bool:
    """Return whether a text ends within a JSON object."""
    return text.count("{") > text.count("}")


def _numbers(text: str, high: float) -> list[str]:
    """Return the numbers that stand where a score is written, in order, by the clearest sign of one that there is."""
    of_scale = rf"\s*(?:/|out of)\s*{high:g}"
    bare = re.fullmatch(rf"\W*?{_NUMBER}(?:{of_scale})?\W*", text)
    signs = (
        lambda: _TITLED.findall(text), lambda: [bare[1]] if bare else [],
        lambda: re.findall(rf"{_NUMBER}{of_scale}(?!\d)", text), lambda: _AFTER_COLON.findall(text),
    )
    return next((found for sign in signs if (found := sign())), [])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
