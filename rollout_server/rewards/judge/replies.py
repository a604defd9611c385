"""Reads the verdict in the reply of a judge: tolerant of its form, strict about its meaning.

A reply that a person could read in two ways has no verdict: two verdicts in JSON, or one in JSON beside another one in
words, of which either may be a candidate's that is quoted; a number outside of the scale, or out of another scale; one
that was cut off within its thoughts or its JSON.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_OUT_OF = r"(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?)|\s*(%))?"
_TITLED = re.compile(rf"(?:score|rating)\W{{0,6}}?{_NUMBER}(?!\w){_OUT_OF}", re.IGNORECASE)
_AFTER_COLON = re.compile(rf"^[^\n]{{0,40}}[:\uff1a]\W{{0,4}}{_NUMBER}[^\w%]*$", re.MULTILINE)
_BETTER = re.compile(r"(?:better|winner|verdict)\W{0,6}(a|b|tie)\b", re.IGNORECASE)
_STATED = re.compile(r"(?i:better|winner|verdict)\W{0,3}[:=]\W{0,4}(A|B|(?i:tie))\b")
"""The clearest words for a better one, which JSON must not contradict; `better. A ...` begins a sentence."""
_BRACKETED = re.compile(r"\[\[(a|b|c|tie)\]\]", re.IGNORECASE)
_RANKING = re.compile(r"\d+(?:\s*[,>]\s*\d+)+")
_STATED_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)+")
_CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}


def read_score(reply: str, low: float, high: float) -> float | None:
    """Return the score in a reply, in low..high; None: there is none, or not one alone."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    found, others = _values_of(text, "score")
    if found:
        value = _number(found[0]) if len(found) == 1 else None
        titled = _titled(others, high)
        value = None if titled and titled[-1] != value else value
    else:
        numbers = [] if _is_cut_off(text) else _numbers(text, high)
        value = numbers[-1] if numbers else None
    return value if value is not None and low <= value <= high else None


def read_choice(reply: str) -> float | None:
    """Return 1 if a reply says that A is better, 0 if B is, 0.5 if it calls them equal; None: it says none of these."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    found, others = _values_of(text, "better")
    if len(found) > 1:
        return None
    found += (_STATED.findall(others) or _BRACKETED.findall(others))[-1:] if found else []
    if not found and not _is_cut_off(text):
        bare = re.fullmatch(r"\W*(a|b|tie)\W*", text, re.IGNORECASE)
        found = [bare[1]] if bare else (_BETTER.findall(text) or _BRACKETED.findall(text))[-1:]
    choices = {_CHOICES.get(str(each).strip().lower()) for each in found}
    return choices.pop() if len(choices) == 1 else None


def read_ranking(reply: str, size: int) -> list[int] | None:
    """Return the places 0..size - 1, best first, of the answers that a reply ranks by their numbers 1..size; None: it
    does not name each of them once.
    """
    text = _without_thoughts(reply)
    if text is None:
        return None
    found, others = _values_of(text, "ranking")
    if len(found) > 1:
        return None
    in_words = _STATED_RANKING.findall(others)[-1:] if found else []
    if not found and not _is_cut_off(text):
        in_words = _RANKING.findall(text)[-1:]
    rankings = [_ranking(each, size) for each in (*found, *(re.findall(r"\d+", words) for words in in_words))]
    return rankings[0] if rankings and all(each == rankings[0] for each in rankings) else None


def _ranking(numbers: Any, size: int) -> list[int] | None:
    """Return the places of a list that has each of the numbers 1..size once; None: it is another one."""
    try:
        ranking = [int(each) - 1 for each in numbers] if isinstance(numbers, list) else []
    except (TypeError, ValueError):
        return None
    return ranking if sorted(ranking) == list(range(size)) else None


def _without_thoughts(reply: str) -> str | None:
    """Return what comes after the thoughts of a model; None: it was cut off in them."""
    if "<think>" in reply and "</think>" not in reply:
        return None
    return reply.rpartition("</think>")[2].strip()


def _values_of(text: str, key: str) -> tuple[list[Any], str]:
    """Return the value of `key` in each JSON object of a text that has it, whatever the case of the key, and the text
    without these objects.
    """
    decoder, found, others, start, done = json.JSONDecoder(), [], "", 0, 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        named = {str(name).lower(): each for name, each in value.items()}
        if key in named:
            found.append(named[key])
            others, done = others + text[done:start], end
        start = end
    return found, others + text[done:]


def _is_cut_off(text: str) -> bool:
    """Return whether a text ends within a JSON object."""
    return text.count("{") > text.count("}")


def _numbers(text: str, high: float) -> list[float | None]:
    """Return the numbers that stand where a score is written, in order, by the clearest sign of one that there is."""
    if titled := _titled(text, high):
        return titled
    of_scale = rf"\s*(?:/|out of)\s*{high:g}"
    bare = re.fullmatch(rf"\W*?{_NUMBER}(?:{of_scale})?[^\w%]*", text)
    found = [bare[1]] if bare else re.findall(rf"{_NUMBER}{of_scale}(?!\d)", text) or _AFTER_COLON.findall(text)
    return list(map(float, found))


def _titled(text: str, high: float) -> list[float | None]:
    """Return the numbers that are called a score, in order; None for one that is out of another number than `high`."""
    found = _TITLED.findall(text)
    scored = [(float(number), 100.0 if percent else float(out_of or high)) for number, out_of, percent in found]
    return [number if scale == high else None for number, scale in scored]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
