"""Scores answers with the scorers of reasoning_gym, of which some run an answer as Python.

    a scorer that only compares        in the caller's thread, which costs microseconds
    the right answer itself            there too: it is the dataset's own text, not a model's
    any other answer                   in a process of its own, contained, which a server forks that has the dataset

The process ends with its answer, so that no answer can change how the next one is scored.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import reasoning_gym

from async_rl.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.contract import RewardResult
from rollout_server.sandbox.pool import Ended, RunLimits, SandboxPool
from rollout_server.tasks.comparing_scorers import only_compares

CPU_S, WALL_S = 5.0, 10.0
"""An answer whose score takes more processor time, or longer on a machine that has other work, is late, and wrong."""
_MEMORY_BYTES = 1 << 30
_KEPT_SCORES = 1024
"""Enough for equal answers of a group, and for the answers that a warning of equal rewards is about."""
_MOST_DIGITS = 32
"""The most characters of a score; a longer text would take long to read as a number."""
_SETUP = """
import base64, os, pickle, sys, sysconfig
packages, home = {packages!r}, {home!r}
sys.path += [path for path in packages if path not in sys.path]
# Programs may read what is below these paths: none may be a folder with runs, as an editable project's may be.
libraries = [*packages, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
sys.path[:] = [path for path in sys.path if (path + os.sep).startswith(tuple(each + os.sep for each in libraries))]
os.environ["HOME"] = home  # where packages have their caches
import reasoning_gym
name, settings = pickle.loads(base64.b64decode({dataset!r}))
dataset = reasoning_gym.create_dataset(name, **settings)
os.environ["HOME"] = "/tmp"
"""
_PROGRAM = """
import base64, pickle, sys, traceback
from prepared import dataset
answer, entry = pickle.loads(base64.b64decode(sys.stdin.read()))
try:
    score = float(dataset.score_answer(answer=answer, entry=entry))
except Exception:
    traceback.print_exc(limit=-3)
    score = None
print()
print(score)
"""


class ReasoningGymScorer:
    """Scores answers to the questions of a dataset, from any thread. Its server starts with `start`, or when first
    needed, and ends with this object or this process.

    Args:
        dataset: the dataset.
        parts: the datasets that it is made of, by their names.
        name: its name, by which together with `settings` the server makes it once more.
        is_contained: contain the processes that score; task.sandbox says so.
    """

    def __init__(
        self, dataset: Any, parts: Mapping[str, Any], name: str, settings: Mapping[str, Any], *, is_contained: bool
    ) -> None:
        self._dataset = dataset
        self._compares = {part: only_compares(type(each).score_answer) for part, each in parts.items()}
        own = os.path.dirname(os.path.dirname(os.path.abspath(reasoning_gym.__file__)))  # it may be in another place
        installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        packages = list(dict.fromkeys([own, *installed]))
        setup = _SETUP.format(
            packages=packages, home=os.path.expanduser("~"), dataset=base64.b64encode(pickle.dumps((name, settings))),
        )  # fmt: skip
        self._pool = SandboxPool(setup=setup, is_contained=is_contained, reads_as_root=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._scores: OrderedDict[tuple[str, Any, Any], float | str] = OrderedDict()
        """[question, its right answer, answer] the score that a process has given, or why it has given none: the
        newest."""

    @property
    def runs_answers(self) -> bool:
        """Whether the scorers do more than compare, so that an answer might be run as code."""
        return not all(self._compares.values())

    def start(self) -> None:
        """Start the server, before the first answer is scored. AsyncRLError: it can't be started."""
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
            score = self._score_apart(question, answer)
            if isinstance(score, str) and isinstance(why := self._score_apart(question, question.ground_truth), str):
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

    def _score_apart(self, question: Question, answer: Any) -> float | str | None:
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
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop, self._pool), name="scorer", daemon=True).start()
                weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False
        limits = RunLimits(wall_s=WALL_S, cpu_s=CPU_S, memory_bytes=_MEMORY_BYTES)
        return asyncio.run_coroutine_threadsafe(self._pool.run(program, stdin, limits), self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop, pool: SandboxPool) -> None:
    """Run the event loop of a pool until it is stopped, and end the pool."""
    loop.run_forever()
    with suppress(RuntimeError):  # where the interpreter ends meanwhile: the server has been told to end all the same
        loop.run_until_complete(pool.aclose())
    loop.close()


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
