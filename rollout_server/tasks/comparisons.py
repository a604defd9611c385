"""Reads preference comparisons between answers from Parquet or JSONL files, for `async-rl reward-model`.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 0.5}     a pair, as TRL has it; the margin may be missing
    {"chosen": [...], "rejected": [...]}                               the same; both are whole conversations
    {"prompt": ..., "answers": [...], "ranks": [1, 2, 2]}              a ranking, best first; equal ranks are a tie

A prompt is text (a message of the user) or chat messages. An answer is text, or chat messages that end with the
assistant's. If the first message of an answer is not the assistant's, the answer is a whole conversation, and `prompt`
is ignored.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.row_files import read_rows
from rollout_server.tasks.base import answer_tokens, chat_messages, prompt_text, prompt_tokens

_COLUMNS = ("prompt", "chosen", "rejected", "margin", "answers", "ranks")

Messages = list[dict[str, str]]


class ComparedAnswer(NamedTuple):
    """An answer with its prompt: the messages of the prompt, and both in the policy's tokens."""

    messages: Messages
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class ComparedAnswers:
    """Two or more answers to a prompt, and the pairs with a preferred answer."""

    prompt: str
    """The text of the prompt of the first answer."""
    answers: Sequence[ComparedAnswer]
    pairs: Sequence[tuple[int, int, float]]
    """(index of the preferred answer, index of the other answer, margin)."""


@dataclass(slots=True)
class ComparisonFile:
    """The comparisons in a file, and how many rows were left out."""

    comparisons: list[ComparedAnswers] = field(default_factory=list)
    too_long: int = 0
    """Rows whose prompt or answer is longer than task.max_prompt_tokens or rollout.max_response_tokens."""
    all_tied: int = 0
    """Rows without a preferred answer."""

    @property
    def summary(self) -> str:
        pairs = sum(len(each.pairs) for each in self.comparisons)
        text = f"{len(self.comparisons)} comparisons with {pairs} pairs"
        left_out = {"longer than task.max_prompt_tokens or rollout.max_response_tokens": self.too_long,
                    "without a better answer": self.all_tied}
        return text + "".join(f"; {count} left out, {why}" for why, count in left_out.items() if count)


def read_comparisons(config: Config, path: str, key: str, tokenizer: Any) -> ComparisonFile:
    """Read the preference comparisons (chosen and rejected answers) in a file.

    Args:
        key: the setting that names `path`, for error messages.
        tokenizer: the policy's tokenizer.

    Raises:
        ConfigError: the file can't be read, a row is malformed, or no row can be used.
    """
    rows = read_rows(path, key, _COLUMNS, _check_columns)
    found, settings = ComparisonFile(), config.task.chat_template_kwargs
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        conversations, pairs = _compared({name: value for name, value in row.items() if value is not None}, where)
        if not pairs:
            found.all_tied += 1
            continue
        texts = [prompt_text(tokenizer, messages[:-1], where, settings) for messages in conversations]
        answers = [
            ComparedAnswer(messages, prompt_tokens(tokenizer, text), answer_tokens(tokenizer, reply["content"]))
            for text, (*messages, reply) in zip(texts, conversations, strict=True)
        ]
        if any(_is_too_long(config, each.prompt, each.answer) for each in answers):
            found.too_long += 1
        else:
            found.comparisons.append(ComparedAnswers(texts[0], answers, pairs))
    if not found.comparisons:
        raise ConfigError(f"{key} {path} must have a comparison that can be used, got {found.summary}")
    return found


def split_by_prompt(
    comparisons: Sequence[ComparedAnswers], share: float, seed: int
) -> tuple[list[ComparedAnswers], list[ComparedAnswers]]:
    """Split comparisons into (training, held-out) so that no prompt is in both.

    Args:
        share: the share of prompts to hold out.

    Raises:
        ConfigError: there are too few prompts for this share.
    """
    prompts = sorted({each.prompt for each in comparisons})
    count = round(share * len(prompts))
    if share and not 0 < count < len(prompts):
        raise ConfigError(
            f"reward_training.held_out must be 0 or leave prompts on both sides, got {share:g} of {len(prompts)} "
            "different prompts. Set reward_training.eval_path to a file of held-out comparisons"
        )
    held_out = set(random.Random(seed).sample(prompts, count))
    return (
        [each for each in comparisons if each.prompt not in held_out],
        [each for each in comparisons if each.prompt in held_out],
    )


def _check_columns(found: Collection[str], where: str) -> None:
    if not {"chosen", "rejected"} <= set(found) and not {"prompt", "answers"} <= set(found):
        raise ConfigError(
            f"{where}: needs the columns chosen and rejected, or prompt and answers; found: "
            f"{', '.join(found) or 'none'}"
        )


def _compared(row: dict[str, Any], where: str) -> tuple[list[Messages], list[tuple[int, int, float]]]:
    """Return (a conversation for each answer of a row, the pairs with a preferred answer)."""
    answers: Any
    if "chosen" in row:
        margin = row.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ConfigError(f"{where}: margin must be a number, got {margin!r:.80}")
        answers, pairs = [row["chosen"], row.get("rejected")], [(0, 1, float(margin))]
        names = ["chosen", "rejected"]
    else:
        answers = row.get("answers")
        if not isinstance(answers, list) or len(answers) < 2:
            raise ConfigError(f"{where}: answers must be a list of two or more, got {answers!r:.80}")
        ranks = row.get("ranks") or list(range(len(answers)))
        if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(type(rank) is int for rank in ranks):
            raise ConfigError(
                f"{where}: ranks must be a list of whole numbers, one for each of {len(answers)} answers, got "
                f"{ranks!r:.80}"
            )
        order = itertools.permutations(range(len(answers)), 2)
        pairs = [(i, j, 0.0) for i, j in order if ranks[i] < ranks[j]]
        names = [f"answers[{i}]" for i in range(len(answers))]
    prompt, named = row.get("prompt"), zip(names, answers, strict=True)
    return [_conversation(prompt, answer, f"{where}: {name}") for name, answer in named], pairs


def _conversation(prompt: Any, answer: Any, where: str) -> Messages:
    """Join a prompt and an answer into one conversation. Its last message is the assistant's."""
    messages = chat_messages(answer, "assistant")
    if messages is None:
        raise ConfigError(f"{where} must be text or {{role, content}} messages, got {answer!r:.120}")
    if messages[0]["role"] == "assistant":
        asked = chat_messages(prompt, "user")
        if asked is None:
            raise ConfigError(
                f"{where} is an answer only, so there must be a prompt, text or {{role, content}} messages, got "
                f"{prompt!r:.120}"
            )
        messages = [*asked, *messages]
    if messages[-1]["role"] != "assistant":
        raise ConfigError(f"{where} must end with a message of the assistant, got one of {messages[-1]['role']!r:.40}")
    return messages


def _is_too_long(config: Config, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    return len(prompt) > config.task.max_prompt_tokens or len(answer) > config.rollout.max_response_tokens
