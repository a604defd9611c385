"""Finds the columns of a file that hold prompt, reference, solution and source, and makes questions of its rows.

    verl              prompt, reward_model.ground_truth, data_source, extra_info
    TRL               prompt, and answer, solution or ground_truth, if a reward wants one
    verifiers         prompt or question, answer, info, task
    GSM8K             question and answer alone, and each answer ends with a line `#### number`: gsm8k_rows.py

task.columns, or `columns` of one source, names others. Columns that hold none of these are in `question.extra`; in
verl's files extra_info alone is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.base.config import ColumnsConfig, DataConfig, TaskConfig
from async_rl.base.errors import ConfigError
from rollout_server.question import Question
from rollout_server.tasks.gsm8k_rows import COLUMNS as OF_GSM8K
from rollout_server.tasks.gsm8k_rows import gsm8k_row, is_gsm8k_row

KNOWN = {
    "prompt": ("prompt", "question"),
    "reference": ("reward_model.ground_truth", "ground_truth", "answer", "solution"),
    "solution": ("extra_info.answer",),
    "source": ("data_source", "task"),
}
"""The columns that are looked for, in this order, for each part of a question."""
EXTRA = ("extra_info", "info")
"""Columns whose values are in `question.extra` themselves."""
MEDIA = ("images", "videos", "audios")
"""Columns that models here can't read."""
MAY_BE_MEDIA = ("image", "video", "audio")
"""Columns that models here can't read, unless they hold text."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The columns that the user names for one source of prompts."""

    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    key: str = "task.columns"
    """The setting that names them."""
    own: str = "task.columns"
    """The setting that names this source's columns; one source among several has it in its entry."""

    @classmethod
    def of(cls, config: TaskConfig, sources: Sequence[DataConfig], index: int, setting: str) -> Asked:
        """Return what is asked for of one of the sources that `setting` names."""
        entry = f"{setting}[{index}].columns"
        if (named := sources[index].columns) != ColumnsConfig():
            return cls(columns=named, key=entry, own=entry)
        return cls(columns=config.columns, own=entry if len(sources) > 1 else "task.columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one file; "" for a part that it does not have."""

    prompt: str
    reference: str
    solution: str
    source: str
    others: tuple[str, ...]
    """The columns whose values are in `question.extra` by their names."""
    of_parts: tuple[str, ...]
    """The columns of the file that hold the parts."""

    @property
    def about(self) -> str:
        """The columns from which each part is taken, for people."""
        parts = ("prompt", "reference", "solution", "source")
        return ", ".join(f"{part}s from {getattr(self, part)}" for part in parts if getattr(self, part))

    def is_asked_for(self, asked: ColumnsConfig) -> bool:
        """Whether nothing is guessed: prompt and reference are named, or the file is in verl's schema."""
        return bool(asked.prompt and asked.reference) or self.reference == "reward_model.ground_truth"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns of the file that are read."""
        return tuple(dict.fromkeys([*self.of_parts, *self.others]))


def find_columns(names: Sequence[str], asked: Asked, where: str) -> Columns:
    """Return the columns of a file that has the columns `names`.

    Raises:
        ConfigError: `where` lacks one that is asked for, or has no prompts.
    """
    found: dict[str, str] = {}
    for part, known in KNOWN.items():
        name = getattr(asked.columns, part)
        if name and _holder(name, names) not in names:
            raise ConfigError(
                f"{where} has no column {name}, as {asked.key}.{part} names it; found: {_listed(names)}. Where sources "
                "differ, an entry of a list of them has its own: {path: ..., columns: {" + part + ": ...}}"
            )
        present = [each for each in known if _holder(each, names) in names and each != found.get("prompt")]
        found[part] = name or (present[0] if present else "")
    if not found["prompt"]:
        raise ConfigError(
            f"{where} has no prompts: needs a column prompt or question, or one that {asked.own}.prompt names; found: "
            f"{_listed(names)}"
        )
    taken = tuple(_holder(each, names) for each in found.values() if each)
    is_of_verl = "reward_model" in names and not asked.columns.reference
    kept = [name for name in names if name in EXTRA or not (is_of_verl or name in taken or name in MEDIA)]
    return Columns(**found, others=tuple(kept), of_parts=taken)


def media_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns, out of `names`, with images, videos or sounds, which no model here can read."""
    texts = [name for name in MAY_BE_MEDIA if all(isinstance(row.get(name), str | None) for row in rows)]
    return [name for name in (*MEDIA, *MAY_BE_MEDIA) if name in names and name not in texts]


def is_of_gsm8k(names: Sequence[str], asked: ColumnsConfig, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the rows are in the form of GSM8K's own: question and answer alone, a marked number in each."""
    return asked == ColumnsConfig() and set(names) == set(OF_GSM8K) and all(map(is_gsm8k_row, rows))


def why_not_gsm8k(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return why rows can't be read as GSM8K's although some are like these; "" if none is like these."""
    like = sum(map(is_gsm8k_row, rows))
    if not like:
        return ""
    others = [name for name in names if name not in OF_GSM8K]
    also = f"there is the column {', '.join(others)} too" if others else "columns are named"
    but = also if like == len(rows) else "the others do not"
    return f"{like} of {len(rows)} answers end with a line `#### number` as GSM8K's do, but {but}"


def gsm8k_question(row: Mapping[str, Any], index: int, where: str) -> Question:
    """Return the question of a row of GSM8K's own files."""
    columns = find_columns(("data_source", "prompt", "reward_model", "extra_info"), Asked(), where)
    return make_question(gsm8k_row(row, index, where), columns, "", where)


def make_question(row: Mapping[str, Any], columns: Columns, default_source: str, where: str) -> Question:
    """Return the question of a row.

    Args:
        default_source: the source of rows that have none.

    Raises:
        ConfigError: `where` has no prompt, or what must be mappings or text is not.
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
    """Return the value at a column, whose dots lead into mappings if it is not its whole name; _MISSING: there is none.
    """
    if column and column in row:
        return row[column]
    value: Any = row if column else _MISSING
    for name in column.split(".") if column else ():
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _messages(prompt: Any, column: str, where: str) -> tuple[dict[str, str], ...]:
    prompt = None if prompt is _MISSING else prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ConfigError(
            f"{where}: {column} must be text or a list of {{role, content}} messages, got {str(prompt)[:120]}"
        )
    if not any(message["content"].strip() for message in prompt):
        raise ConfigError(f"{where}: {column} must hold some text, got {str(prompt)[:120]}. Leave out rows without any")
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _holder(name: str, names: Sequence[str]) -> str:
    """Return the column that holds what `name` names: of that whole name, or else of the name before the first dot."""
    return name if name in names else name.partition(".")[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
