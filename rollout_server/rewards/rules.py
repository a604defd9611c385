"""The rules that compare a response with the right answer: gsm8k, gsm8k_flexible and math_verify.

math-verify (https://github.com/huggingface/Math-Verify) runs in child processes: its own timeouts are signals, which
only a main thread receives, and an answer like `9^9^9^9` would hold the worker's interpreter lock for minutes. A child
process can be killed.
"""

from __future__ import annotations

import json
import math
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, cast

from async_rl.base.errors import ConfigError, RewardError
from rollout_server.question import Question
from rollout_server.rewards.contract import IDLE_TIMEOUT_S, Reward, num_children

Rule = Callable[[Question, str], float]
"""A function from the question and a response's text, without special tokens, to the reward. It must be thread-safe."""

TAIL_CHARACTERS = 300
"""The length of the response's end. The GSM8K rules look for the answer there."""
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")
_MATH_SOURCE = re.compile(r"math|aime|amc|olympiad", re.IGNORECASE)
NUMBER_RULES = ("gsm8k", "gsm8k_flexible")
"""The rules whose right answer is one number."""
CHECK_TIMEOUT_S = 5.0
"""A child process whose check takes longer ends itself."""
ANSWER_TIMEOUT_S = 30.0
"""A child process that does not reply within this time, including its start, is killed."""
_MOST_DIGITS = 400
"""A number with an exponent is written out with at most this many digits; the largest float has 309."""
_WITH_EXPONENT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"([-+]?)(\d+)\s+([1-9]\d{0,99})\s*/\s*([1-9]\d{0,99})")
_SPACE = r"(?:\s|\\,|\\ |~)"
_WITH_SPACES = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?:\.\d+)?")
_FULL_STOP = re.compile(r"(?<=\d)\.$")
_MATH = re.compile(r"(\\boxed\{|\$|\\\(|\\\[)((?:[^{}$\\]|\\[, ])*)(\}|\$|\\\)|\\\])")
"""A box, or mathematics between dollars or brackets. Its groups are the beginning, the content and the end."""
_BOX = re.compile(r"\\boxed\{")
_ANSWER = re.compile(r"<answer>((?:[^<]|<(?!/?answer>))*)(</answer>)?")
_MENTIONED = re.compile(r"[^\w$\\+-]*[^\W\d_]{2}")
"""The text after a tag <answer> that is only mentioned, as in `written in <answer> tags`."""
_REFERRING = {
    "above", "and", "answer", "as", "at", "box", "boxed", "final", "given", "i", "in", "is", "it", "look", "my",
    "number", "please", "result", "same", "see", "shown", "solution", "stated", "that", "the", "value", "written",
}  # fmt: skip
"""The words of an <answer> that only says where the answer is, such as `see the box above`."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_BRACE = re.compile(r"[{}]")
_LETTERS = re.compile(r"\w+")
_KEPT_WORDS = {"and", "or", "percent", "percentage", "pct"}
"""Words outside boxes that math-verify reads as part of the answer."""


def gsm8k(question: Question, response: str, *, flexible: bool = False) -> float:
    """Return 1 if the last `#### number` in the response's last 300 characters is the answer, else 0.

    As in verl, one space follows `####`, and the texts are compared without commas: 72., 72.0 and 072 are not 72.
    Unlike in verl, commas in the right answer are ignored too, and a right answer that is the number 72.0, to which
    pandas converts whole numbers, is 72.
    Source: verl/utils/reward_score/gsm8k.py, for the format of Cobbe et al. 2021, arXiv 2110.14168.

    Args:
        flexible: take the last number, marked by `####` or not, and compare values: 72.0 is 72.
    """
    found, answer = find_number("gsm8k_flexible" if flexible else "gsm8k", response), as_text(question.ground_truth)
    if flexible:
        return float(found != "" and _number(found) == _number(answer))
    return float(found != "" and found.replace(",", "") == answer.replace(",", ""))


def find_number(rule: str, response: str) -> str:
    """Return the number in a response that a rule compares with the right answer; "" if there is none.

    Args:
        rule: a name in NUMBER_RULES.
    """
    pattern = _MARKED_NUMBER if rule == "gsm8k" else _NUMBER
    return next(reversed(pattern.findall(response[-TAIL_CHARACTERS:])), "")


def math_verify(question: Question, response: str) -> float:
    """Return 1 if math-verify finds the response's final answer equal to the reference, else 0.

    A reference that math-verify would misread is rewritten first; then a response that ends with the reference's text
    is right too. math-verify takes several boxes with words between them for one answer; here the last box alone is
    tried too. Then nothing outside the boxes counts, so that text before them is not a further attempt.
    """
    answer, response = question.ground_truth, final_answer(response)
    reference = with_marked_math(as_math(answer))
    if reference != as_text(answer) and ends_with(response, answer):
        return 1.0
    last = after_replaced_boxes(response)
    choices = [response] if last == response else [only_boxes(response), only_boxes(last)]
    return float(any(_math_checker().is_equal(with_marked_math(each), reference) for each in choices))


def rule_for_source(source: str, key: str = "task.reward") -> str:
    """Return the name of the rule for rows with this `data_source`, used if the configuration names no reward.

    A source that ends in `gsm8k` gets gsm8k; one that contains math, aime, amc or olympiad gets math_verify.

    Args:
        key: the setting that is empty, for the error message.

    Raises:
        ConfigError: the source is none of these. A guessed rule would train on a meaningless reward.
    """
    if source.lower().endswith("gsm8k"):
        return "gsm8k"
    if _MATH_SOURCE.search(source):
        return "math_verify"
    raise ConfigError(
        f"no reward rule belongs to data_source {source!r}. Set {key} to one of {', '.join(RULES)}, code, or "
        "to a function of yours: package.module:function"
    )


def check_reference(rule: str, answer: Any, where: str) -> str:
    """Raise ConfigError if `rule` can't read a right answer: it is no number, no answer for math-verify, or no tests.

    Args:
        where: the row with the answer, for the error message.

    Returns:
        For the rule `code`: the position of the first test that a dishonest answer can pass; else, or without one, "".
    """
    if rule == "code":
        from rollout_server.rewards.code.cases import first_cheatable, read_cases

        try:
            return first_cheatable(read_cases(answer))
        except (ValueError, TypeError, SyntaxError) as error:
            raise ConfigError(f"{where}: reward_model.ground_truth must hold the tests of a program: {error}") from None
    if rule in NUMBER_RULES and not is_number(answer):
        kind = "text or a number" if not isinstance(answer, str) else "one number"
        raise ConfigError(f"{where}: reward_model.ground_truth must be {kind} for the rule {rule}, {_got(answer)}")
    if rule == "math_verify" and not is_answer(answer):
        raise ConfigError(f"{where}: reward_model.ground_truth must be an answer for the rule {rule}, {_got(answer)}")
    return ""


def _got(answer: Any) -> str:
    remedy = "Set task.columns.reference to the column that has it, correct this row or leave it out"
    return f"got {answer!r:.120}. {remedy}"


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@cache
def _math_checker() -> MathChecker:
    return MathChecker()


def as_text(answer: Any) -> str:
    """Return a right answer as text. Floats are written as people do: 72 for 72.0, and 0.00001 for 1e-05."""
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(str(float(answer) + 0.0)), ".0f" if answer.is_integer() else "f")  # -0.0 + 0.0 is 0.0
    return str(answer).strip()


def as_math(answer: Any) -> str:
    """Return a right answer in a form that math-verify reads correctly.

    Unchanged, math-verify reads 3 1/2 as 2, 1 000 as 1 * 0, the e of 1e-5 as Euler's number, and 42. as no number.
    """
    text = _FULL_STOP.sub("", as_text(answer))
    if _WITH_EXPONENT.fullmatch(text) and abs((number := Decimal(text)).adjusted()) < _MOST_DIGITS:
        return format(number, "f")
    if (mixed := _MIXED.fullmatch(text)) and int(mixed[3]) < int(mixed[4]):
        return f"{mixed[1]}({mixed[2]}+{mixed[3]}/{mixed[4]})"
    return re.sub(_SPACE, "", text) if _WITH_SPACES.fullmatch(text) else text


def with_marked_math(text: str) -> str:
    """Return the text with the content of each box, dollar pair and bracket pair in the form of `as_math`."""
    return _MATH.sub(lambda found: found[1] + as_math(found[2]) + found[3], text)


def final_answer(response: str) -> str:
    """Return the last <answer> of a response. Without one: the text after its thinking, or else the whole response.

    An <answer> does not count if it is empty, only refers to a box before it, or only mentions the tag after a box.
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
    """Return whether the text of an <answer> only refers to a box, or is the `and` between two mentioned tags."""
    words = set(re.findall(r"\w+|[$\\]", answer.lower()))
    return words == {"and"} or (words <= _REFERRING and not words.isdisjoint(("above", "box", "boxed")))


