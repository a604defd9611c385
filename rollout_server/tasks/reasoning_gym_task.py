"""The task that generates its prompts with reasoning_gym (https://github.com/open-thought/reasoning-gym).

The package scores the answers too. Most of its scorers only compare texts, in microseconds. Some execute an answer as
Python; these run in a sandbox (reasoning_gym_scorer.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.contract import Reward, RewardResult, num_children
from rollout_server.tasks.base import Task
from rollout_server.tasks.reasoning_gym_answers import only_compares, score_here

if TYPE_CHECKING:
    from rollout_server.tasks.reasoning_gym_scorer import ReasoningGymScorer

_MAX_DRAWS = 50
"""If this many draws for one training question were all too long or held out, the dataset counts as exhausted."""
_FRUITLESS_DRAWS = 20
"""The search for held-out questions ends after this many draws without a new question, per question found."""
_EVAL_CHUNK = 1000
"""The number of held-out questions that are generated with one seed."""
_TRAIN, _HELD_OUT = 0, 1
_COMPOSITE = "composite"
_TAGGED_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
"""An answer in tags. A tag that was only mentioned before, as in `written in <answer> tags`, does not begin it."""


class ReasoningGymTask(Task):
    """A task with the questions of a reasoning_gym dataset. They are generated on first use, as some take 30 ms.

    The held-out set is the same for every run.seed. So a model that was warm-started under one seed has not seen the
    held-out questions of a run with another seed. A training question that is also held out is replaced by another one.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._name = config.task.name.removeprefix("reasoning_gym/")
        self.num_prompts = config.task.size
        _check_params(self._name, config.task.params)
        self._parts = _parts(config.task.params) if self._name == _COMPOSITE else {}
        self._dataset = cache(self._create_dataset)
        dataset = self._dataset(_TRAIN, 0)
        parts = dataset.datasets if self._parts else {self._name: dataset}
        compares = {part: only_compares(part, each) for part, each in parts.items()}
        self._scorer: ReasoningGymScorer | None = None
        """Scores answers that may run as code; None: all scorers of the dataset only compare."""
        if not all(compares.values()):
            from rollout_server.tasks.reasoning_gym_scorer import ReasoningGymScorer

            settings, is_contained = self._dataset_settings(_TRAIN, 0), config.task.sandbox.kind != "none"
            self._scorer = ReasoningGymScorer(dataset, compares, self._name, settings, is_contained=is_contained)
        self._draw_once = cache(self._draw)

    def train_question(self, position: int) -> Question:
        return self._draw_once(position)

    def eval_questions(self) -> list[Question]:
        return list(self._held_out.values())

    def verify(self, question: Question, response: str) -> float:
        """Score the last <answer>...</answer> of a response, or the whole response if it has none.

        The dataset's own scorer is used. The score is 0 if it can't read the answer or takes too long.
        """
        return self._verdict(question, response).score or 0.0

    def own_reward(self) -> Reward:
        """Return the Reward that calls the dataset's scorer. It needs a sandbox if the scorer may execute an answer."""
        return self._scorer.reward(self._verdict) if self._scorer else Reward(
            function=self._verdict, concurrency=num_children()
        )

    def _verdict(self, question: Question, response: str) -> RewardResult:
        answer = _answer_in(response)
        if self._scorer:
            return self._scorer.score(question, answer)
        score = score_here(self._dataset(_TRAIN, 0), question, answer)
        return RewardResult(score if isinstance(score, float) else 0.0)

    def has_answer(self, prompt: Prompt, response: str) -> bool | None:
        if "" not in self.rules_of(prompt.question):
            return super().has_answer(prompt, response)
        if not response.strip():
            return False
        answer = _answer_in(response)
        if self._scorer:
            return self._scorer.has_read(prompt.question, answer)
        return isinstance(score_here(self._dataset(_TRAIN, 0), prompt.question, answer), float)

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
        """The eval.num_prompts held-out questions as {text: question}. The first access generates all of them."""
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
        if not found:
            raise ConfigError(
                f"all of {num_draws} questions of {self._config.name} have more than task.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens} tokens: raise it"
            )
        raise ConfigError(
            f"{self._config.name} with task.params {self._config.params} gave only {len(found)} different "
            f"questions of at most {self._config.max_prompt_tokens} tokens in {num_draws} draws: too few for "
            f"eval.num_prompts = {self.eval_size}. Set eval.num_prompts to at most {len(found) // 4}, raise "
            f"task.max_prompt_tokens, or widen task.params."
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
    """Check task.params.datasets, the parts of a composite dataset. Returns {"datasets": their DatasetSpecs}."""
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
