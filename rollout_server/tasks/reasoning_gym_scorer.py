"""Scores answers to reasoning_gym questions, for datasets whose scorers may execute an answer as Python.

    a scorer that only compares        in the caller's thread, in microseconds
    the right answer itself            there too: it is the dataset's own text, not a model's
    any other answer                   in a process of its own in a sandbox, whose interpreter has loaded the dataset

That process ends with its answer and can't reach into the interpreter. So no answer changes the score of a later one.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import queue
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import RewardError
from rollout_server.question import Question
from rollout_server.rewards.code.sandbox import MARGIN_S, Bubblewrap, Ended, Interpreter, RunLimits
from rollout_server.rewards.contract import IDLE_TIMEOUT_S, Reward, RewardResult, Score, num_children
from rollout_server.tasks.reasoning_gym_answers import entry_of, score_here

CPU_S, WALL_S = 5.0, 10.0
"""The limits of CPU time and of elapsed time for scoring one answer. If it takes longer, the answer counts as wrong."""
_MEMORY_BYTES = 1 << 30
_MOST_SANDBOXES = 8
"""The most sandboxes. Each takes 90 MB, and seconds to start."""
_KEPT_SCORES = 1024
"""The number of scores that are remembered: enough for equal answers of a group and for warnings about equal rewards.
"""
_MOST_DIGITS = 32
"""The most characters of a printed score. Parsing a very long number would take long."""
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
    """Scores answers to the questions of a dataset, from any thread.

    Its sandboxes start when needed, and end with this object or this process.

    Args:
        compares: for each dataset that `dataset` consists of, by name: whether its scorer only compares.
        name, settings: the name and settings of `dataset`, with which a sandbox creates it again.
        is_contained: whether to use bubblewrap (task.sandbox).
    """

    def __init__(
        self, dataset: Any, compares: Mapping[str, bool], name: str, settings: Mapping[str, Any], *, is_contained: bool
    ) -> None:
        self._dataset, self._compares = dataset, compares
        self._scores: OrderedDict[tuple[str, Any, Any], float | str] = OrderedDict()
        """The newest scores from sandboxes, by (question, right answer, answer). A text is the reason for no score."""
        self.sandbox = Bubblewrap(is_contained=is_contained)
        setup = _SETUP.format(dataset=base64.b64encode(pickle.dumps((name, settings))))
        self._idle: queue.LifoQueue[Interpreter] = queue.LifoQueue()
        for _ in range(min(_MOST_SANDBOXES, num_children())):
            interpreter = Interpreter(self.sandbox, setup)
            self._idle.put(interpreter)
            weakref.finalize(self, interpreter.close)

    def reward(self, verdict: Score) -> Reward:
        """Return a Reward that scores answers in sandboxes of this scorer. Opening it starts the first sandbox.

        Args:
            verdict: the function that scores an answer. It must call `score`.
        """

        @asynccontextmanager
        async def opened(config: Config, settings: None) -> AsyncIterator[Score]:
            await asyncio.to_thread(self.start)
            yield verdict

        return Reward(open=opened, concurrency=num_children(), check=self._check, describe=self._describe)

    def _check(self, config: Config, settings: None, timeout_s: float, key: str) -> None:
        """Raise ConfigError unless an answer that executes code, or takes too long, can affect only its own score."""
        needed_s = 2 * WALL_S + MARGIN_S  # the right answer is scored too, if an answer can't be read
        limit = f"{key}.timeout_s" if key.startswith("task.rewards") else "timeouts.reward_s"
        check(
            needed_s <= timeout_s, limit, timeout_s,
            f"at least {needed_s:g} with task.name {config.task.name}",
            "Else an answer whose score takes long would cost its whole group the reward.",
        )
        check(
            not config.task.sandbox.url, "task.sandbox.url", config.task.sandbox.url,
            f"empty with task.name {config.task.name}", "Its scorer may run an answer as Python, in bubblewrap alone.",
        )
        self.sandbox.check()

    def _describe(self, config: Config, settings: None) -> str:
        return f"answers that its scorer runs as Python {config.task.sandbox}"

    def start(self) -> None:
        """Start a sandbox before the first answer is scored.

        Raises:
            AsyncRLError: the sandbox can't be started.
        """
        interpreter = self._idle.get(timeout=IDLE_TIMEOUT_S)
        try:
            if interpreter.process is None:
                interpreter.start()  # it may take longer than a run: the first one reads files from a cold disk
        finally:
            self._idle.put(interpreter)
        self._run("pass")

    def score(self, question: Question, answer: str) -> RewardResult:
        """Score an answer with the dataset's scorer.

        The score is 0 if the scorer can't read the answer or takes too long.

        If it takes too long, the result has the metric `late` = 1.

        Raises:
            Exception: the scorer can't read the right answer either, so it is broken.
            AsyncRLError: the sandbox can't run.
        """
        if self._scores_here(question, answer):
            score: float | str | None = score_here(self._dataset, question, answer)
        else:
            score = self.score_apart(question, answer)
            if isinstance(score, str) and isinstance(why := self.score_apart(question, question.ground_truth), str):
                right = f"{question.ground_truth!r:.100}"
                raise RewardError(f"the scorer of {question.source} can't read the right answer {right}: {why}")
        metrics = {"late": float(score is None)}
        return RewardResult(score if isinstance(score, float) else 0.0, metrics, is_final=score is not None)

    def has_read(self, question: Question, answer: str) -> bool | None:
        """Return whether the scorer could read an answer; None if that is not known without running a process."""
        if self._scores_here(question, answer):
            return not isinstance(score_here(self._dataset, question, answer), str)
        score = self._scores.get(_key(question, answer))
        return None if score is None else not isinstance(score, str)

    def _scores_here(self, question: Question, answer: str) -> bool:
        return self._compares[question.source.partition("/")[2]] or answer == question.ground_truth

    def score_apart(self, question: Question, answer: Any) -> float | str | None:
        """Score an answer in a sandbox. Returns the score, or as text why there is none; None: scoring took too long.

        Only a number from 0 to 1 is read from the process. An answer that executes code there can forge this number.
        """
        key = _key(question, answer)
        if (known := self._scores.get(key)) is not None:
            return known
        ended = self._run(_PROGRAM, base64.b64encode(pickle.dumps((answer, entry_of(question)))).decode())
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


def _score(ended: Ended) -> float | str:
    """Return the number from 0 to 1 in the last line that a process printed, or as text why there is none."""
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
