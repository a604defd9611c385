"""Metrics: declared where they are computed, reduced within a step, and put together over several steps.

    Metric("reward/mean", 0.5, by=EPISODES)                 a mean; over steps each answer counts the same
    Metric("push/bytes", 8e6, "sum")                        a sum, within the step and over steps
    Metric("time/sync_s", 0.2, "sum", over_steps="mean")    a sum within the step, and a mean over steps

A metric needs nothing else to be logged, and to be in wandb, on the page of a run and in the report of a sweep. The
driver keeps its declaration in the run directory, one line for each key:

    metric_declarations.jsonl    {"key": "reward/mean", "over_steps": "mean", "by": "batch/episodes", "unit": ""}

The figure of several steps is computed here alone, for the last table of a run, summary.json, the page, reports and
wandb's summary. A mean has weights, because steps differ: the plain mean of a share of time over steps of 0.4 s and 9 s
says nothing about the run.

    figure = sum(value * weight) / sum(weight)    over the steps that measured the metric
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Literal

from async_rl.base.run_dir.files import write_whole

Reduction = Literal["mean", "sum", "max", "min", "last"]
OverSteps = Literal["mean", "sum", "max", "min", "last", "median"]

TIME = "time/step_s"
EPISODES = "batch/episodes"
TOKENS = "batch/response_tokens"
GROUPS = "rollout/groups"
ENDED_EPISODES = "episode/ended"
DECLARATIONS = "metric_declarations.jsonl"
"""The name of the file of declarations in a run directory."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """How the values of one metric at several steps become one number, and their unit."""

    over_steps: OverSteps = "mean"
    by: str = ""
    """For a mean, the metric whose value is the weight of a step; if it is empty, all steps count the same."""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value, with the declaration of its metric.

    Several values of one key become one: those of a step by `reduce`, and those of many steps by `over_steps`.
    """

    key: str
    """A path, with the unit at its end if it is a count or a time, as in `time/step_s`."""
    value: float
    reduce: Reduction = "mean"
    weight: float = 1.0
    """What the value counts in the mean of a step."""
    over_steps: OverSteps | None = None
    """None: as `reduce`."""
    by: str = ""
    """What a step counts in a mean over steps: the value of the metric with this key. Empty: all steps count the same.
    """
    unit: str = ""

    @property
    def declaration(self) -> Declaration:
        return Declaration(self.over_steps or self.reduce, self.by, self.unit)


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum, "max": max, "min": min, "last": itemgetter(-1),
}  # fmt: skip


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return {key: value} of all metrics, reduced by `Metric.reduce`; a mean of total weight 0 is left out.

    Raises:
        ValueError: two metrics with one key differ in their reduction.
    """
    by_key: dict[str, list[Metric]] = {}
    for metric in metrics:
        same = by_key.setdefault(metric.key, [])
        if same and same[0].reduce != metric.reduce:
            raise ValueError(f"metric {metric.key!r} has two reductions: {same[0].reduce}, {metric.reduce}; use one")
        same.append(metric)
    values = {}
    for key, same in by_key.items():
        if (reduction := same[0].reduce) != "mean":
            values[key] = _REDUCTIONS[reduction]([metric.value for metric in same])
        elif weight := math.fsum(metric.weight for metric in same):
            values[key] = math.fsum(metric.weight * metric.value for metric in same) / weight
    return values


def folded(metrics: Sequence[Metric]) -> list[Metric]:
    """Return one metric for each key, which stands for all of that key: reduced with later ones they give the same.

    A mean may differ by a rounding error.
    """
    first = {metric.key: metric for metric in reversed(metrics)}
    weights = reduce_metrics(Metric(metric.key, metric.weight, "sum") for metric in metrics)
    return [
        replace(first[key], value=value, weight=weights[key]) for key, value in reduce_metrics(metrics).items()
    ]


def read_metrics(path: str | Path) -> list[dict[str, float | None]]:
    """Return one record for each step of a `metrics.jsonl`, in order. Lines of one step are merged; later values win.

    A last line without a line end, which a crash leaves, is skipped.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for line in _whole_lines(Path(path)):
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def read_declarations(run_dir: Path) -> dict[str, Declaration]:
    """Return the declaration of each metric of a run by key; the last line of a key counts.

    A metric without a line is a plain mean over steps, see `Figures`. All are, in a directory without the file.
    """
    file = run_dir / DECLARATIONS
    found = {}
    for line in _whole_lines(file) if file.is_file() else ():
        fields = json.loads(line)
        key = fields.pop("key")
        found[key] = Declaration(**fields)
    return found


class DeclarationFile:
    """The declarations of a run's metrics: a line is added to the file when a metric is new, or is declared otherwise.

    Args:
        resumes: keep the declarations that are there; else the file begins anew.
    """

    def __init__(self, run_dir: Path, *, resumes: bool) -> None:
        self._path = run_dir / DECLARATIONS
        self.known = read_declarations(run_dir) if resumes else {}
        """[key] the newest declaration."""
        write_whole(self._path, _as_lines(self.known))  # without a half line that a crash has left

    def add(self, metrics: Iterable[Metric]) -> None:
        """Write the lines of the metrics that are not in the file yet."""
        new = {each.key: each.declaration for each in metrics if self.known.get(each.key) != each.declaration}
        if new:
            self.known |= new
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_as_lines(new))


