"""The task whose prompts are in files, folders or data sets of the hub; columns.py knows what a row may hold."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config import Config, DataConfig
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import Rows, files_of, rows_of
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.code.cases import CHEATABLE
from rollout_server.rewards.rules import RULES, check_reference, rule_for_source
from rollout_server.tasks.base import Task
from rollout_server.tasks.columns import (
    Asked,
    find_columns,
    gsm8k_question,
    is_of_gsm8k,
    make_question,
    media_columns,
    why_not_gsm8k,
)
from rollout_server.tasks.gsm8k_rows import COLUMNS as OF_GSM8K
from rollout_server.tasks.gsm8k_rows import INSTRUCTION

AS_THEY_ARE = "{prompt: question, reference: answer}"
"""The columns of files that are like GSM8K's, named so that nothing is changed in their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    data: DataConfig
    first_row: int
    """The number of its first row among the rows of all sources."""
    questions: list[tuple[int, Question]]
    """(row, question) of each prompt that is short enough; rows count from 0, over all files of the source."""

    @property
    def per_epoch(self) -> int:
        """The number of prompts that an epoch has of it."""
        return max(1, round(self.data.weight * len(self.questions)))


class FilesTask(Task):
    """The task whose questions are the rows of task.path and, held out, of task.eval_path; its creation reads both."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._train = self._read_all(config.task.train_data, "task.path")
        self._starts = [0, *accumulate(len(source.questions) for source in self._train)]
        self.num_prompts = sum(source.per_epoch for source in self._train)
        self._eval: list[tuple[int, str, int, Question]] = []
        """(row among all sources, name of its source, row in it, question) of each held-out question."""
        if config.eval.num_prompts and config.task.eval_data:
            self._eval = self._held_out(self._read_all(config.task.eval_data, "task.eval_path"))
        elif config.eval.num_prompts:
            warnings.warn("task.eval_path is not set: no held-out accuracy is measured", stacklevel=2)
        self._tell_repeated()

    def train_question(self, position: int) -> Question:
        return self._at(position)[2]

    def eval_questions(self) -> list[Question]:
        return [question for *_, question in self._eval]

    def eval_prompts(self) -> list[Prompt]:
        """Return the held-out prompts; of several sources the `source` is the name of the prompt's."""
        prompts = super().eval_prompts()
        if len(self._config.eval_data) < 2:
            return prompts
        return [replace(prompt, source=name) for prompt, (_, name, _, _) in zip(prompts, self._eval, strict=True)]

    def verify(self, question: Question, response: str) -> float:
        return RULES[rule_for_source(question.source)](question, response)

    def rules_of(self, question: Question) -> tuple[str, ...]:
        return tuple(name or rule_for_source(question.source) for name in super().rules_of(question))

    def _at(self, position: int) -> tuple[_Source, int, Question]:
        """Return (source, row in it, question) of training question `position`."""
        index = int(np.searchsorted(self._starts, position, side="right")) - 1
        source = self._train[index]
        return source, *source.questions[position - self._starts[index]]

    def _place(self, position: int, *, is_held_out: bool) -> tuple[int, str]:
        if is_held_out:
            row, name, own, _ = self._eval[position]
            paths = {each.short_name: each.path for each in self._config.eval_data}
            return row, f"row {own} of {paths[name]}"
        source, own, _ = self._at(position)
        return source.first_row + own, f"row {own} of {source.data.path}"

    def _sources(self) -> list[tuple[int, int]]:
        return [(len(source.questions), source.per_epoch) for source in self._train]

    def _held_out(self, sources: Sequence[_Source]) -> list[tuple[int, str, int, Question]]:
        """Return the first eval.num_prompts held-out questions, of several sources in turn, so that each has its
        share."""
        of_sources = [
            [(each.first_row + row, each.data.short_name, row, question) for row, question in each.questions]
            for each in sources
        ]
        in_turn = [each for each in chain.from_iterable(zip_longest(*of_sources)) if each is not None]
        return sorted(in_turn[: self.eval_size], key=lambda each: each[0])

    def _read_all(self, sources: Sequence[DataConfig], key: str) -> list[_Source]:
        found: list[_Source] = []
        first_row = 0
        for index, data in enumerate(sources):
            questions, num_rows = self._read(data, key, Asked.of(self._config, sources, index, key))
            found.append(_Source(data=data, first_row=first_row, questions=questions))
            first_row += num_rows
        return found

    def _read(self, data: DataConfig, key: str, asked: Asked) -> tuple[list[tuple[int, Question]], int]:
        """Return ((row, question) of each row of a source whose prompt is short enough, the number of its rows)."""
        questions: list[tuple[int, Question]] = []
        cheatable: list[str] = []
        num_rows = 0
        for file in files_of(data.path, key):
            for question in self._questions(file, data, num_rows, asked):
                where = f"{data.path}, row {num_rows}"
                rules = self.rules_of(question)
                tests = {check_reference(rule, question.ground_truth, where) for rule in rules} - {""}
                if self.is_short_enough(question):
                    questions.append((num_rows, question))
                    cheatable += [f"row {num_rows}, {test}" for test in tests]
                num_rows += 1
        if not questions:
            limit = self._config.max_prompt_tokens
            shortest = f"task.max_prompt_tokens = {limit}: the shortest has {self.shortest_long_tokens} tokens"
            reason = f", all longer than {shortest}" if num_rows else ""
            raise ConfigError(f"{data.path} must have a row that can be used, got {num_rows} rows{reason}")
        if cheatable:
            self._tell_cheatable(f"{data.path}: {len(cheatable)} of {len(questions)} questions", cheatable[0])
        return questions, num_rows

    def _questions(self, file: Path, data: DataConfig, first: int, asked: Asked) -> list[Question]:
        """Return the questions of a file, whose first row is number `first` of the source."""
        found: Rows = rows_of(file, lambda names: find_columns(names, asked, str(file)).wanted)
        if media := media_columns(found.columns, found.rows):
            self.cautions.append(f"{file} has the column {', '.join(media)}, which no model sees: they read only text.")
        places = [f"{data.path}, row {first + i}" for i in range(len(found.rows))]
        if not found.rows:
            return []
        if is_of_gsm8k(found.columns, asked.columns, found.rows):
            self.cautions.append(
                f"{file} is read as GSM8K's own: references are the numbers after ####, and to each prompt is added: "
                f"{INSTRUCTION} If that is not meant, set {asked.own}: {AS_THEY_ARE}."
            )
            return [gsm8k_question(row, first + i, places[i]) for i, row in enumerate(found.rows)]
        columns = find_columns(found.columns, asked, str(file))
        if not columns.is_asked_for(asked.columns):
            self.cautions.append(f"{file} has {columns.about}. Name other columns in {asked.own}.")
            if (columns.prompt, columns.reference) == OF_GSM8K and (why := why_not_gsm8k(found.columns, found.rows)):
                self.cautions.append(
                    f"{file}: {why}. So whole answers are the references. Put the numbers into a column of their own, "
                    f"or set {asked.own}: {AS_THEY_ARE} if this is meant."
                )
        rows = zip(found.rows, places, strict=True)
        return [make_question(row, columns, data.short_name, where) for row, where in rows]

    def _tell_cheatable(self, questions: str, first: str) -> None:
        """Add a caution for questions with a test that a dishonest answer can pass."""
        told = f"{questions} have a test that {CHEATABLE}; the first is {first}"
        self.cautions.append(f"{told}. Their share in a step is reward/<name>/cheatable.")

    def _tell_repeated(self) -> None:
        """Add cautions for prompts that are there more than once, and for held-out prompts that are trained on."""
        trained = Counter(_text(question) for source in self._train for _, question in source.questions)
        held_out = Counter(_text(question) for *_, question in self._eval)
        for key, counted in (("task.path", trained), ("task.eval_path", held_out)):
            if repeated := counted.total() - len(counted):
                self.cautions.append(f"{key}: {repeated} of {counted.total()} prompts repeat an earlier one.")
        for name in dict.fromkeys(name for _, name, _, _ in self._eval):
            of_name = [_text(question) for _, each, _, question in self._eval if each == name]
            if leaked := sum(text in trained for text in of_name):
                self.cautions.append(
                    f"task.eval_path: {leaked} of {len(of_name)} held-out prompts of {name} are trained on too: the "
                    "accuracy on them does not show what the model makes of new ones."
                )


def _text(question: Question) -> str:
    """Return the messages as text for comparing prompts: in lower case, with white space as single spaces."""
    return "\n".join(f"{each['role']}: {' '.join(each['content'].casefold().split())}" for each in question.messages)
