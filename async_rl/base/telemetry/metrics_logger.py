"""Writes the metrics of each step to metrics.jsonl, the console, and trackers such as wandb."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_rl.base.config import Config
from async_rl.base.telemetry.certificate import ParityAxis, format_certificate
from async_rl.base.telemetry.metrics import (
    DeclarationFile,
    Figures,
    Metric,
    over_steps,
    read_metrics,
    reduce_metrics,
)

if TYPE_CHECKING:
    from async_rl.base.telemetry.examples import Example
    from async_rl.base.telemetry.prometheus import PrometheusExporter
    from async_rl.base.telemetry.trackers import TensorboardRun, TrackioRun, WandbRun


class MetricsLogger:
    """Writes metrics to `run_dir/metrics.jsonl`, to the console, and with the same keys to the trackers that are on.

    The file has one JSON object per line; a value that is not finite is written as null, as JSON has no NaN. An
    existing file is replaced, or with run.resume continued. Only one thread may use a logger.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._steps = config.run.steps
        self._started_s = time.monotonic()
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        past = read_metrics(path) if config.run.resume and path.exists() else []
        self._declarations = DeclarationFile(run_dir, resumes=bool(config.run.resume))
        self._started_s -= max((record.get("time/written_at_s") or 0.0 for record in past), default=0.0)
        self.figures: Figures = over_steps(past, self._declarations.known)
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
        self._wandb: WandbRun | None = None
        self._trackers: list[TrackioRun | TensorboardRun | PrometheusExporter] = []
        if config.logging.has_trackers:
            from async_rl.base.telemetry.trackers import open_tensorboard_run, open_trackio_run, open_wandb_run

            self._wandb = open_wandb_run(config, run_dir, self.note)
            opened = (open_trackio_run(config, run_dir, self.note), open_tensorboard_run(config, run_dir, self.note))
            self._trackers = [tracker for tracker in opened if tracker]
        if config.logging.prometheus:
            from async_rl.base.telemetry.prometheus import open_prometheus

            if exporter := open_prometheus(config, self._declarations.known, self.note):
                self._trackers.append(exporter)

    def reduce(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """Return {key: value} of all metrics of a step or an evaluation, and store their declarations with the run."""
        self._declarations.add(metrics)
        return reduce_metrics(metrics)

    def log(self, step: int, values: dict[str, float], examples: Sequence[Example] = ()) -> None:
        """Write and print the metrics of a finished step.

        Args:
            examples: example answers of the step. Only wandb gets them.
        """
        self._write({"step": step, **self._written_at("time"), **values}, examples)
        self.note(format_step(step, self._steps, values))
        self._bar.update(self._task, completed=step)

    def log_eval(self, version: int, values: dict[str, float]) -> None:
        """Write and print the metrics of an evaluation.

        They have their own line, because the step's line may be written already.
        """
        self._write({"step": version, **self._written_at("eval"), **values})
        self.note(format_step(version, self._steps, values))

    def begin_lineage(self) -> None:
        """Tell the trackers that a resume will not be undone any more. TensorBoard then hides the steps it discards."""
        for tracker in self._trackers:
            tracker.begin_lineage()

    def log_restored(self, record: dict[str, float | None]) -> None:
        """Write the record of a step that was trained but not logged before the run was resumed."""
        self._write({key: math.nan if value is None else value for key, value in record.items()})

    def log_late(self, version: int, metrics: Sequence[Metric]) -> None:
        """Write metrics that arrived after the line of their step. They get their own line, with keys `late/...`."""
        late = [replace(metric, key=f"late/{metric.key}", over_steps="last") for metric in metrics]
        self._write({"step": version, **self.reduce(late)})

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

    def _written_at(self, path: str) -> dict[str, float]:
        """Return a metric of the present time, in seconds that the run has trained, for the next line."""
        written_at_s = round(time.monotonic() - self._started_s, 3)
        return self.reduce([Metric(f"{path}/written_at_s", written_at_s, "last", unit="s")])

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

    If there are several sources of prompts or several rewards, held-out results are followed by the result for each. If
    held-out accuracy and reward differ, the mean rewards of right and of wrong answers explain why.
    """
    measured = [(keys, text) for keys, text in _COLUMNS if all(key in values for key in keys)]
    parts = [text.format(*(values[key] for key in keys)) + by_name(values, keys[0]) for keys, text in measured]
    if abs(values.get("eval/reward", 0.0) - values.get("eval/accuracy", 0.0)) >= 5e-4:
        means = {word: values.get(f"eval/reward_of_{word}") for word in ("right", "wrong")}
        told = [f"{word} answers have {mean:.3f}" for word, mean in means.items() if mean is not None]
        parts.append(f"({', '.join(told)} in the mean)")
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *parts])


_ON_SOURCE = {"eval/accuracy": "eval/accuracy/", "eval/reward": "eval/reward_on/"}
_OF_REWARD = "eval/reward/"
MOST_NAMES = 8
"""The most names that a line of the console shows."""


def on_sources(values: Mapping[str, float], key: str) -> dict[str, float]:
    """Return the values of metric `key` on each source of held-out prompts, by the source's name; {} without any."""
    prefix = _ON_SOURCE.get(key, "\n")
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def of_rewards(values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean held-out score of each of task.rewards, by name, without further numbers that they log."""
    named = {key.removeprefix(_OF_REWARD): value for key, value in values.items() if key.startswith(_OF_REWARD)}
    return {name: value for name, value in named.items() if "/" not in name}


def by_name(values: Mapping[str, float], key: str) -> str:
    """Return the values of metric `key` by source and reward, as ` (a 0.500, b 0.250)`; "" if there are none."""
    parts = [on_sources(values, key), of_rewards(values) if key == "eval/reward" else {}]
    told = ""
    for part in filter(None, parts):
        shown = [f"{name} {value:.3f}" for name, value in sorted(part.items())]
        shown[MOST_NAMES:] = [f"{len(shown) - MOST_NAMES} more"] if len(shown) > MOST_NAMES else []
        told += f" ({', '.join(shown)})"
    return told


def named_results(values: Mapping[str, float]) -> dict[str, float]:
    """Return all results by source and reward, under their labels in a summary, such as `accuracy on gsm8k`."""
    found = {f"accuracy on {name}": value for name, value in on_sources(values, "eval/accuracy").items()}
    found |= {f"reward on {name}": value for name, value in on_sources(values, "eval/reward").items()}
    return found | {f"reward {name}": value for name, value in of_rewards(values).items()}


MOST_CHARACTERS = 200
"""Longer questions and answers of the example are cut."""
_SUMMARY_ROWS = (
    ("held-out accuracy, start", "accuracy_start", "{:.3f}"),
    ("held-out accuracy, end", "accuracy_end", "{:.3f}"),
    ("held-out reward, start", "eval_reward_start", "{:.3f}"),
    ("held-out reward, end", "eval_reward_end", "{:.3f}"),
    ("staleness, mean", "staleness_mean", "{:.2f}"),
    ("staleness, max", "staleness_max", "{:.0f}"),
    ("reward, mean over the run", "reward_mean", "{:.3f}"),
    ("utilisation, learner", "utilisation/learner", "{:.1%}"),
    ("utilisation, rollout", "utilisation/rollout", "{:.1%}"),
    ("episodes/s", "episodes_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("weight push, ms", "push_ms", "{:,.0f}"),
    ("generation paused by a push, ms", "pause_ms", "{:,.0f}"),
    ("groups dropped, reward failed", "failed_groups", "{:,.0f}"),
    ("steps", "steps", "{:,.0f}"),
    ("seconds after the first step", "seconds", "{:,.1f}"),
)


def format_summary(summary: Mapping[str, Any], compare: str = "") -> str:
    """Return the summary of a run as text: measured values, certificate, alarms, an example, and commands to type next.

    Args:
        compare: the command that trains the same at another staleness.max.
    """
    measured = [row for row in _SUMMARY_ROWS if summary.get(row[1]) is not None]
    rows = [(label, form.format(summary[key])) for label, key, form in measured]
    held_out = summary.get("held_out", {}).items()
    rows += [
        (f"held-out {name}, {end}", f"{ends[end]:.3f}")
        for name, ends in held_out for end in ("start", "end") if ends[end] is not None
    ]
    label_width = max((len(label) for label, _ in rows), default=0)
    value_width = max((len(value) for _, value in rows), default=0)
    table = "".join(f"{label:<{label_width}}  {value:>{value_width}}\n" for label, value in rows)
    alarms = f"\n{summary['alarms']}\n" if summary.get("alarms") else ""
    axes = [ParityAxis(**axis) for axis in summary.get("certificate", ())]
    parity = f"\n{format_certificate(axes)}" if axes else ""
    return f"\n{table}{parity}{alarms}{_example(summary.get('example', {}))}{_next_commands(summary, compare)}"


def _example(example: Mapping[str, Any]) -> str:
    """Return a held-out question with its answers before and after training; "" without an example."""
    if not example:
        return ""
    count = example["chosen_from"]
    lines = [f"\nA question that was not trained on; of {count}, the one whose reward rose most:"]
    lines.append(f"  question  {shorten(example['question'], MOST_CHARACTERS)}")
    for name in ("before", "after"):
        answer = shorten(example[name], MOST_CHARACTERS) or "(nothing)"
        lines.append(f"  {name:<8}  {answer}   (reward {example[f'reward_{name}']:.3g})")
    return "\n".join(lines) + "\n"


def _next_commands(summary: Mapping[str, Any], compare: str) -> str:
    """Return the lines that say where the trained model is and what to type next; "" without a run directory."""
    if not (folder := summary.get("run_dir")):
        return ""
    commands = {
        f"async-rl view {folder}": "each token, and the weights that it came from",
        compare: "the same at another staleness, to compare",
        "async-rl init": "writes a config and a reward, to make your own task of",
    }
    lines = [f"  # {why}\n  {command}\n" for command, why in commands.items() if command]
    return f"\nThe model is in {folder}/model. Next:\n{''.join(lines)}"
