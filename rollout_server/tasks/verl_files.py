"""The task that reads its prompts from Parquet or JSONL files in verl's schema, or in the form of GSM8K's own files.

A row has `data_source`, `prompt` (chat messages), `reward_model` ({style: rule, ground_truth}) and may have `ability`
and `extra_info`. If `extra_info.answer` is text, supervised fine-tuning learns it as the worked solution. A row with
`question` and `answer` in place of these is of GSM8K, see gsm8k_rows.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container
from typing import Any

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.storage.row_files import read_rows
from rollout_server.question import Question
from rollout_server.rewards.rules import RULES, check_reference, rule_for_source
from rollout_server.tasks.base import Task
from rollout_server.tasks.gsm8k_rows import COLUMNS, gsm8k_row

_NEEDED = ("data_source", "prompt", "reward_model")
_USED = (*_NEEDED, "extra_info")
_MEDIA = ("images", "videos", "audios")


class VerlFilesTask(Task):
    """The task whose questions are the rows of task.path and, held out, of task.eval_path; its creation reads both."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._train = self._read(config.task.path, "task.path")
        self.num_prompts = len(self._train)
        self._eval: list[tuple[int, Question]] = []
        if config.eval.size and config.task.eval_path:
            self._eval = self._read(config.task.eval_path, "task.eval_path")
        elif config.eval.size:
            warnings.warn("task.eval_path is not set: no held-out accuracy is measured", stacklevel=2)

    def train_question(self, position: int) -> Question:
        return self._train[position][1]

    def eval_questions(self) -> list[Question]:
        return [question for _, question in self._eval[: self.eval_size]]

    def verify(self, question: Question, response: str) -> float:
        return RULES[rule_for_source(question.source)](question, response)

    def rules_of(self, question: Question) -> tuple[str, ...]:
        return tuple(name or rule_for_source(question.source) for name in super().rules_of(question))

    def _place(self, position: int, *, is_held_out: bool) -> tuple[int, str]:
        row, _ = (self._eval if is_held_out else self._train)[position]
        return row, f"row {row} of {self._config.eval_path if is_held_out else self._config.path}"

    def _read(self, path: str, key: str) -> list[tuple[int, Question]]:
        """Return (row, question) for each row of `path`, the value of `key`, whose prompt is short enough.

        Rows count from 0, over all files of a data set of the hub.
        """
        found, columns = read_rows(path, key, (*_USED, *COLUMNS), _check_columns)
        if media := [name for name in _MEDIA if name in columns]:
            self.cautions.append(f"{path} has the column {', '.join(media)}, which is not used: models see only text.")
        rows = [_question(_in_schema(row, i, f"{path}, row {i}"), f"{path}, row {i}") for i, row in enumerate(found)]
        for i, question in enumerate(rows):
            for rule in self.rules_of(question):
                check_reference(rule, question.ground_truth, f"{path}, row {i}")
        questions = [(i, question) for i, question in enumerate(rows) if self.is_short_enough(question)]
        if not questions:
            limit = self._config.max_prompt_tokens
            reason = f", all longer than task.max_prompt_tokens = {limit}" if rows else ""
            raise ConfigError(f"{path} must have a row that can be used, got {len(rows)} rows{reason}")
        return questions


def _check_columns(found: Collection[str], where: str) -> None:
    missing = [name for name in _NEEDED if name not in found]
    if missing and not _is_of_gsm8k(found):
        raise ConfigError(
            f"{where}: needs the columns {', '.join(_NEEDED)} (verl's schema), or {' and '.join(COLUMNS)} as GSM8K's "
            f"own files have them; lacks {', '.join(missing)}; found: {', '.join(found) or 'none'}"
        )


def _is_of_gsm8k(columns: Container[str]) -> bool:
    return "prompt" not in columns and all(name in columns for name in COLUMNS)


def _in_schema(row: dict[str, Any], index: int, where: str) -> dict[str, Any]:
    return gsm8k_row(row, index, where) if _is_of_gsm8k(row) else row


def _question(row: dict[str, Any], where: str) -> Question:
    messages, answer, extra = row["prompt"], row["reward_model"], row.get("extra_info") or {}
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(f"{where}: prompt must be a list of {{role, content}} messages, got {str(messages)[:120]}")
    if not any(message["content"].strip() for message in messages):
        raise ConfigError(f"{where}: prompt must hold some text, got {str(messages)[:120]}. Leave out rows without any")
    if not isinstance(answer, dict) or "ground_truth" not in answer:
        raise ConfigError(f"{where}: reward_model must be {{style, ground_truth}}, got {str(answer)[:120]}")
    if answer["ground_truth"] is None:
        raise ConfigError(
            f"{where}: reward_model.ground_truth is null. Give the answer that the reward compares with, or leave the "
            "row out"
        )
    if not isinstance(extra, dict):
        kind = "text" if isinstance(extra, str) else type(extra).__name__
        raise ConfigError(
            f"{where}: extra_info must be a mapping, got {kind}: {str(extra)[:120]!r}. Parse it, or leave it out"
        )
    solution = extra.get("answer")
    return Question(
        messages=tuple({"role": message["role"], "content": message["content"]} for message in messages),
        ground_truth=answer["ground_truth"], solution=solution if isinstance(solution, str) else "",
        extra=extra, source=str(row["data_source"]),
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
