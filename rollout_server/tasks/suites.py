"""Reads the benchmarks of eval.suite as held-out questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from async_rl.base.config import Config
from async_rl.base.config.suites import SUITES
from async_rl.base.config.task_parts import DataConfig
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import files_of, rows_of
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.rules import check_reference
from rollout_server.tasks.base import Task
from rollout_server.tasks.files_task import NamedColumns, find_columns, make_question
from rollout_server.tasks.gsm8k import gsm8k_row


def suite_prompts(config: Config, task: Task) -> list[Prompt]:
    """Return the held-out prompts of the benchmarks in eval.suite.

    Of each benchmark they are the first eval.num_prompts questions. The source of a prompt is the benchmark's name.

    Raises:
        ConfigError: a file can't be read, a right answer does not suit the benchmark's rule, or a prompt is longer than
            task.max_prompt_tokens. A benchmark without that prompt would not be comparable.
    """
    prompts: list[Prompt] = []
    for index, data in enumerate(config.eval.suite if config.eval.num_prompts else ()):
        key = f"eval.suite[{index}].columns"
        rows = _rows(data, NamedColumns(columns=data.columns, key=key, own=key))
        first = len(prompts)
        for question, row, where in islice(rows, config.eval.num_prompts):
            prompts.append(replace(task.encode(question, len(prompts), row, where), is_held_out=True))
        if len(prompts) == first:
            raise ConfigError(f"eval.suite: {data.path} has no rows")
    longest = max(prompts, key=lambda prompt: len(prompt.tokens), default=None)
    if longest and len(longest.tokens) > config.task.max_prompt_tokens:
        raise ConfigError(
            f"eval.suite: {longest.origin} has {len(longest.tokens)} tokens, more than task.max_prompt_tokens = "
            f"{config.task.max_prompt_tokens}. Raise it: a benchmark is not comparable without all its questions"
        )
    return prompts


def _rows(data: DataConfig, named: NamedColumns) -> Iterator[tuple[Question, int, str]]:
    """Yield (question, its row, where that is) of each row of a benchmark."""
    benchmark, row = SUITES[data.name], 0
    for file in files_of(data.path, "eval.suite"):
        rows = rows_of(file, lambda names: names)
        columns = find_columns(rows.columns, named, str(file))
        for each in rows.rows:
            where = f"row {row} of {data.path}"
            question = make_question(each, columns, data.name, where)
            if data.name == "gsm8k":  # its answers are worked solutions
                worked = {"question": question.messages[-1]["content"], "answer": question.ground_truth}
                number = gsm8k_row(worked, row, where)["reward_model"]["ground_truth"]
                question = replace(question, ground_truth=number)
            check_reference(benchmark.reward, question.ground_truth, where)
            *before, last = question.messages
            last = {**last, "content": f"{last['content']}\n{benchmark.instruction}"}
            yield replace(question, messages=(*before, last), source=data.name), row, where
            row += 1


class BenchmarksAlone(Task):
    """A task for `async-rl eval MODEL eval.suite=[...]`: it has no prompts of its own."""

    num_prompts = 1

    def train_question(self, position: int) -> Question:
        raise ConfigError("this task has no training prompts: set task.path or task.name")

    def eval_questions(self) -> list[Question]:
        return []

    def verify(self, question: Question, response: str) -> float:
        raise NotImplementedError("each benchmark has its own rule")
