"""Metrics, which all processes report to the driver; it reduces them to one value for each key and logs each step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_rl.base.config import Config
from async_rl.base.telemetry.examples import Example
from async_rl.base.telemetry.figures import Figures, over_steps
from async_rl.base.telemetry.held_out import by_name
from async_rl.base.telemetry.trackers import (
    TensorboardRun,
    TrackioRun,
    open_tensorboard_run,
    open_trackio_run,
    open_wandb_run,
)

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


class MetricsLogger:
    """Writes metrics to `run_dir/metrics.jsonl` and the console, and with the same keys to trackers that are on.

    The file has one JSON object per line; a value that is not finite is written as null, as JSON has no NaN. An
    existing file is replaced, or with run.resume continued. Only one thread may use a logger.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._steps = config.run.steps
        self._started_s = time.monotonic()
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        past = read_metrics(path) if config.run.resume and path.exists() else []
        self._started_s -= max((record.get("time/written_at_s") or 0.0 for record in past), default=0.0)
        self.figures: Figures = over_steps(past)
        """The figures of all steps that the run has logged, also before a resume."""
        self._file = path.open("a" if config.run.resume else "w", encoding="utf-8")
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps, time left"),
            TimeRemainingColumn(), console=self._console, speed_estimate_period=3600,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=self._steps)
        self._bar.start()
        self._wandb = open_wandb_run(config, run_dir, self.note)
        trackers: tuple[TrackioRun | TensorboardRun | None, ...] = (
            open_trackio_run(config, run_dir, self.note), open_tensorboard_run(config, run_dir, self.note)
        )
        self._trackers = [tracker for tracker in trackers if tracker]

    def log(self, step: int, values: dict[str, float], examples: Sequence[Example] = ()) -> None:
        """Write and print the metrics of a finished step. Its example answers are for wandb alone."""
        self._write({"step": step, "time/written_at_s": self._written_at_s(), **values}, examples)
        self.note(format_step(step, self._steps, values))
        self._bar.update(self._task, completed=step)

    def log_eval(self, version: int, values: dict[str, float]) -> None:
        """Write the metrics of an evaluation as a line of its own, because it may end after its step was written."""
        self._write({"step": version, "eval/written_at_s": self._written_at_s(), **values})
        self.note(format_step(version, self._steps, values))

    def begin_lineage(self) -> None:
        """Note that a resume is not undone any more: TensorBoard then hides the steps that it discards."""
        for tracker in self._trackers:
            tracker.begin_lineage()

    def log_restored(self, record: dict[str, float | None]) -> None:
        """Write the record of a step that was trained but not logged before the run was resumed."""
        self._write({key: math.nan if value is None else value for key, value in record.items()})

    def log_late(self, version: int, values: dict[str, float]) -> None:
        """Write metrics that arrived after the line of their step, as a line of its own with keys `late/...`."""
        self._write({"step": version, **{f"late/{key}": value for key, value in values.items()}})

    def note(self, text: str) -> None:
        """Print one line on the console, above the progress bar."""
        self._console.print(text, soft_wrap=True)

    def alarm(self, text: str) -> None:
        """Print a line on the console and send it as a wandb alert."""
        self.note(text)
        if self._wandb is not None:
            self._wandb.alert(text)

    def _write(self, record: dict[str, float], examples: Sequence[Example] = ()) -> None:
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}) + "\n")
        self._file.flush()
        self.figures.add({key: value for key, value in record.items() if math.isfinite(value)})
        if self._wandb is not None:
            self._wandb.log(record, examples, self.figures)
        for tracker in self._trackers:
            tracker.log(record)

    def _written_at_s(self) -> float:
        """Return the seconds that the run has trained until now, which is when its next line is written."""
        return round(time.monotonic() - self._started_s, 3)

    def close(self) -> None:
        self._bar.stop()
        self._file.close()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None
        while self._trackers:
            self._trackers.pop().close()


_COLUMNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("reward/mean",), "reward {:.3f}"),
    (("eval/accuracy",), "held-out accuracy {:.3f}"),
    (("eval/reward",), "held-out reward {:.3f}"),
    (("staleness/mean", "staleness/max"), "staleness {:.2f} max {:.0f}"),
    (("utilisation/learner", "utilisation/rollout"), "utilisation learner {:.0%} rollout {:.0%}"),
    (("offpolicy/ess",), "ess {:.3f}"),
    (("throughput/trained_tokens_per_s",), "{:,.0f} tokens/s"),
    (("time/step_s",), "{:.2f} s"),
)


def format_step(step: int, steps: int, values: Mapping[str, float]) -> str:
    """Return the console line of a step: reward, accuracy, staleness, utilisation and more, as far as measured.

    After held-out results come the results on each source of prompts and of each reward, where there are several.
    Where held-out accuracy and reward differ, the mean rewards of right and of wrong answers say why.
    """
    measured = [(keys, text) for keys, text in _COLUMNS if all(key in values for key in keys)]
    parts = [text.format(*(values[key] for key in keys)) + by_name(values, keys[0]) for keys, text in measured]
    if abs(values.get("eval/reward", 0.0) - values.get("eval/accuracy", 0.0)) >= 5e-4:
        means = {word: values.get(f"eval/reward_of_{word}") for word in ("right", "wrong")}
        told = [f"{word} answers have {mean:.3f}" for word, mean in means.items() if mean is not None]
        parts.append(f"({', '.join(told)} in the mean)")
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *parts])
