"""The task of prompts in files, folders or data sets of the hub, and the columns that their rows may have.

    verl              prompt, reward_model.ground_truth, data_source, extra_info
    TRL               prompt, and answer, solution or ground_truth, if a reward wants one
    verifiers         prompt or question, answer, info, task
    GSM8K             only question and answer, where each answer ends with a line `#### number`: gsm8k.py

`task.columns`, or `columns` of one source, names other columns. The remaining columns become `question.extra`, but in
verl's files only extra_info does.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config import ColumnsConfig, Config, DataConfig, TaskConfig
from async_rl.base.config.suites import GSM8K_INSTRUCTION
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import Rows, files_of, rows_of
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.rules import RULES, check_reference, rule_for_source
from rollout_server.tasks.base import Task, chat_messages
from rollout_server.tasks.gsm8k import COLUMNS as GSM8K_COLUMNS
from rollout_server.tasks.gsm8k import gsm8k_row, is_gsm8k_row

KNOWN = {
    "prompt": ("prompt", "question"),
    "reference": ("reward_model.ground_truth", "ground_truth", "answer", "solution"),
    "solution": ("extra_info.answer",),
    "source": ("data_source", "task"),
}
"""For each part of a question: the column names to look for, in this order."""
EXTRA = ("extra_info", "info")
"""Columns whose values are mappings. Their items become entries of `question.extra`."""
MEDIA = ("images", "videos", "audios")
"""Columns that models here can't read. They are not put into `question.extra`."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedColumns:
    """The columns that the configuration names for one source of prompts."""

    columns: ColumnsConfig
    key: str
    """The setting that names these columns, for error messages."""
    own: str
    """The setting that would name columns for this source alone, for advice in error messages."""

    @classmethod
    def of(cls, config: TaskConfig, sources: Sequence[DataConfig], index: int, setting: str) -> NamedColumns:
        """Return the named columns of sources[index].

        Args:
            setting: the setting that lists the sources: task.path or task.eval_path.
        """
        entry = f"{setting}[{index}].columns"
        if (named := sources[index].columns) != ColumnsConfig():
            return cls(columns=named, key=entry, own=entry)
        return cls(columns=config.columns, key="task.columns", own=entry if len(sources) > 1 else "task.columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The column of each part of a question in one file; "" for a part that the file lacks."""

    prompt: str
    reference: str
    solution: str
    source: str
    others: tuple[str, ...]
    """Columns for `question.extra`."""
    wanted: tuple[str, ...]
    """All columns that are read from the file."""

    @property
    def about(self) -> str:
        """A description for the console, for example `prompts from question, references from answer`."""
        return ", ".join(f"{part}s from {getattr(self, part)}" for part in KNOWN if getattr(self, part))

    def is_guessed(self, named: ColumnsConfig) -> bool:
        """Return whether the columns were guessed: neither are prompt and reference named, nor is it verl's schema."""
        return not (named.prompt and named.reference) and self.reference != "reward_model.ground_truth"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    data: DataConfig
    first_row: int
    """The number of the source's first row, counted over all sources."""
    questions: list[tuple[int, Question]]
    """(row, question) of each prompt that is short enough. Rows count from 0 over all files of the source."""

    @property
    def per_epoch(self) -> int:
        """The number of prompts of the source in an epoch."""
        return max(1, round(self.data.weight * len(self.questions)))


class FilesTask(Task):
    """A task with the rows of task.path for training, and of task.eval_path held out. Its constructor reads both."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._train = self._read_all(config.task.train_data, "task.path")
        self._starts = [0, *accumulate(len(source.questions) for source in self._train)]
        self.num_prompts = sum(source.per_epoch for source in self._train)
        self._eval: list[tuple[int, str, int, Question]] = []
        """(row among all sources, name of its source, row in it, question) of each held-out question."""
        if config.eval.num_prompts and config.task.eval_data:
            self._eval = self._held_out(self._read_all(config.task.eval_data, "task.eval_path"))
        elif config.eval.num_prompts and not config.eval.suite:
            warnings.warn("task.eval_path is not set: no held-out accuracy is measured", stacklevel=2)
        self._tell_repeated()

    def train_question(self, position: int) -> Question:
        return self._at(position)[2]

    def eval_questions(self) -> list[Question]:
        return [question for *_, question in self._eval]

    def eval_prompts(self) -> list[Prompt]:
        """Return the held-out prompts. With several sources, `source` of a prompt is the name of its source."""
        prompts = super().eval_prompts()
        if len(self._config.eval_data) < 2:
            return prompts
        return [replace(prompt, source=name) for prompt, (_, name, _, _) in zip(prompts, self._eval, strict=True)]

    def verify(self, question: Question, response: str) -> float:
        return RULES[rule_for_source(question.source)](question, response)

    def rules_of(self, question: Question) -> tuple[str, ...]:
        return tuple(name or rule_for_source(question.source) for name in super().rules_of(question))

    def _at(self, position: int) -> tuple[_Source, int, Question]:
        """Return (source, row in the source, question) for training question number `position`."""
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
        """Return the first eval.num_prompts held-out questions, taken from the sources in turn for equal shares."""
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
            questions, num_rows = self._read(data, key, NamedColumns.of(self._config, sources, index, key))
            found.append(_Source(data=data, first_row=first_row, questions=questions))
            first_row += num_rows
        return found

    def _read(self, data: DataConfig, key: str, named: NamedColumns) -> tuple[list[tuple[int, Question]], int]:
        """Read a source. Returns ((row, question) of each prompt that is short enough, the number of rows)."""
        questions: list[tuple[int, Question]] = []
        cheatable: list[str] = []
        num_rows = 0
        for file in files_of(data.path, key):
            for question in self._questions(file, data, num_rows, named):
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
            self.cautions.append(
                f"{data.path}: {len(cheatable)} of {len(questions)} questions have a test that runs in the answer's "
                f"process, so that a dishonest answer can pass it; the first is {cheatable[0]}. Their share in a step "
                "is reward/<name>/cheatable."
            )
        return questions, num_rows

    def _questions(self, file: Path, data: DataConfig, first: int, named: NamedColumns) -> list[Question]:
        """Return the questions of a file.

        Args:
            first: the number of the file's first row within the source.
        """
        found: Rows = rows_of(file, lambda names: find_columns(names, named, str(file)).wanted)
        if media := media_columns(found.columns, found.rows):
            self.cautions.append(f"{file} has the column {', '.join(media)}, which no model sees: they read only text.")
        places = [f"{data.path}, row {first + i}" for i in range(len(found.rows))]
        if not found.rows:
            return []
        if is_of_gsm8k(found.columns, named.columns, found.rows):
            self.cautions.append(
                f"{file} is read as GSM8K's own: references are the numbers after ####, and to each prompt is added: "
                f"{GSM8K_INSTRUCTION} If that is not meant, set {named.own}: {{prompt: question, reference: answer}}."
            )
            return [gsm8k_question(row, first + i, places[i]) for i, row in enumerate(found.rows)]
        columns = find_columns(found.columns, named, str(file))
        if columns.is_guessed(named.columns):
            self.cautions.append(f"{file} has {columns.about}. Name other columns in {named.own}.")
        rows = zip(found.rows, places, strict=True)
        return [make_question(row, columns, data.short_name, where) for row, where in rows]

    def _tell_repeated(self) -> None:
        """Add warnings about repeated prompts, and about held-out prompts that are also training prompts."""
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


def find_columns(names: Sequence[str], named: NamedColumns, where: str) -> Columns:
    """Find which of a file's columns has which part of a question.

    Args:
        names: the file's columns.
        named: the columns that the configuration names.
        where: the file, for error messages.

    Raises:
        ConfigError: the file lacks a named column, or has no column of prompts.
    """
    found: dict[str, str] = {}
    for part, known in KNOWN.items():
        name = getattr(named.columns, part)
        if name and _holder(name, names) not in names:
            raise ConfigError(
                f"{where} has no column {name}, as {named.key}.{part} names it; found: {_listed(names)}. Where sources "
                "differ, an entry of a list of them has its own: {path: ..., columns: {" + part + ": ...}}"
            )
        present = [each for each in known if _holder(each, names) in names and each != found.get("prompt")]
        found[part] = name or (present[0] if present else "")
    if not found["prompt"]:
        raise ConfigError(
            f"{where} has no prompts: needs a column prompt or question, or one that {named.own}.prompt names; found: "
            f"{_listed(names)}"
        )
    taken = tuple(_holder(each, names) for each in found.values() if each)
    is_of_verl = "reward_model" in names and not named.columns.reference
    others = [name for name in names if name in EXTRA or not (is_of_verl or name in taken or name in MEDIA)]
    return Columns(**found, others=tuple(others), wanted=tuple(dict.fromkeys([*taken, *others])))


def media_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the columns, of `names`, that contain images, videos or sounds."""
    may_be = (*MEDIA, "image", "video", "audio")
    return [name for name in may_be if name in names and not all(isinstance(row.get(name), str | None) for row in rows)]


def is_of_gsm8k(names: Sequence[str], named: ColumnsConfig, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a file has GSM8K's own form: only question and answer, and each answer ends with `#### number`."""
    return named == ColumnsConfig() and set(names) == set(GSM8K_COLUMNS) and all(map(is_gsm8k_row, rows))


def gsm8k_question(row: Mapping[str, Any], index: int, where: str) -> Question:
    """Return the question of a row in GSM8K's own form.

    Args:
        index: the row's number in the file.
        where: the row, for error messages.
    """
    made = gsm8k_row(row, index, where)
    return Question(
        messages=tuple(made["prompt"]), ground_truth=made["reward_model"]["ground_truth"], solution=row["answer"],
        extra=made["extra_info"], source=made["data_source"],
    )  # fmt: skip


def make_question(row: Mapping[str, Any], columns: Columns, default_source: str, where: str) -> Question:
    """Return the question of a row.

    Args:
        default_source: the `source` of the question if the row has none.
        where: the row, for error messages.

    Raises:
        ConfigError: the row has no prompt, or a value of the wrong type.
    """
    extra = _extra(row, columns, where)
    reference = _value(row, columns.reference)
    if columns.reference and reference in (None, _MISSING):
        raise ConfigError(
            f"{where}: {columns.reference} is {'null' if reference is None else 'missing'}. Give the answer that the "
            "reward compares with, or leave the row out"
        )
    solution, source = _value(row, columns.solution), _value(row, columns.source)
    return Question(
        messages=_messages(_value(row, columns.prompt), columns.prompt, where),
        ground_truth=None if reference is _MISSING else reference,
        solution=solution if isinstance(solution, str) else "", extra=extra,
        source=default_source if source in (None, "", _MISSING) else str(source),
    )


def _extra(row: Mapping[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for name in columns.others:
        value = row.get(name)
        if name not in EXTRA:
            extra[name] = value
            continue
        if name == "info" and isinstance(value, str):  # as verifiers stores it
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: info is text that is not JSON: {error}") from None
        if value is not None and not isinstance(value, dict):
            kind = "text" if isinstance(value, str) else type(value).__name__
            raise ConfigError(
                f"{where}: {name} must be a mapping, got {kind}: {str(value)[:120]!r}. Parse it, or leave it out"
            )
        extra |= value or {}
    return extra


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return the row's value in a column, or _MISSING. `a.b` is a column of that name, or else the key b in column a.
    """
    if column and column in row:
        return row[column]
    value: Any = row if column else _MISSING
    for name in column.split(".") if column else ():
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _messages(prompt: Any, column: str, where: str) -> tuple[dict[str, str], ...]:
    messages = chat_messages(prompt, "user")
    if messages is None:
        got = None if prompt is _MISSING else prompt
        raise ConfigError(
            f"{where}: {column} must be text or a list of {{role, content}} messages, got {str(got)[:120]}"
        )
    if not any(message["content"].strip() for message in messages):
        raise ConfigError(f"{where}: {column} must hold some text, got {str(prompt)[:120]}. Leave out rows without any")
    return tuple(messages)


def _holder(name: str, names: Sequence[str]) -> str:
    """Return the column that contains `name`: the column of this whole name, or of its part before the first dot."""
    return name if name in names else name.partition(".")[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
