"""The benchmarks that eval.suite names: where their questions are, what is added to them, and the rule that scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from async_rl.base.config.task_parts import ENTRY_SCHEMA, ColumnsConfig, DataConfig
from async_rl.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark."""

    path: str
    columns: ColumnsConfig
    reward: str
    """The rule that scores its answers, as in task.reward."""
    instruction: str
    """A sentence that is added to each question."""


_BOX = "Work it out step by step. Put the final answer in \\boxed{}."
GSM8K_INSTRUCTION = "Work it out step by step. End with a line that reads `#### ` followed by the number alone."
SUITES = {
    "gsm8k": Benchmark(
        path="hf://openai/gsm8k:main/test", columns=ColumnsConfig(prompt="question", reference="answer"),
        reward="gsm8k_flexible", instruction=GSM8K_INSTRUCTION,
    ),
    "math500": Benchmark(
        path="hf://HuggingFaceH4/MATH-500/test.jsonl", columns=ColumnsConfig(prompt="problem", reference="answer"),
        reward="math_verify", instruction=_BOX,
    ),
    "aime25": Benchmark(
        path="hf://math-ai/aime25/test.jsonl", columns=ColumnsConfig(prompt="problem", reference="answer"),
        reward="math_verify", instruction=_BOX,
    ),
}  # fmt: skip


def _read_suite(given: Any) -> tuple[DataConfig, ...]:
    """Return the sources of a list of names. An entry {name, path} has its questions in another place."""
    given = [given] if isinstance(given, str) and given else given or []
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"a list of {', '.join(SUITES)}")
    found = []
    for each in given:
        data = each if isinstance(each, DataConfig) else _entry(each)
        if data.name not in SUITES:
            raise ConfigError(f"eval.suite must name {', '.join(SUITES)}, got {data.name!r}")
        if data.weight != 1 or data.columns.solution or data.columns.source:
            raise ConfigError(
                f"eval.suite: {data.name} must have no weight, columns.solution or columns.source. They would have no "
                "effect: each question is asked once, and its source is the benchmark. Leave them out"
            )
        if data.columns == ColumnsConfig():
            data = replace(data, columns=SUITES[data.name].columns)
        found.append(data)
    if len({data.name for data in found}) < len(found):
        raise ConfigError(f"eval.suite must name a benchmark once, got {', '.join(data.name for data in found)}")
    return tuple(found)


def _entry(given: Any) -> DataConfig:
    fields = given if isinstance(given, dict) else {"name": given}
    name = fields.get("name")
    path = SUITES[name].path if isinstance(name, str) and name in SUITES else "unknown"
    return DataConfig(**{"path": path, **fields})


SuiteNames = Annotated[
    tuple[DataConfig, ...], PlainValidator(_read_suite),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"enum": [*SUITES]}, ENTRY_SCHEMA]}}),
]  # fmt: skip
"""The type of eval.suite."""
