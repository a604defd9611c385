"""The task that generates its prompts with reasoning_gym (https://github.com/open-thought/reasoning-gym).

The package scores the answers too, and some of its scorers run an answer as Python. Where an answer is scored:

    a scorer that only compares        in the caller's thread, in microseconds
    the right answer itself            there too: it is the dataset's own text, not a model's
    any other answer                   in a process of its own in a sandbox, whose interpreter has loaded the dataset

That process ends with its answer and can't reach into the interpreter. So no answer changes the score of a later one.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import difflib
import os
import pickle
import queue
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError, RewardError
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult, Score
from rollout_server.rewards.reward_calls import IDLE_TIMEOUT_S, num_children
from rollout_server.tasks.base import Task

if TYPE_CHECKING:
    from rollout_server.rewards.code.sandbox import Ended, Interpreter

_MAX_DRAWS = 50
"""The task counts as exhausted after so many draws for one training question that were all too long or held out."""
_FRUITLESS_DRAWS = 20
"""The search for held-out questions ends after so many draws without a new one, per question found."""
_EVAL_CHUNK = 1000
"""The number of held-out questions that are generated with one seed."""
_TRAIN, _HELD_OUT = 0, 1
_COMPOSITE = "composite"
_TAGGED_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
"""An answer in tags; a tag that is only named before it, as in `written in <answer> tags`, does not begin it."""
CPU_S, WALL_S = 5.0, 10.0
"""The limits of processor time and of time for scoring one answer. Beyond them it is late, and counts as wrong."""
_MEMORY_BYTES = 1 << 30
_COMPARING = frozenset({
    "ab", "chain_sum", "circuit_logic", "color_cube_rotation", "decimal_chain_sum", "dice", "emoji_mystery",
    "family_relationships", "figlet_font", "game_of_life_halting", "needle_haystack", "number_format",
    "palindrome_generation", "path_star", "products", "self_reference", "sentence_reordering", "spell_backward",
    "zebra_puzzles",
})  # fmt: skip
"""Datasets of reasoning_gym 0.1.25 whose own scorers only compare an answer, as the inherited scorer does. Other
scorers may run an answer, or compute for ever, for example 10 ** int(answer)."""
_MOST_SANDBOXES = 8
"""Each takes 90 MB and seconds to start."""
_KEPT_SCORES = 1024
"""Enough for equal answers of a group, and for those that a warning about equal rewards describes."""
_MOST_DIGITS = 32
"""The most characters of a score. A longer text would take long to read as a number."""
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


class ReasoningGymTask(Task):
    """A task made of a reasoning_gym dataset. Its questions are generated on first use, as some take 30 ms.

    The held-out set is the same for every run.seed. So a model that was warm-started under one seed has not learned the
    held-out questions of a run with another. A training question that is also held out is replaced by another one.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._name = config.task.name.removeprefix("reasoning_gym/")
        self.num_prompts = config.task.size
        _check_params(self._name, config.task.params)
        self._parts = _parts(config.task.params) if self._name == _COMPOSITE else {}
        self._dataset = cache(self._create_dataset)
        dataset, is_contained = self._dataset(_TRAIN, 0), config.task.sandbox.kind != "none"
        parts = dataset.datasets if self._parts else {self._name: dataset}
        self._scorer = ReasoningGymScorer(
            dataset, parts, self._name, self._dataset_settings(_TRAIN, 0), is_contained=is_contained
        )
        self._draw_once = cache(self._draw)

    def train_question(self, position: int) -> Question:
        return self._draw_once(position)

    def eval_questions(self) -> list[Question]:
        return list(self._held_out.values())

    def verify(self, question: Question, response: str) -> float:
        """Return the dataset's own score of the last <answer>...</answer>, or of the whole response if it has none.

        An answer that the dataset can't read, or not in time, scores 0.
        """
        return self._verdict(question, response).score or 0.0

    def own_reward(self) -> Reward:
        """Return the reward of `verify`. It needs the sandbox if the dataset's scorer may run an answer as code."""
        return Reward(
            open=self._open_scorer, concurrency=num_children(), check=self._check_scorer,
            describe=self._describe_containment,
        )  # fmt: skip

    @asynccontextmanager
    async def _open_scorer(self, config: Config, settings: None) -> AsyncIterator[Score]:
        if self._scorer.runs_answers:
            await asyncio.to_thread(self._scorer.start)
        yield self._verdict

    def _verdict(self, question: Question, response: str) -> RewardResult:
        return self._scorer.score(question, _answer_in(response))

    def has_answer(self, prompt: Prompt, response: str) -> bool | None:
        if "" not in self.rules_of(prompt.question):
            return super().has_answer(prompt, response)
        return bool(response.strip()) and self._scorer.has_read(prompt.question, _answer_in(response))

    def _check_scorer(self, config: Config, settings: None, timeout_s: float, key: str) -> None:
        """Check that an answer that runs code or is late spoils nothing but its own score."""
        if not self._scorer.runs_answers:
            return
        from rollout_server.rewards.code.sandbox import MARGIN_S

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
        self._scorer.sandbox.check()

    def _describe_containment(self, config: Config, settings: None) -> str:
        return f"answers that its scorer runs as Python {config.task.sandbox}" if self._scorer.runs_answers else ""

    def _draw(self, position: int) -> Question:
        for draw in range(_MAX_DRAWS):
            question = self._question(_TRAIN, draw, position)
            if question.messages[0]["content"] not in self._held_out and self.is_short_enough(question):
                return question
        raise ConfigError(
            f"{self._config.name} with task.params {self._config.params} has nothing left to train on: "
            f"{_MAX_DRAWS} questions drawn one after the other were held out or longer than "
            f"task.max_prompt_tokens = {self._config.max_prompt_tokens}. Lower eval.num_prompts (now "
            f"{self.eval_size}), raise task.max_prompt_tokens, or widen task.params."
        )

    @cached_property
    def _held_out(self) -> dict[str, Question]:
        """The eval.num_prompts held-out questions as {text: question}, all generated at the first access."""
        found: dict[str, Question] = {}
        num_draws = num_fruitless = 0
        while num_fruitless < _FRUITLESS_DRAWS * max(_MAX_DRAWS, len(found)):
            if len(found) == self.eval_size:
                return found
            question = self._question(_HELD_OUT, *divmod(num_draws, _EVAL_CHUNK))
            num_draws += 1
            num_fruitless += 1
            if self.is_short_enough(question) and question.messages[0]["content"] not in found:
                found[question.messages[0]["content"]] = question
                num_fruitless = 0
        raise ConfigError(
            f"{self._config.name} with task.params {self._config.params} gave only {len(found)} different "
            f"questions of at most {self._config.max_prompt_tokens} tokens in {num_draws} draws: too few for "
            f"eval.num_prompts = {self.eval_size}. Set eval.num_prompts to at most {len(found) // 4}, or widen "
            f"task.params."
        )

    def _question(self, kind: int, draw: int, position: int) -> Question:
        item = self._dataset(kind, draw)[position]
        dataset = item["metadata"]["source_dataset"] if self._parts else self._name
        return Question(
            messages=({"role": "user", "content": item["question"]},), ground_truth=item["answer"],
            extra=item["metadata"], source=f"reasoning_gym/{dataset}",
        )

    def _dataset_settings(self, kind: int, draw: int) -> dict[str, Any]:
        run_seed = self._seed if kind == _TRAIN else 0
        # Item i of a dataset is seeded with seed + i, so neighbouring seeds would give the same items, shifted.
        seed = int(np.random.SeedSequence([run_seed, kind, draw]).generate_state(1)[0]) >> 1
        size = self.num_prompts if kind == _TRAIN else _EVAL_CHUNK
        return {"seed": seed, "size": size, **self._config.params, **self._parts}

    def _create_dataset(self, kind: int, draw: int) -> Any:
        try:
            return reasoning_gym.create_dataset(self._name, **self._dataset_settings(kind, draw))
        except Exception as error:  # datasets raise any kind of error for bad parameters
            raise ConfigError(
                f"task.params {self._config.params} do not suit {self._config.name}: {type(error).__name__}: {error}"
            ) from error