def after_replaced_boxes(text: str) -> str:
    r"""Return the text after the last box that is followed by a correction.

    Example: for `\boxed{41}. Wait, \boxed{42}` the result is `. Wait, \boxed{42}`. Two boxes with only `and`, `or` or
    names of one letter between them are one answer. If there is no correction, the whole text is returned.
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
    """Return a text of the same length, with dots for letters and digits outside the boxes.

    `$41$` or `the final answer is 41` is then no answer, nor is a box that was not closed. Separators stay: math-verify
    uses them and the distances to decide which boxes belong together.
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
    """Return whether the response's last line ends with the text of the right answer. A full stop may follow it."""
    last = (response.strip().splitlines() or [""])[-1].rstrip(" .")
    text = as_text(answer).rstrip(" .")
    return re.search(rf"(?<![\w.,/+-])(?<!\d ){re.escape(text)}$", last) is not None


def is_number(answer: Any) -> bool:
    """Return whether a right answer is one finite number, or the text of one. Commas may separate digits."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return False
    try:
        return Decimal(str(answer).replace(",", "")).is_finite()
    except ArithmeticError:
        return False


def is_answer(answer: Any) -> bool:
    """Return whether math-verify can compare responses with this right answer.

    It can't if the answer is empty, true, false, null, a mapping, or not finite.
    """
    if answer is None or isinstance(answer, bool | dict) or (isinstance(answer, list) and not answer):
        return False
    return as_text(answer) != "" and (not isinstance(answer, float) or math.isfinite(answer))


class MathChecker:
    """A pool of math-verify processes for any thread. They start when needed and end with this process."""

    def __init__(self) -> None:
        self._num_children = num_children()
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(self._num_children):
            self._idle.put(None)

    def is_equal(self, response: str, gold: str) -> bool:
        """Return whether the response's final answer equals `gold`, in LaTeX. False if that takes over CHECK_TIMEOUT_S.

        Raises:
            RewardError: math-verify can't run, its process hangs, or no process was idle within IDLE_TIMEOUT_S.
        """
        try:
            child = self._idle.get(timeout=IDLE_TIMEOUT_S)
        except queue.Empty:
            raise RewardError(
                f"an answer waited {IDLE_TIMEOUT_S:.0f} s for one of the {self._num_children} math-verify processes "
                "to be idle"
            ) from None
        kept: subprocess.Popen[str] | None = None
        try:
            child = child or _start()
            reply = _ask(child, {"gold": gold, "response": response, "timeout_s": CHECK_TIMEOUT_S})
            if reply:
                kept = child
                return bool(json.loads(reply))
            returncode = child.wait(ANSWER_TIMEOUT_S)  # the child has closed its output, so it is ending
            if returncode == -signal.SIGALRM:
                return False
            raise RewardError(f"the math-verify process ended with code {returncode}: is math-verify installed?")
        finally:
            self._idle.put(kept)


def _ask(child: subprocess.Popen[str], request: dict[str, object]) -> str:
    """Send a request to a math-verify process and return its reply, `true` or `false`; "" if the process has ended.

    Raises:
        RewardError: the process did not answer within ANSWER_TIMEOUT_S, and was killed.
    """
    answers = cast(IO[str], child.stdout)
    try:
        print(json.dumps(request), file=child.stdin, flush=True)
        if wait([answers.fileno()], ANSWER_TIMEOUT_S):
            return answers.readline()
    except BrokenPipeError:
        return ""
    child.kill()
    raise RewardError(
        f"the math-verify process {child.pid} did not answer for {ANSWER_TIMEOUT_S:.0f} s, nor end; it was killed"
    )


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


RULES: dict[str, Rule] = {
    "gsm8k": gsm8k,
    "gsm8k_flexible": partial(gsm8k, flexible=True),
    "math_verify": math_verify,
}
"""The rules by their name in the configuration."""
# A thread's wait for a free math-verify process would count against the time limit.
GSM8K, GSM8K_FLEXIBLE, MATH_VERIFY = (Reward(function=rule, concurrency=num_children()) for rule in RULES.values())
