"""Reads the verdict in the reply of a judge: tolerant of its form, strict about its meaning.

A reply that a person could read in two ways has no verdict: two verdicts in JSON, or one in JSON beside another one in
words, of which either may be a candidate's that is quoted; two in words of which the last does not clearly replace the
others; a range of numbers, or a decimal comma; a number outside of the scale, or out of another scale; one that was cut
off within its thoughts or its JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_NUMBER = r"([-\u2212]?(?:\d+(?:\.\d+)?|(?<![.\d])\.\d+))"
_OUT_OF = r"(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?)|\s*(%))?"
_TO = r"(?:,|\.{2,}|[ \t]*[-~\u2010-\u2015\u2026][ \t]*|[ \t]+(?:to|or|and)[ \t]+)"
"""The signs between two numbers that make them a range, a choice, or one number with a decimal comma."""
_TITLED = re.compile(rf"(?:score|rating)\W{{0,6}}?{_NUMBER}(?!\w){_OUT_OF}({_TO}\.?\d)?", re.IGNORECASE)
_WHOLE = re.compile(rf"\s*{_NUMBER}{_OUT_OF}()\s*")
_SCORE_WORD = (
    r"(?:assessment|evaluation|grade|helpfulness|marks?|overall|points|quality|rating|reward|scores?|total|verdict"
    r"|\w{0,8}(?:\u603b\u5206|\u8bc4\u5206|\u5206\u6570|\u5f97\u5206|\u6253\u5206))"
)
_AFTER_COLON = re.compile(
    rf"^[^\w\n]*(?:(?:final|my|overall|the|total)[ \t]+){{0,3}}{_SCORE_WORD}\b[*_ \t]*(?:[(\[][^()\[\]\n]*[)\]])?"
    rf"[*_ \t]*[:\uff1a]\W{{0,4}}?{_NUMBER}[^\w%]*$",
    re.MULTILINE | re.IGNORECASE,
)
"""A line of a label and a number. Other words in a label may name another number: `The points where f is zero: 3`."""
_STATED = re.compile(
    r"(?i:better|winner|verdict)\W{0,3}[:=]\W{0,4}"
    r"(?i:an?[ \t]+(?=tie\b))?(A|B|(?i:tie))\b(?![ \t]+(?!(?:is|was|wins?|because|since|as|by|with)\b)[a-z])"
)
"""The words for a better one. `B is better. A ...` begins a sentence, and `Verdict: A good ...` one on an answer."""
_BRACKETED = re.compile(r"\[\[(a|b|c|tie)\]\]", re.IGNORECASE)
_RANKING = re.compile(r"\d+(?:\s*[,>]\s*\d+)+")
_STATED_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)+")
_CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5}

_SENTENCE_END = re.compile(r"[.!?;\n\u3002]")
_CORRECTING = {"actually", "corrected", "correction", "instead", "no", "rather", "reconsidering", "revised", "second"}
"""The words that make a verdict replace the one before it in its sentence."""
_LEADING = _CORRECTING | {
    "a", "and", "but", "final", "finally", "give", "hence", "i", "is", "it", "my", "now", "on", "or", "order",
    "overall", "ranking", "rate", "reflection", "say", "so", "sorry", "the", "therefore", "this", "thought", "thoughts",
    "thus", "total", "verdict", "would",
}  # fmt: skip
"""The words that may stand before a verdict in its sentence if it replaces others; more may say whose or when it was.
"""
_PLAIN = re.compile(r"(?:[\s\w*_#,:|-])*")
"""The letters before it: without brackets and quotation marks, in which another one's verdict may stand."""
_ENDS = re.compile(r"[*_ \t]*(?:$|[.;!|\n]|points?\b|out of\b|,?[ \t]*(?:because|since|as|for)\b)")
"""The letters after it. Others, as in `Score: 5 was my first thought`, may say that it does not hold."""


class _Found(NamedTuple):
    """A verdict in a text: its value, which is None for one that can't be meant, and where it begins and ends."""

    value: Any
    start: int
    end: int


