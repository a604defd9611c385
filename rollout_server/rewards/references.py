"""Right answers as the rules compare them: numbers as text, and what math-verify reads as people do."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import pairwise
from typing import Any

_MOST_DIGITS = 400
"""The most digits that a number with an exponent is written out with; the largest float has 309."""
_WITH_EXPONENT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"([-+]?)(\d+)\s+([1-9]\d{0,99})\s*/\s*([1-9]\d{0,99})")
_SPACE = r"(?:\s|\\,|\\ |~)"
_WITH_SPACES = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?:\.\d+)?")
_FULL_STOP = re.compile(r"(?<=\d)\.$")
_MATH = re.compile(r"(\\boxed\{|\$|\\\(|\\\[)((?:[^{}$\\]|\\[, ])*)(\}|\$|\\\)|\\\])")
"""A box, or mathematics between dollars or brackets: its beginning, what is in it, and its end."""
_BOX = re.compile(r"\\boxed\{")
_ANSWER = re.compile(r"<answer>((?:[^<]|<(?!/?answer>))*)(</answer>)?")
_MENTIONED = re.compile(r"[^\w$\\+-]*[^\W\d_]{2}")
"""The text behind the tag <answer> where it is only named, as in `written in <answer> tags`."""
_REFERRING = {
    "above", "and", "answer", "as", "at", "box", "boxed", "final", "given", "i", "in", "is", "it", "look", "my",
    "number", "please", "result", "same", "see", "shown", "solution", "stated", "that", "the", "value", "written",
}  # fmt: skip
"""The words of an <answer> that only says where the answer is, as in `see the box above`."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_BRACE = re.compile(r"[{}]")
_LETTERS = re.compile(r"\w+")
_KEPT_WORDS = {"and", "or", "percent", "percentage", "pct"}
"""Words outside of boxes that math-verify reads as a part of the answer."""


def as_text(answer: Any) -> str:
    """Return a right answer as text; a float as people write it: 72 for 72.0, and 0.00001 for 1e-05."""
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(str(float(answer) + 0.0)), ".0f" if answer.is_integer() else "f")  # -0.0 + 0.0 is 0.0
    return str(answer).strip()


def as_math(answer: Any) -> str:
    """Return a right answer in a form that math-verify reads as people do.

    It takes 3 1/2 for 2, 1 000 for 1 * 0, the e of 1e-5 for Euler's number, and 42. for no number.
    """
    text = _FULL_STOP.sub("", as_text(answer))
    if _WITH_EXPONENT.fullmatch(text) and abs((number := Decimal(text)).adjusted()) < _MOST_DIGITS:
        return format(number, "f")
    if (mixed := _MIXED.fullmatch(text)) and int(mixed[3]) < int(mixed[4]):
        return f"{mixed[1]}({mixed[2]}+{mixed[3]}/{mixed[4]})"
    return re.sub(_SPACE, "", text) if _WITH_SPACES.fullmatch(text) else text


def with_marked_math(text: str) -> str:
    """Return a text with the form of `as_math` in place of the content of boxes, dollars or brackets."""
    return _MATH.sub(lambda found: found[1] + as_math(found[2]) + found[3], text)


def final_answer(response: str) -> str:
    """Return the last <answer> of a response, without one what follows its thoughts, and if nothing does all of it.

    One that is empty, or only refers to a box before it or mentions the tag behind a box, is none.
    """
    after = response.rpartition("</think>")[2]
    box = _BOX.search(after)
    first_box = box.start() if box else len(after)
    answers = [
        found[1] for found in _ANSWER.finditer(after)
        if found.start() < first_box or not (_refers(found[1]) if found[2] else _MENTIONED.match(found[1]))
    ]  # fmt: skip
    answers = [each for each in answers if each.strip()]
    return next((each for each in (*answers[-1:], after, response) if each.strip()), "")


def _refers(answer: str) -> bool:
    """Return whether an <answer> only refers to a box, or is the `and` between two tags that are mentioned."""
    words = set(re.findall(r"\w+|[$\\]", answer.lower()))
    return words == {"and"} or (words <= _REFERRING and not words.isdisjoint(("above", "box", "boxed")))


def after_replaced_boxes(text: str) -> str:
    """Return what follows the last box that is parted by words from the one after it, as in `\\boxed{41}. Wait,
    \\boxed{42}`; all of the text if there is none. `and`, `or` and names of one letter part no boxes.
    """
    starts = [found.end() for found in _BOX.finditer(text)]
    for start, following in reversed(list(pairwise(starts))):
        end, depth = start, 1
        while depth and end < following:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        between = _COMMAND.sub(" ", text[end:following])
        if not depth and not {each.lower() for each in _WORD.findall(between)} <= {"and", "or"}:
            return text[end:]
    return text


def only_boxes(text: str) -> str:
    """Return a text of the same length that says nothing but its boxes: outside of them letters and digits are dots.

    `$41$` or `the final answer is 41` is then no answer, nor is a box that was not closed. Separators stay: by them and
    by the distances math-verify tells which boxes belong together.
    """
    open_braces: list[int] = []
    ends: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_braces.append(brace.end())
        elif open_braces:
            ends[open_braces.pop()] = brace.end()
    parts: list[str] = []
    end = 0
    for box in _BOX.finditer(text):
        if box.start() >= end and box.end() in ends:
            parts += [_LETTERS.sub(_dots, text[end : box.start()]), text[box.start() : ends[box.end()]]]
            end = ends[box.end()]
    return "".join((*parts, _LETTERS.sub(_dots, text[end:])))


def _dots(found: re.Match[str]) -> str:
    return found[0] if found[0].lower() in _KEPT_WORDS else "." * len(found[0])


def ends_with(response: str, answer: Any) -> bool:
    """Return whether the last line of a response ends with a right answer, as it is written, and a full stop or none.
    """
    last = (response.strip().splitlines() or [""])[-1].rstrip(" .")
    text = as_text(answer).rstrip(" .")
    return re.search(rf"(?<![\w.,/+-])(?<!\d ){re.escape(text)}$", last) is not None


def is_number(answer: Any) -> bool:
    """Return whether a right answer is one finite number, or the text of one; commas may separate digits."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return False
    try:
        return Decimal(str(answer).replace(",", "")).is_finite()
    except ArithmeticError:
        return False


def is_answer(answer: Any) -> bool:
    """Return whether a right answer may be one that math-verify compares with: neither empty nor true, false, null, a
    mapping or no finite number.
    """
    if answer is None or isinstance(answer, bool | dict) or (isinstance(answer, list) and not answer):
        return False
    return as_text(answer) != "" and (not isinstance(answer, float) or math.isfinite(answer))