def _check_params(name: str, params: dict[str, Any]) -> None:
    if name not in DATASETS:
        raise ConfigError(f"task.name: reasoning_gym has no dataset {name!r}.{_nearest(name, DATASETS)}")
    allowed = {f.name for f in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in params:
        if key in ("seed", "size"):
            raise ConfigError(f"task.params.{key} can't be set there: use run.seed and task.size")
        if key not in allowed:
            raise ConfigError(
                f"task.params: reasoning_gym/{name} has no parameter {key!r}.{_nearest(key, allowed)} "
                f"It has: {', '.join(sorted(allowed))}"
            )


def _parts(params: Mapping[str, Any]) -> dict[str, list[DatasetSpec]]:
    """Check task.params.datasets, the parts of a composite; return {"datasets": the DatasetSpecs made of them}."""
    parts = params.get("datasets")
    key = "task.params.datasets of reasoning_gym/composite"
    form = "a list of {name, weight, config}; weight (1) and config ({}) may be left out"
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"{key} must be {form}, got {parts!r}")
    specs = []
    for part in parts:
        spec = {"weight": 1.0, "config": {}, **part}
        if set(spec) != {"name", "weight", "config"} or not isinstance(spec["config"], dict):
            raise ConfigError(f"{key} must be {form}, got {part!r} in it")
        if spec["name"] == _COMPOSITE:
            raise ConfigError(
                "task.params.datasets: a composite can't be part of a composite, as its answers could not be scored. "
                "List its datasets instead"
            )
        _check_params(spec["name"], spec["config"])
        specs.append(DatasetSpec(**spec))
    return {"datasets": specs}


