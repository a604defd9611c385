"""Scores answers with the scorers of reasoning_gym; some of them run an answer as Python.

    a scorer that only compares        in the caller's thread, which costs microseconds
    the right answer itself            there too: it is the dataset's own text, not a model's
    any other answer                   in a process of its own in a sandbox, whose interpreter has loaded the dataset

The process ends with its answer, and can't reach into the interpreter. So no answer changes the score of a later one.
"""

from __future__ import annotations

import base64
import os
import pickle
import queue
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from async_rl.base.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.code.sandbox import Bubblewrap, Ended, Interpreter, RunLimits
from rollout_server.rewards.contract import RewardResult
from rollout_server.rewards.reward_calls import IDLE_TIMEOUT_S, num_children

CPU_S, WALL_S = 5.0, 10.0
"""An answer whose score takes more processor time, or longer on a machine that has other work, is late, and wrong."""
_MEMORY_BYTES = 1 << 30
_COMPARING = frozenset({
    "ab", "chain_sum", "circuit_logic", "color_cube_rotation", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "game_of_life_halting", "needle_haystack", "number_format",
    "palindrome_generation", "path_star", "products", "self_reference", "sentence_reordering", "spell_backward",
    "zebra_puzzles",
})  # fmt: skip
"""Datasets of reasoning_gym 0.1.25 whose own scorers only compare an answer, as the scorer does that all datasets
inherit. Other scorers may run an answer, or compute for ever, for example 10 ** int(answer)."""
_MOST_SANDBOXES = 8
"""Each takes 90 MB and seconds to start."""
_KEPT_SCORES = 1024
"""Enough for equal answers of a group, and for the answers that a warning of equal rewards is about."""
_MOST_DIGITS = 32
"""The most characters of a score; a longer text would take long to read as a number."""
_SETUP = """
import base64, ctypes, pickle
import reasoning_gym
name, settings = pickle.loads(base64.b64decode({dataset!r}))
dataset = reasoning_gym.create_dataset(name, **settings)
NOT_DUMPABLE = 4
ctypes.CDLL(None).prctl(NOT_DUMPABLE, 0, 0, 0, 0)  # so that no answer traces this process
"""
_PROGRAM = """
import base64, pickle, sys
answer, entry = pickle.loads(base64.b64decode(sys.stdin.read()))
try:
    score = float(prepared["dataset"].score_answer(answer=answer, entry=entry))
except Exception:
    sys.excepthook(*sys.exc_info())
    score = None
print()
print(score)
"""


