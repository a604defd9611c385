"""Metrics: declared where they are computed, reduced within a step, and combined over several steps.

    Metric("reward/mean", 0.5, by=EPISODES)                 a mean; over steps each answer counts the same
    Metric("push/bytes", 8e6, "sum")                        a sum, within the step and over steps
    Metric("time/sync_s", 0.2, "sum", over_steps="mean")    a sum within the step, and a mean over steps

A metric needs nothing else to be logged, and to be in wandb, on the page of a run and in the report of a sweep. The
driver keeps its declaration in the run directory, one line for each key:

    metric_declarations.jsonl    {"key": "reward/mean", "over_steps": "mean", "by": "batch/episodes", "unit": ""}

The figure of a metric is its value over several steps. Only this file computes it, for the last table of a run,
summary.json, the page, reports and wandb's summary. A mean has weights, because steps differ: the plain mean of a share
of time over steps of 0.4 s and 9 s says nothing about the run.

    figure = sum(value * weight) / sum(weight)    over the steps that measured the metric
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""The name of the file with declarations in a run directory."""
SQUARED = "eval/accuracy_squared"
"""The beginning of metrics that only the intervals need."""
Z = 1.96
"""Half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """How the values of a metric at several steps are combined to one number, and its unit."""

    over_steps: OverSteps = "mean"
    by: str = ""
    """For a mean: the metric whose value is the weight of a step. Empty: all steps have equal weight."""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value, with the declaration of its metric.

    Values with one key are combined: within a step by `reduce`, over several steps by `over_steps`.
    """

    key: str
    """A path, with the unit at its end if it is a count or a time, as in `time/step_s`."""
    value: float
    reduce: Reduction = "mean"
    weight: float = 1.0
    """The weight of the value in the mean of a step."""
    over_steps: OverSteps | None = None
    """None: the same as `reduce`."""
    by: str = ""
    """The metric whose value is the weight of a step in a mean over steps. Empty: all steps have equal weight."""
    unit: str = ""

    @property
    def declaration(self) -> Declaration:
        return Declaration(self.over_steps or self.reduce, self.by, self.unit)


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum, "max": max, "min": min, "last": itemgetter(-1),
}  # fmt: skip


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return {key: value} of all metrics, reduced by `Metric.reduce`. A mean with total weight 0 is left out.

    Raises:
        ValueError: two metrics with one key have different reductions.
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
    """Combine metrics to one per key. Reduced with later metrics, it gives the same as all the original ones.

    A mean may differ by a rounding error.
    """
    first = {metric.key: metric for metric in reversed(metrics)}
    weights = reduce_metrics(Metric(metric.key, metric.weight, "sum") for metric in metrics)
    return [
        replace(first[key], value=value, weight=weights[key]) for key, value in reduce_metrics(metrics).items()
    ]


def read_metrics(path: str | Path) -> list[dict[str, float | None]]:
    """Return one record for each step of a `metrics.jsonl`, in order. Lines of one step are merged; later values win.

    An incomplete last line, which a crash leaves, is skipped.
    """
    steps: dict[int, dict[str, float | None]] = {}
    for line in _whole_lines(Path(path)):
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def read_declarations(run_dir: Path) -> dict[str, Declaration]:
    """Return the declarations of a run's metrics by key. If a key has several lines, the last one counts.

    A metric without a line is a plain mean over steps, see `Figures`. Without the file, all metrics are.
    """
    file = run_dir / DECLARATIONS
    found = {}
    for line in _whole_lines(file) if file.is_file() else ():
        fields = json.loads(line)
        key = fields.pop("key")
        found[key] = Declaration(**fields)
    return found


class DeclarationFile:
    """The file with the declarations of a run's metrics. A new or changed declaration adds a line.

    Args:
        resumes: keep the existing lines. If false, the file starts empty.
    """

    def __init__(self, run_dir: Path, *, resumes: bool) -> None:
        self._path = run_dir / DECLARATIONS
        self.known = read_declarations(run_dir) if resumes else {}
        """The newest declaration of each metric, by its key."""
        write_whole(self._path, _as_lines(self.known))  # without a half line that a crash has left

    def add(self, metrics: Iterable[Metric]) -> None:
        """Write a line for each metric whose declaration is not in the file yet."""
        new = {each.key: each.declaration for each in metrics if self.known.get(each.key) != each.declaration}
        if new:
            self.known |= new
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_as_lines(new))


def _as_lines(declared: Mapping[str, Declaration]) -> str:
    return "".join(json.dumps({"key": key, **asdict(declaration)}) + "\n" for key, declaration in declared.items())


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without an incomplete last one."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


class Figure:
    """The figure of one metric: its value over all steps passed to `add`. If no step has a weight, all count the same.
    """

    __slots__ = ("_how", "_number", "_total", "_values", "_weight", "_weighted")

    def __init__(self, how: OverSteps) -> None:
        self._how = how
        self._total = self._weighted = self._weight = 0.0
        self._number = 0
        self._values: list[float] = []
        """The values that the median needs, or the one value that is the largest, the smallest or the last."""

    def add(self, value: float, weight: float | None = 1.0) -> None:
        """Add the value of one step. `weight` is None if the step has not measured the metric that gives weights."""
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
        """Return the figure. `add` must have been called before."""
        if self._values:
            return statistics.median(self._values)
        if self._how == "sum":
            return self._total
        return self._weighted / self._weight if self._weight else self._total / self._number

    @property
    def total(self) -> float:
        return self._total


