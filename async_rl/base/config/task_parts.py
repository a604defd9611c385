"""The section judge, and parts of the section task: sources of prompts, their columns, and rewards."""

from __future__ import annotations

import os
import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PlainValidator, PositiveFloat, PositiveInt, WithJsonSchema

from async_rl.base.config.check import check
from async_rl.base.config.section import List, Named, PathText, Section, checked, section
from async_rl.base.config.system import Seconds, is_server_url
from async_rl.base.seams import ENGINES, EngineEntry, find_entry

RESERVED_REWARD_NAMES = ("mean", "std", "rule_mean", "env", "reward_model")
"""Names that have another meaning in the metrics reward/..., so no reward may have them."""


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]{0,64}", text) is not None


@section("task.rewards")
class RewardConfig:
    """One of the rewards whose weighted sum is the reward of an answer."""

    name: Annotated[str, checked(_is_name, "at most 64 letters, digits, _, - and .")] = ""
    """The name under which the reward is logged. Empty: the name of the rule or the function."""
    reward: str = ""
    """The rule or function, as in task.reward."""
    weight: float = 1.0
    """The factor of the reward's score in the sum. 0: it is only logged."""
    weights: Section[dict[str, float]] = field(default_factory=dict)
    """The factors in the sum of further numbers that the reward returns, by their names: {format: 0.2}."""
    params: Section[dict[str, Any]] = field(default_factory=dict)
    """The settings that the reward declares."""
    timeout_s: NonNegativeFloat = 0.0
    """How long one call may take. 0: timeouts.reward_s."""
    concurrency: NonNegativeInt = 0
    """The most simultaneous calls in a worker. 0: what the reward declares, else 32 for a `def` and 256 for an
    `async def`."""

    @property
    def counts(self) -> bool:
        """Whether the reward has a weight other than 0. Then answers without its verdict are left out."""
        return bool(self.weight or any(self.weights.values()))

    @property
    def short_name(self) -> str:
        """The name of the rule or the function, or `task` for the task's own reward."""
        return self.reward.rpartition(":")[2] or "task"


@section("task.sandbox")
class SandboxConfig:
    """Where programs in answers run, including answers that scorers of reasoning_gym may execute."""

    kind: Literal["bubblewrap", "none"] = "bubblewrap"
    """bubblewrap: contained, in their own namespaces. none: with all rights of the run's user."""
    url: str = ""
    """A service with SandboxFusion's API that runs programs instead: http://host:8080."""

    def __post_init__(self) -> None:
        check(not self.url or is_server_url(self.url), "task.sandbox.url", self.url, "http://host:port or empty")

    def __str__(self) -> str:
        if self.url:
            return f"run at {self.url} (task.sandbox.url)"
        if self.kind == "none":
            return "are not contained (task.sandbox.kind: none)"
        return "are contained by bubblewrap"


@section("task.columns")
class ColumnsConfig:
    """The columns of task.path and task.eval_path. Empty names are found automatically, in the schemas of verl, TRL,
    verifiers and GSM8K. An entry in a list of files may have its own columns.

    A name with dots is a column of that name, or leads into a column of mappings: reward_model.ground_truth.
    """

    prompt: str = ""
    """The prompt: text, or a list of chat messages."""
    reference: str = ""
    """The value that the reward compares an answer with: question.ground_truth."""
    solution: str = ""
    """A worked solution, for async-rl sft. Empty: extra_info.answer, else the reference."""
    source: str = ""
    """The kind of a question; each kind has its own accuracy. Empty: data_source or task, else the file's name."""


@section("task.path[]")
class DataConfig:
    """One of several sources of prompts."""

    path: PathText
    """A file, a glob, a folder of datasets.save_to_disk, or a data set of the hub, as in task.path."""
    weight: PositiveFloat = 1.0
    """How often the source's rows occur in an epoch. 2: twice. 0.25: a quarter of them, in each epoch the next quarter.
    """
    name: Annotated[str, checked(_is_name, "at most 64 letters, digits, _, - and .")] = ""
    """The name under which held-out results are logged: eval/accuracy/<name>. Empty: the file's name."""
    columns: Section[ColumnsConfig] = field(default_factory=ColumnsConfig)
    """The columns of this source, which replace all of task.columns. Empty: task.columns."""

    @property
    def short_name(self) -> str:
        """The field `name`, or the name of the file or folder without its ending."""
        return self.name or re.sub(r"[^\w.-]+", "-", Path(self.path).stem).strip("-") or "data"