def _answer_in(response: str) -> str:
    tagged: list[str] = _TAGGED_ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


class ReasoningGymScorer:
    """Scores answers to the questions of a dataset, from any thread.

    Its sandboxes start when needed, and end with this object or this process.

    Args:
        parts: the datasets that `dataset` is made of, by their names.
        name: the name of `dataset`. A sandbox makes it once more from name and `settings`.
        is_contained: whether to use bubblewrap (task.sandbox).
    """

    def __init__(
        self, dataset: Any, parts: Mapping[str, Any], name: str, settings: Mapping[str, Any], *, is_contained: bool
    ) -> None:
        self._dataset = dataset
        self._compares = {part: only_compares(part, each) for part, each in parts.items()}
        self.runs_answers = not all(self._compares.values())
        """Whether a scorer does more than compare, so that an answer might be run as code."""
        self._scores: OrderedDict[tuple[str, Any, Any], float | str] = OrderedDict()
        """The newest scores of processes, or the reasons for none, by (question, right answer, answer)."""
        if not self.runs_answers:
            return
        from rollout_server.rewards.code.sandbox import Bubblewrap, Interpreter

        package = os.path.dirname(os.path.abspath(reasoning_gym.__file__))
        self.sandbox = Bubblewrap(
            python=sys.executable, libraries=[os.path.dirname(package)], is_contained=is_contained
        )
        setup = _SETUP.format(dataset=base64.b64encode(pickle.dumps((name, settings))))
        self._idle: queue.LifoQueue[Interpreter] = queue.LifoQueue()
        for _ in range(min(_MOST_SANDBOXES, num_children())):
            interpreter = Interpreter(self.sandbox, setup)
            self._idle.put(interpreter)
            weakref.finalize(self, interpreter.close)

    def start(self) -> None:
        """Start a sandbox, before the first answer is scored.

        Raises:
            AsyncRLError: it can't be started.
        """
        interpreter = self._idle.get(timeout=IDLE_TIMEOUT_S)
        try:
            if interpreter.process is None:
                interpreter.start()  # it may take longer than a run: the first one reads files from a cold disk
        finally:
            self._idle.put(interpreter)
        self._run("pass")

    def score(self, question: Question, answer: str) -> RewardResult:
        """Return the dataset's score of an answer: 0 if it can't be read or is late, then with the metric `late` = 1.

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
        """Return whether the scorer could read an answer, or None if only a process could tell."""
        if self._scores_here(question, answer):
            return not isinstance(self._score_here(question, answer), str)
        score = self._scores.get(_key(question, answer))
        return None if score is None else not isinstance(score, str)

    def _scores_here(self, question: Question, answer: str) -> bool:
        return self._compares[question.source.partition("/")[2]] or answer == question.ground_truth

    def _score_here(self, question: Question, answer: str) -> float | str:
        """Return the score of an answer, or why it can't be read. Raises if the right answer can't be read either."""
        entry = _entry(question)
        try:
            return float(self._dataset.score_answer(answer=answer, entry=entry))
        except Exception as error:
            # Some scorers do not catch what a wrong answer raises, e.g. int("abc") in prime_factorization. The answer
            # is wrong then. If the right answer raises too, the scorer is broken and the group fails.
            self._dataset.score_answer(answer=question.ground_truth, entry=entry)
            return repr(error)

    def score_apart(self, question: Question, answer: Any) -> float | str | None:
        """Return the score that a process of its own gives an answer, or why it gives none. None: the answer is late.

        Only a number from 0 to 1 is read from the process, because an answer that runs code there can forge the number.
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
        from rollout_server.rewards.code.sandbox import RunLimits

        try:
            limits = RunLimits(wall_s=WALL_S, cpu_s=CPU_S, memory_bytes=_MEMORY_BYTES)
            return interpreter.run(program, stdin, limits)
        finally:
            self._idle.put(interpreter)


def only_compares(name: str, dataset: Any) -> bool:
    """Return whether the scorer of a dataset only compares an answer."""
    return name in _COMPARING or type(dataset).score_answer is ProceduralDataset.score_answer


def _score(ended: Ended) -> float | str:
    """Return the number on the last line that a process has printed, if it is from 0 to 1, else why there is none."""
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