class ReasoningGymScorer:
    """Scores answers to the questions of a dataset, from any thread. Its sandboxes start when needed, and end with this
    object or this process.

    Args:
        dataset: the dataset.
        parts: the datasets that it is made of, by their names.
        name: its name. A sandbox makes it once more from name and `settings`.
        is_contained: use bubblewrap; task.sandbox says so.
    """

    def __init__(
        self, dataset: Any, parts: Mapping[str, Any], name: str, settings: Mapping[str, Any], *, is_contained: bool
    ) -> None:
        self._dataset = dataset
        self._compares = {part: only_compares(part, each) for part, each in parts.items()}
        package = os.path.dirname(os.path.abspath(reasoning_gym.__file__))
        self.sandbox = Bubblewrap(
            python=sys.executable, libraries=[os.path.dirname(package)], is_contained=is_contained
        )
        self._setup = _SETUP.format(dataset=base64.b64encode(pickle.dumps((name, settings))))
        self._idle: queue.LifoQueue[Interpreter] = queue.LifoQueue()
        for _ in range(min(_MOST_SANDBOXES, num_children())):
            interpreter = Interpreter(self.sandbox, self._setup)
            self._idle.put(interpreter)
            weakref.finalize(self, interpreter.close)
        self._scores: OrderedDict[tuple[str, Any, Any], float | str] = OrderedDict()
        """[question, its right answer, answer] the score that a process has given, or why it has given none: the
        newest."""

    @property
    def runs_answers(self) -> bool:
        """Whether the scorers do more than compare, so that an answer might be run as code."""
        return not all(self._compares.values())

    def start(self) -> None:
        """Start a sandbox, before the first answer is scored. AsyncRLError: it can't be started."""
        self._run("pass")

    def score(self, question: Question, answer: str) -> RewardResult:
        """Return the dataset's score of an answer, 0 if it can't be read or is late; the metric `late` is 1 then.

        Raises:
            Exception: the right answer can't be read either, so the scorer is broken.
            AsyncRLError: the process can't be run.
        """
        if self._scores_here(question, answer):
            score: float | str | None = self._score_here(question, answer)
        else:
            score = self.score_apart(question, answer)
            if isinstance(score, str) and isinstance(why := self.score_apart(question, question.ground_truth), str):
                right = f"{question.ground_truth!r:.100}"
                raise RewardError(f"the scorer of {question.source} can't read the right answer {right}: {why}")
        metrics = {"late": float(score is None)} if self.runs_answers else {}
        return RewardResult(score if isinstance(score, float) else 0.0, metrics, is_final=score is not None)

    def has_read(self, question: Question, answer: str) -> bool | None:
        """Return whether the scorer could read an answer, without waiting for a process; None if that is not known."""
        if self._scores_here(question, answer):
            return not isinstance(self._score_here(question, answer), str)
        score = self._scores.get(_key(question, answer))
        return None if score is None else not isinstance(score, str)

    def _scores_here(self, question: Question, answer: str) -> bool:
        return self._compares[question.source.partition("/")[2]] or answer == question.ground_truth

    def _score_here(self, question: Question, answer: str) -> float | str:
        """Return the score of an answer, or why it can't be read. Exception: nor can the right answer be read."""
        entry = _entry(question)
        try:
            return float(self._dataset.score_answer(answer=answer, entry=entry))
        except Exception as error:
            # Some scorers do not catch what a wrong answer raises, e.g. int("abc") in prime_factorization. The answer
            # is wrong then. If the right answer raises too, the scorer is broken and the group fails.
            self._dataset.score_answer(answer=question.ground_truth, entry=entry)
            return repr(error)

    def score_apart(self, question: Question, answer: Any) -> float | str | None:
        """Return the score that a process of its own gives an answer, or why it gives none; None: the answer is late.

        Nothing but a number from 0 to 1 is read of what comes from it: an answer that runs code there can forge that.
        """
        key = _key(question, answer)
        if (known := self._scores.get(key)) is not None:
            return known
        ended = self._run(_PROGRAM, base64.b64encode(pickle.dumps((answer, _entry(question)))).decode())
        if ended.is_late or ended.cpu_s >= CPU_S:  # on another day it may be fast enough
            return None
        score = self._scores[key] = _score(ended)
        while len(self._scores) > _KEPT_SCORES:
            self._scores.popitem(last=False)
        return score

    def _run(self, program: str, stdin: str = "") -> Ended:
        try:
            interpreter = self._idle.get(timeout=IDLE_TIMEOUT_S)
        except queue.Empty:
            raise RewardError(f"an answer waited {IDLE_TIMEOUT_S:.0f} s for a sandbox of its scorer") from None
        try:
            limits = RunLimits(wall_s=WALL_S, cpu_s=CPU_S, memory_bytes=_MEMORY_BYTES)
            return interpreter.run(program, stdin, limits)
        finally:
            self._idle.put(interpreter)


def only_compares(name: str, dataset: Any) -> bool:
    """Return whether the scorer of a dataset only compares an answer."""
    return name in _COMPARING or type(dataset).score_answer is ProceduralDataset.score_answer


def _score(ended: Ended) -> float | str:
    """Return the number that a process has printed last, if it is one from 0 to 1; else why there is none."""
    last = (ended.output.splitlines() or [""])[-1]
    if ended.exit_code == 0 and len(last) <= _MOST_DIGITS:
        try:
            if 0 <= (score := float(last)) <= 1:
                return score
        except ValueError:
            pass
    return (ended.errors.strip().splitlines() or [f"it ended with {ended.exit_code} and {last!r:.40}"])[-1][:300]


def _key(question: Question, answer: Any) -> tuple[str, Any, Any]:
    return question.messages[-1]["content"], question.ground_truth, answer


def _entry(question: Question) -> dict[str, Any]:
    return {
        "question": question.messages[-1]["content"], "answer": question.ground_truth, "metadata": question.extra,
    }  # fmt: skip