Chance = Annotated[float, Field(ge=0.01, le=1)]


@section("task.difficulty")
class DifficultyConfig:
    """How rarely prompts may be sampled if all answers to them get one reward. 1: no prompt is skipped.

    Nothing is learned from a group with only one reward. With each such group in a row, the chance that its prompt is
    sampled in an epoch halves, down to these limits; a group with different rewards resets it to 1.
    """

    solved: Chance = 1.0
    """The lowest chance of a prompt if its answers were all right, by eval.correct_threshold."""
    unsolved: Chance = 1.0
    """The lowest chance of a prompt if its answers were not right but all had one reward. If it is higher than
    `solved`, hard prompts get more tries."""

    @property
    def skips(self) -> bool:
        """Whether prompts may be skipped."""
        return min(self.solved, self.unsolved) < 1


def _read_data(given: Any) -> str | tuple[DataConfig, ...]:
    if given is None or isinstance(given, str):
        return os.path.expanduser(given or "")
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError("a file, a glob, a folder, a data set of the hub, or a list of these")
    return tuple(
        each if isinstance(each, DataConfig) else DataConfig(**(each if isinstance(each, dict) else {"path": each}))
        for each in given
    )


ENTRY_SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["path"],
    "properties": {
        "path": {"type": "string"}, "weight": {"type": "number"}, "name": {"type": "string"},
        "columns": {
            "type": "object", "additionalProperties": False,
            "properties": {part: {"type": "string"} for part in ("prompt", "reference", "solution", "source")},
        },
    },
}  # fmt: skip
DataPaths = Annotated[
    str | tuple[DataConfig, ...], PlainValidator(_read_data),
    WithJsonSchema({
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, ENTRY_SCHEMA]}}]
    }),
]  # fmt: skip
"""The type of a field that names prompts: one source, or a list of sources, each a text or a DataConfig."""


def data_of(paths: str | tuple[DataConfig, ...]) -> tuple[DataConfig, ...]:
    """Return the sources in a field of the type DataPaths; () if it is empty."""
    if isinstance(paths, str):
        return (DataConfig(path=paths),) if paths else ()
    return paths


def _are_urls(urls: tuple[str, ...]) -> bool:
    return all(url.startswith(("http://", "https://")) for url in urls)


@section("judge")
class JudgeConfig:
    """The judge that the rewards judge, judge_pairwise and judge_listwise ask: a model on servers that the run
    starts, or a running endpoint like OpenAI's.
    """

    path: PathText = ""
    """The judge's model, by its folder or its name on the hub; the run starts placement.judge.servers servers for it.
        Empty:
    the run starts none."""
    engine: Annotated[str, Named(ENGINES, "judge.engine")] = "sglang"
    """The engine of the judge's servers, one that supports chats: sglang."""
    server_args: Section[dict[str, Any]] = field(default_factory=dict)
    """Further flags of the judge's servers, such as {context-length: 8192}."""
    urls: Annotated[List[tuple[str, ...]], checked(_are_urls, "a list of http:// or https:// addresses")] = ()
    """Base addresses of running endpoints, up to /v1: [https://host/v1]. Requests are spread over them; a failed
    request goes to another one. With `path` the run fills them in."""
    model: str = ""
    """The model name in requests. Empty: the first that the endpoint lists."""
    api_key_variable: str = ""
    """The rollout workers' environment variable with the key for `urls`. Empty: no key is sent."""
    requests_per_minute: NonNegativeFloat = 0.0
    """The most requests per minute of all workers together. Each worker has an equal share. 0: no limit."""
    concurrency: PositiveInt = 64
    """The most simultaneous requests of one worker."""
    timeout_s: Seconds = 60.0
    """How long the endpoint may take to answer one request."""
    patience_s: Annotated[float, Field(ge=0, le=100_000)] = 600.0
    """How long a failed request is retried. After that there is no verdict, and the answer leaves its group."""

    def __post_init__(self) -> None:
        check(
            not self.path or self.engine_entry.open_chat is not None, "judge.engine", self.engine,
            f"{' or '.join(name for name, entry in ENGINES.items() if entry.open_chat)} with judge.path",
            "Its servers don't answer chats.",
        )
        check(
            not self.api_key_variable or not self.path, "judge.api_key_variable", self.api_key_variable,
            "empty with judge.path", "The run makes the key of its own servers.",
        )

    @property
    def engine_entry(self) -> EngineEntry:
        """The `EngineEntry` named by `engine`."""
        return find_entry(ENGINES, self.engine, "judge.engine")
