"""Example answers: a few rows of each batch, which learner rank 0 reports and wandb shows as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.types import Batch

ROWS_A_STEP = 4
MAX_TOKENS = 4096
"""Prompts and answers are cut after this many tokens."""
COLUMNS = ("step", "group", "row", "prompt", "response", "reward", "staleness", "tokens", "finish_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An answer of a trained batch with its prompt, for the table in wandb."""

    step: int
    group_id: int
    number: int
    """The number of the answer in its group."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    num_tokens: int
    """The length of the answer before it was cut to MAX_TOKENS."""
    reward: float
    staleness: int
    finish_reason: str


def choose_examples(batch: Batch) -> tuple[Example, ...]:
    """Return one answer from each of ROWS_A_STEP groups, spread over the batch.

    Each step takes another answer of a group.
    """
    chosen = []
    for place in np.unique(np.linspace(0, len(batch.groups) - 1, ROWS_A_STEP).round().astype(int)).tolist():
        group = batch.groups[place]
        number = batch.version % len(group.rows)
        row = group.rows[number]
        trained = row.versions[row.mask] if row.mask.any() else row.versions
        chosen.append(
            Example(
                step=batch.version + 1,
                group_id=group.group_id,
                number=number,
                prompt_tokens=tuple(group.prompt_tokens[:MAX_TOKENS].tolist()),
                tokens=tuple(row.tokens[:MAX_TOKENS].tolist()),
                num_tokens=len(row.tokens),
                reward=row.reward,
                staleness=batch.version - int(trained.min()),
                finish_reason=row.finish_reason,
            )
        )
    return tuple(chosen)


class ExampleTable:
    """Converts examples to table rows with the columns COLUMNS.

    The texts need the file tokenizer.json of the model folder. Without it, token ids are shown.
    """

    def __init__(self, model_path: str) -> None:
        self._file = Path(model_path) / "tokenizer.json"

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file)) if self._file.is_file() else None

    def rows(self, examples: Iterable[Example]) -> list[list[Any]]:
        return [
            [
                each.step, each.group_id, each.number, self._text(each.prompt_tokens), self._text(each.tokens),
                each.reward, each.staleness, each.num_tokens, each.finish_reason,
            ]
            for each in examples
        ]  # fmt: skip

    def _text(self, tokens: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