class Figures:
    """The figures of all metrics over the steps passed to `add`. Only a median stores a number for each step.

    The first step that a process logs includes the warm-up. A sum, mean or median leaves it out, unless no other step
    measured the metric.

    Args:
        declared: the declarations by key. A metric without one is a plain mean. It may grow later.
    """

    def __init__(self, declared: Mapping[str, Declaration]) -> None:
        self._declared = declared
        self._measured: dict[str, Figure] = {}
        self._warming_up: dict[str, Figure] = {}

    def add(self, record: Mapping[str, float | None]) -> None:
        """Add the record of one step. A value of None was not measured."""
        warms_up = is_warm_up(record)
        for key, value in record.items():
            if value is not None and key != "step":
                declared = self._declared.get(key, PLAIN)
                counts = not warms_up or declared.over_steps in ("max", "min", "last")
                figures = self._measured if counts else self._warming_up
                figure = figures.get(key) or figures.setdefault(key, Figure(declared.over_steps))
                figure.add(value, record.get(declared.by) if declared.by else 1.0)

    def get(self, key: str) -> float | None:
        """Return the figure of a metric; None if it was not measured."""
        figure = self._measured.get(key) or self._warming_up.get(key)
        return figure.value() if figure else None

    def total(self, key: str) -> float:
        """Return the sum of a metric's values over all steps except warm-up steps.

        It must be declared as a mean or sum.
        """
        figure = self._measured.get(key)
        return figure.total if figure else 0.0

    def all(self) -> dict[str, float]:
        """Return the figures of all measured metrics, by key."""
        return {key: figure.value() for key, figure in (self._warming_up | self._measured).items()}


PLAIN = Declaration()
"""The default declaration, used if a run directory has none for a metric: a mean over steps."""


def over_steps(records: Iterable[Mapping[str, float | None]], declared: Mapping[str, Declaration]) -> Figures:
    """Return the figures over several steps.

    Args:
        records: the steps' records in metrics.jsonl, in order.
        declared: the declarations by key.
    """
    figures = Figures(declared)
    for record in records:
        figures.add(record)
    return figures


def is_warm_up(record: Mapping[str, float | None]) -> bool:
    """Return whether a step includes the warm-up, because it is the first that a process logs. Takes its record."""
    return record.get("time/since_first_step_s") == 0.0


def trained_tokens(record: Mapping[str, float | None]) -> float:
    """Return the number of tokens that a step was trained on. Takes its record.

    Tokens masked as too old don't count, nor does any token of a batch that algorithm.skip_batch_kl left out.
    """
    if record.get("policy/skipped_batches"):
        return 0.0
    return (record.get(TOKENS) or 0.0) * (1 - (record.get("staleness/masked_fraction") or 0.0))


def seconds_at(records: Iterable[Mapping[str, float | None]]) -> list[float]:
    """Return when each step ended, in seconds since the end of the first step.

    The last value is `seconds` of summary.json.

    `time/since_first_step_s` restarts at 0 when a run resumes from a checkpoint. Here the time continues, without that
    step, which includes a warm-up. A step restored from a checkpoint lacks this metric, except step 1; its own duration
    counts instead.

    Args:
        records: the steps' records in metrics.jsonl.
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


def with_intervals(
    values: Mapping[str, float], reduce: Callable[[Sequence[Metric]], dict[str, float]] = reduce_metrics
) -> dict[str, float]:
    """Return the metrics of an evaluation with the 95 % interval of each accuracy.

    The mean squares, which only the intervals need, are left out.

    Args:
        reduce: also keeps the declarations of the new metrics, if the metrics are those of a run.
    """
    kept = {key: value for key, value in values.items() if not key.startswith(SQUARED)}
    return kept | reduce(list(accuracy_intervals(values)))


def accuracy_intervals(values: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the ends of the 95 % interval of each accuracy in the metrics of an evaluation.

    The prompts are the sample, so several answers to one prompt don't narrow the interval as several prompts would.
    Two right and two wrong prompts are added to them, so the interval has a width even if all answers are right.
    Source: Agresti and Coull 1998, "Approximate is better than exact", for one answer to each prompt.
    """
    for key in [key for key in values if key == "eval/prompts" or key.startswith("eval/prompts/")]:
        of = key.removeprefix("eval/prompts")
        mean, squared = values.get(f"eval/accuracy{of}"), values.get(f"{SQUARED}{of}")
        if mean is not None and squared is not None:
            prompts = values[key]
            count = prompts + 4
            centre = (prompts * mean + 2) / count
            variance = max(0.0, (prompts * squared + 2) / count - centre**2)
            half = Z * math.sqrt(variance / count)
            for end, value in (("low", centre - half), ("high", centre + half)):
                yield Metric(f"eval/accuracy_{end}{of}", min(1.0, max(0.0, value)), over_steps="last")
