"""Metrics: how one is reduced within a step and over several steps, and how they are read back from metrics.jsonl.

The last table of a run, summary.json, the page, the report of a sweep and wandb's summary all show the figures that are
computed here. `KINDS` declares for each metric how its values of single steps are put together. A share of time or a
rate is weighted by the time of the step, because the plain mean of steps of 0.4 s and 9 s says nothing about the run:

    figure = sum(value * weight) / sum(weight)    over the steps that measured the metric
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum, "max": max, "min": min, "last": itemgetter(-1),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value. `key` is a path with a unit (`time/step_s`); `weight` is used by the reduction `mean`."""

    key: str
    value: float
    reduce: Reduction = "mean"
    weight: float = 1.0


def reduce_metrics(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return {key: value} of all metrics, reduced by `Metric.reduce`; a mean of total weight 0 is left out."""
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
    reductions = {metric.key: metric.reduce for metric in metrics}
    weights = reduce_metrics(Metric(metric.key, metric.weight, "sum") for metric in metrics)
    return [Metric(key, value, reductions[key], weights[key]) for key, value in reduce_metrics(metrics).items()]


def read_metrics(path: str | Path) -> list[dict[str, float | None]]:
    """Return one record for each step of a `metrics.jsonl`, in order. Lines of one step are merged; later values win.

    A last line without a line end, which a crash leaves, is skipped.
    """
    steps: dict[int, dict[str, float | None]] = {}
    lines = Path(path).read_text().splitlines(keepends=True)
    for line in lines:
        if line is lines[-1] and not line.endswith("\n"):
            break
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


@dataclass(frozen=True, slots=True)
class FigureKind:
    """How the values of a metric at several steps become one number."""

    how: Literal["mean", "sum", "max", "last", "median"]
    weight: str = ""
    """For `mean`, the metric that gives a step its weight; if it is empty, all steps count the same."""

    @property
    def of_one_step(self) -> FigureKind:
        """The kind of a point that stands for several steps in a chart with the scale of one step."""
        return FigureKind("mean") if self.how == "sum" else self

    def weight_keys(self, keys: Iterable[str]) -> list[str]:
        """Return the metrics whose sum is the weight of a step that has measured `keys`; none if all count the same.

        `by_staleness/10/...` is of the answers of LAST_BUCKET and of all that are older, which are counted one by one.
        """
        if self.weight == f"{EPISODES_OF_STALENESS}{LAST_BUCKET}":
            return [key for key in keys if (staleness_counted(key) or 0) >= LAST_BUCKET]
        return [self.weight] if self.weight else []


LAST_BUCKET = 10
"""`by_staleness/10/...` is of all tokens and answers that are so old or older."""
EPISODES_OF_STALENESS = "staleness/episodes_"
"""The key of the number of answers of one staleness begins so, without a last bucket."""
OWN_LINES = ("eval/", "late/")
"""The beginnings of the keys of what is measured beside the steps, and has lines of its own in metrics.jsonl."""
SHARES = ("utilisation/", "occupancy/", "gpu/")
"""The beginnings of the keys of metrics that say how busy the pools were."""
BY_TIME = FigureKind("mean", "time/step_s")
BY_EPISODES = FigureKind("mean", "batch/episodes")
BY_TOKENS = FigureKind("mean", "batch/response_tokens")
BY_GROUPS = FigureKind("mean", "rollout/groups")
BY_ENDED_EPISODES = FigureKind("mean", "episode/ended")
BY_STEPS = FigureKind("mean")

KINDS: tuple[tuple[str, FigureKind], ...] = (
    # shares of time, samples of it, and rates
    (r"(utilisation|occupancy|gpu|throughput)/.+", BY_TIME),
    (r"rollout/in_flight", BY_TIME),
    # the seconds that a step takes, the parts of a step, and what happens once in a step
    (r"time/(written_at_s|since_first_step_s)", FigureKind("last")),
    (r"(time|push|checkpoint)/.+_s|buffer/waited(_for_late)?_s", BY_STEPS),
    (r"scoring/.+/group_s", BY_GROUPS),
    (r"scoring/.+", FigureKind("sum")),
    # values by staleness and by length, which have sizes of their own
    (r"by_(staleness|length)/\d+/tokens|staleness/episodes_\d+|by_length/\d+/episodes", FigureKind("sum")),
    (r"by_length/(\d+)/reward", FigureKind("mean", r"by_length/\1/episodes")),
    (r"by_staleness/(\d+)/(reward(?:/.+)?|response_length)", FigureKind("mean", r"staleness/episodes_\1")),
    # largest values
    (r".+[/_]max|alarm/.+|buffer/unaccounted", FigureKind("max")),
    (r"by_(staleness|length)/(\d+)/.+", FigureKind("mean", r"by_\1/\2/tokens")),
    # values of tokens and of episodes
    (r"offpolicy/is_weight_var", FigureKind("median")),  # a few steps with very large weights would dominate a mean
    (r"offpolicy/(ess|chi2)_sequence", BY_EPISODES),
    (r"offpolicy/.+|policy/entropy|mismatch/.+|kl/reference|vtrace/.+|staleness/masked_fraction", BY_TOKENS),
    (r"(reward|response|staleness)/.+|episode/rows", BY_EPISODES),
    # groups and episodes that ended meanwhile, in the batch or not
    (r"rollout/(group_s|group_s_squared|concurrency)", BY_GROUPS),
    (r"rollout/(skipped_long_prompts|epochs)", FigureKind("last")),
    (
        r"episode/(ended|timeouts|failed|rewritten|leaked_tasks|given_up_calls|dropped_rows|masked_turns)",
        FigureKind("sum"),
    ),
    (r"episode/.+", BY_ENDED_EPISODES),
    # counts of one step
    (
        r"(batch|rollout|endpoint)/.+|push/(bytes|lost_servers|repeats)|.+/(skipped_steps|skipped_batches|early_stops)",
        FigureKind("sum"),
    ),
    # states and counts since the start of the run
    (r"buffer/(depth|running|held|used|slots_held)", BY_STEPS),
    (r"(buffer|difficulty|eval|late|version)/.+|.+/lr|kl/coef", FigureKind("last")),
)
"""The kind of each metric by a regular expression of its key; the first one that fits counts, and else BY_STEPS."""


@lru_cache(maxsize=4096)
def kind_of(key: str) -> FigureKind:
    """Return the kind of a metric. One that KINDS does not declare, such as a user's own, is a mean over steps."""
    for pattern, kind in KINDS:
        if found := re.fullmatch(pattern, key):
            return FigureKind(kind.how, found.expand(kind.weight)) if "\\" in kind.weight else kind
    return BY_STEPS


def staleness_counted(key: str) -> int | None:
    """Return N for the key `staleness/episodes_N`; None for the key of another metric."""
    number = key.removeprefix(EPISODES_OF_STALENESS)
    return int(number) if number != key and number.isdecimal() else None


class Figure:
    """The figure of one metric over the steps that `add` was given. If no step has a weight, all count the same."""

    __slots__ = ("_how", "_number", "_total", "_values", "_weight", "_weighted")

    def __init__(self, kind: FigureKind) -> None:
        self._how = kind.how
        self._total = self._weighted = self._weight = 0.0
        self._number = 0
        self._values: list[float] = []
        """The values that the median needs, or the one value that is the largest or the last."""

    def add(self, value: float, weight: float | None = 1.0) -> None:
        """Add the value of one step; `weight` None: the step has not measured the metric that weighs it."""
        self._number += 1
        match self._how:
            case "mean" | "sum":
                self._total += value
                self._weighted += value * (weight or 0.0)
                self._weight += weight or 0.0
            case "max":
                self._values[:] = [max(value, *self._values)] if self._values else [value]
            case "last":
                self._values[:] = [value]
            case "median":
                self._values.append(value)

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

    @property
    def weight(self) -> float:
        """The sum of the weights, or the number of steps if no step has a weight."""
        return self._weight or float(self._number)


class Figures:
    """The figures of all metrics over the steps that `add` was given. Only a median keeps a number for each step.

    The first step that a process logs includes the warm-up. It counts only for largest values, and for metrics that
    no other step measured. What is measured beside the steps, such as an evaluation, always counts, also where it is
    merged into that step.
    """

    def __init__(self) -> None:
        self._measured: dict[str, Figure] = {}
        self._warming_up: dict[str, Figure] = {}

    def add(self, record: Mapping[str, float | None]) -> None:
        """Add the record of one step; a value that is None was not measured."""
        warms_up = is_warm_up(record)
        for key, value in record.items():
            if value is not None and key != "step":
                kind = kind_of(key)
                counts = not warms_up or kind.how == "max" or key.startswith(OWN_LINES)
                figures = self._measured if counts else self._warming_up
                figure = figures.get(key) or figures.setdefault(key, Figure(kind))
                figure.add(value, _weight_in(record, kind) if kind.weight else 1.0)

    def get(self, key: str) -> float | None:
        """Return the figure of a metric, or None if it was not measured."""
        figure = self._measured.get(key) or self._warming_up.get(key)
        return figure.value() if figure else None

    def total(self, key: str) -> float:
        """Return the sum of a metric of kind `mean` or `sum` over the steps, without those that include a warm-up."""
        figure = self._measured.get(key)
        return figure.total if figure else 0.0

    def all(self) -> dict[str, float]:
        """Return the figure of every metric that was measured, by key."""
        return {key: figure.value() for key, figure in (self._warming_up | self._measured).items()}


def _weight_in(record: Mapping[str, float | None], kind: FigureKind) -> float | None:
    """Return the weight of a step for a metric of this kind; None: the step has not measured what weighs it."""
    found = [weight for key in kind.weight_keys(record) if (weight := record.get(key)) is not None]
    return sum(found) if found else None


def is_warm_up(record: Mapping[str, float | None]) -> bool:
    """Return whether a step is the first that a process logs, which includes the warm-up, given its record."""
    return record.get("time/since_first_step_s") == 0.0


def trained_tokens(record: Mapping[str, float | None]) -> float:
    """Return how many tokens a step has trained on, given its record.

    Those that are masked as too old don't count, and none of a batch that algorithm.skip_batch_kl has left out.
    """
    if record.get("policy/skipped_batches"):
        return 0.0
    return (record.get("batch/response_tokens") or 0.0) * (1 - (record.get("staleness/masked_fraction") or 0.0))


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


def over_steps(records: Iterable[Mapping[str, float | None]]) -> Figures:
    """Return the figures of several steps, given as their records in metrics.jsonl, in order."""
    figures = Figures()
    for record in records:
        figures.add(record)
    return figures