def read_score(reply: str, low: float, high: float) -> float | None:
    """Return the score in a reply, in low..high; None: there is none, or not one alone."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    values, others = _values_of(text, "score")
    if values:
        value = _number(values[0], high) if len(values) == 1 else None
        titled = _titled(others, high)
        value = None if titled and _last(others, titled) != value else value
    else:
        value = None if _is_cut_off(text) else _score_in_words(text, high)
    return value if value is not None and low <= value <= high else None


def read_choice(reply: str) -> float | None:
    """Return 1 if a reply says that A is better, 0 if B is, 0.5 if it calls them equal; None: it says none of these."""
    text = _without_thoughts(reply)
    if text is None:
        return None
    values, others = _values_of(text, "better")
    if len(values) > 1 or (not values and _is_cut_off(text)):
        return None
    bare = None if values else re.fullmatch(r"\W*(a|b|tie)\W*", text, re.IGNORECASE)
    if bare:
        return _choice(bare[1])
    matches = list(_STATED.finditer(others)) or list(_BRACKETED.finditer(others))
    choices = {_choice(value) for value in values}
    if matches:
        choices.add(_last(others, [_Found(_choice(each[1]), each.start(), each.end()) for each in matches]))
    return choices.pop() if len(choices) == 1 else None


def read_ranking(reply: str, size: int) -> list[int] | None:
    """Return the places 0..size - 1, best first, of the answers that a reply ranks by their numbers 1..size; None: it
    does not name each of them once.
    """
    text = _without_thoughts(reply)
    if text is None:
        return None
    values, others = _values_of(text, "ranking")
    if len(values) > 1 or (not values and _is_cut_off(text)):
        return None
    rankings = [_ranking(value, size) for value in values]
    matches = list((_STATED_RANKING if values else _RANKING).finditer(others))
    if matches:
        found = [_Found(_ranking(re.findall(r"\d+", each[0]), size), each.start(), each.end()) for each in matches]
        rankings.append(_last(others, found))
    return rankings[0] if rankings and all(each == rankings[0] for each in rankings) else None


def _choice(value: Any) -> float | None:
    return _CHOICES.get(str(value).strip().lower())


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
    return reply.rpartition("</think>")[2].rpartition("<|channel|>final<|message|>")[2].strip()


def _values_of(text: str, key: str) -> tuple[list[Any], str]:
    """Return the values of `key` in each JSON object of a text that has it, whatever the case of the key and however
    often an object has it, and the text without these objects.
    """
    decoder, found, others, start, done = json.JSONDecoder(object_pairs_hook=list), [], "", 0, 0
    while (start := text.find("{", start)) >= 0:
        try:
            pairs, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        if values := [value for name, value in pairs if name.lower() == key]:
            found += values
            others, done = others + text[done:start], end
        start = end
    return found, others + text[done:]


def _is_cut_off(text: str) -> bool:
    """Return whether a text ends within a JSON object."""
    return text.count("{") > text.count("}")


def _score_in_words(text: str, high: float) -> float | None:
    """Return the number that stands where a score is written, by the clearest sign of one that there is."""
    if titled := _titled(text, high):
        return _last(text, titled)
    of_scale = rf"\s*(?:/|out of)\s*{high:g}(?![\d/]|\.\d)"
    if bare := re.fullmatch(rf"\W*?{_NUMBER}(?:{of_scale})?[^\w%]*", text):
        return _float(bare[1])
    found = [
        _Found(None if before or after else _float(number), each.start(), each.end())
        for each in re.finditer(rf"(\d{_TO})?{_NUMBER}{of_scale}({_TO}\.?\d)?", text)
        for before, number, after in [each.groups()]
    ]
    if found:
        return _last(text, found)
    after_colons = {_float(number) for number in _AFTER_COLON.findall(text)}
    return after_colons.pop() if len(after_colons) == 1 else None


def _titled(text: str, high: float) -> list[_Found]:
    """Return the numbers that are called a score, in order; the value of one that can't be read as one is None."""
    return [_Found(_of_scale(each, high), each.start(), each.end()) for each in _TITLED.finditer(text)]


def _of_scale(found: re.Match[str], high: float) -> float | None:
    """Return the number of a match; None: it is out of another number than `high`, or another number follows."""
    number, out_of, percent, another = found.groups()
    scale = 100.0 if percent else float(out_of or high)
    return _float(number) if scale == high and not another else None


def _last(text: str, found: Sequence[_Found]) -> Any:
    """Return the last of the verdicts in a text; None: others differ from it, and it does not clearly replace them.

    It does if it has a sentence of its own, or corrects the one before it, and nothing around it may say that it was
    another one's or an earlier one.
    """
    last = found[-1]
    if all(each.value == last.value for each in found):
        return last.value
    before, between = text[: last.start], text[found[-2].end : last.start]
    *ended, clause = _SENTENCE_END.split(between)
    words = set(re.findall(r"\w+", clause.lower()))
    is_quoted = before.count('"') % 2 or any(before.count(a) > before.count(b) for a, b in ("()", "[]", "\u201c\u201d"))
    replaces = words <= _LEADING and bool(ended or words & _CORRECTING)
    is_clear = replaces and not is_quoted and _PLAIN.fullmatch(clause) and _ENDS.match(text, last.end)
    return last.value if is_clear else None


def _number(value: Any, high: float) -> float | None:
    """Return the number that a value in JSON is, also as text such as `7/10` if the scale ends at 10."""
    if isinstance(value, str) and (whole := _WHOLE.fullmatch(value)):
        return _of_scale(whole, high)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _float(number: str) -> float:
    return float(number.replace("\u2212", "-"))