def _as_lines(declared: Mapping[str, Declaration]) -> str:
    return "".join(json.dumps({"key": key, **asdict(declaration)}) + "\n" for key, declaration in declared.items())


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last one that has no line end."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


class Figure:
    """The figure of one metric over the steps that `add` was given. If no step has a weight, all count the same."""

    __slots__ = ("_how", "_number", "_total", "_values", "_weight", "_weighted")

    def __init__(self, how: OverSteps) -> None:
        self._how = how
        self._total = self._weighted = self._weight = 0.0
        self._number = 0
        self._values: list[float] = []
        """The values that the median needs, or the one value that is the largest, the smallest or the last."""

    def add(self, value: float, weight: float | None = 1.0) -> None:
        """Add the value of one step; `weight` None: the step has not measured the metric that weighs it."""
        self._number += 1
        match self._how:
            case "mean" | "sum":
                self._total += value
                self._weighted += value * (weight or 0.0)
                self._weight += weight or 0.0
            case "median":
                self._values.append(value)
            case how:
                self._values[:] = [_REDUCTIONS[how]([*self._values, value])]

    def value(self) -> float:
        """Return the figure; `add` must have been called before."""
        if self._values:
            return statistics.median(self._values)
        if self._how == "sum":
            return self._total
        return self._weighted / self._weight if self._weight else self._total / self._number

    @property
    def total(self) -> float:
        return self._total


class Figures:
    """The figures of all metrics over the steps that `add` was given. Only a median keeps a number for each step.

    The first step that a process logs includes the warm-up. A sum, mean or median leaves it out, unless no other step
    measured the metric.

    Args:
        declared: by key; a metric that is missing in it is a plain mean. It may grow.
    """

    def __init__(self, declared: Mapping[str, Declaration]) -> None:
        self._declared = declared
        self._measured: dict[str, Figure] = {}
        self._warming_up: dict[str, Figure] = {}

    def add(self, record: Mapping[str, float | None]) -> None:
        """Add the record of one step; a value that is None was not measured."""
        warms_up = is_warm_up(record)
        for key, value in record.items():
            if value is not None and key != "step":
                declared = self._declared.get(key, PLAIN)
                counts = not warms_up or declared.over_steps in ("max", "min", "last")
                figures = self._measured if counts else self._warming_up
                figure = figures.get(key) or figures.setdefault(key, Figure(declared.over_steps))
                figure.add(value, record.get(declared.by) if declared.by else 1.0)

    def get(self, key: str) -> float | None:
        """Return the figure of a metric, or None if it was not measured."""
        figure = self._measured.get(key) or self._warming_up.get(key)
        return figure.value() if figure else None

    def total(self, key: str) -> float:
        """Return the sum of a mean or a sum over the steps, without those that include a warm-up."""
        figure = self._measured.get(key)
        return figure.total if figure else 0.0

    def all(self) -> dict[str, float]:
        """Return the figure of every metric that was measured, by key."""
        return {key: figure.value() for key, figure in (self._warming_up | self._measured).items()}


PLAIN = Declaration()
"""The declaration of a metric that has none, as in a run directory without the file: a mean over the steps."""


def over_steps(records: Iterable[Mapping[str, float | None]], declared: Mapping[str, Declaration]) -> Figures:
    """Return the figures of several steps, given as their records in metrics.jsonl, in order."""
    figures = Figures(declared)
    for record in records:
        figures.add(record)
    return figures


def is_warm_up(record: Mapping[str, float | None]) -> bool:
    """Return whether a step is the first that a process logs, which includes the warm-up, given its record."""
    return record.get("time/since_first_step_s") == 0.0


def trained_tokens(record: Mapping[str, float | None]) -> float:
    """Return the number of tokens that a step has trained on, given its record.

    Tokens that are masked as too old don't count, and no token of a batch that algorithm.skip_batch_kl left out.
    """
    if record.get("policy/skipped_batches"):
        return 0.0
    return (record.get(TOKENS) or 0.0) * (1 - (record.get("staleness/masked_fraction") or 0.0))


def seconds_at(records: Iterable[Mapping[str, float | None]]) -> list[float]:
    """Return when each step ended, in seconds since the end of the first step, given their records in metrics.jsonl.

    `time/since_first_step_s` begins again at 0 where a run went on from a checkpoint. Here the time goes on from there,
    without that step, which includes a warm-up. A step that was restored from a checkpoint lacks it, but for step 1,
    and has its own time. So the last value is `seconds` of summary.json.
    """
    seconds, before_s, newest_s = [], 0.0, 0.0
    for record in records:
        since_s = record.get("time/since_first_step_s")
        if since_s is None:
            since_s = newest_s + (record.get("time/step_s") or 0.0)
        elif since_s == 0.0:
            before_s += newest_s
        newest_s = since_s
        seconds.append(before_s + since_s)
    return seconds
