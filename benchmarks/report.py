"""`async-rl report`: table, plots and one page that opens offline, from the files of a run or a sweep alone."""

from __future__ import annotations

import base64
import csv
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import SEED, STALENESS, finished_cells
from benchmarks.plots import draw_all
from benchmarks.prediction import Measured, compare
from benchmarks.results import Row, Run, read_runs, rows_of
from benchmarks.verdicts import corrections_compared, ended_early, ranked, recommendation, time_to_accuracy

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("is_variance", "IS-weight variance", "{:.3g}"),
    ("kl", "KL, nats a token", "{:.2g}"),
    ("per_100_steps", "improvement per 100 steps", "{:+.3f}"),
    ("learner", "utilisation, learner", "{:.1%}"),
    ("wall_clock", "wall-clock improvement", "{:+.3f}"),
    ("per_minute", "improvement per minute, measured", "{:+.3f}"),
    ("rollout", "utilisation, rollout", "{:.1%}"),
    ("occupancy", "occupancy of slots", "{:.1%}"),
    ("gpu_learner", "GPU of the learner, NVML", "{:.1%}"),
    ("gpu_rollout", "GPU of rollout, NVML", "{:.1%}"),
    ("ess", "ESS / tokens", "{:.3f}"),
    ("staleness_mean", "staleness, mean", "{:.2f}"),
    ("staleness_max", "staleness, max", "{:.0f}"),
    ("steps_per_minute", "steps per minute", "{:.1f}"),
    ("train_s", "training, s", "{:.3f}"),
    ("push_s", "push, s", "{:.3f}"),
)
OF_GPUS = ("gpu_learner", "gpu_rollout")
"""Columns of the table where there were GPUs to ask."""
NOTES = (
    "Mean ± standard error over seeds; the best row by measured improvement per minute is bold.",
    "Improvement: held-out accuracy at the end minus at the start (mean reward, last tenth of the steps minus the "
    "first, where nothing was evaluated). Wall-clock improvement: improvement per 100 steps times the learner's "
    "utilisation over that at the smallest staleness.",
    "Utilisation: the learner computes an update; at least one rollout group is in flight and no push holds it up. "
    "Occupancy: the server's running requests over its slots. NVML, where there are GPUs: the share of time in which "
    "any kernel ran; pools that share a GPU have the same. Start-up and the first step are left out.",
    "In flight: rollout groups between their grant and the buffer's acknowledgement, over rollout.concurrency, mean "
    "over all time. A prediction, by simulation with the measured durations and the run's rules, is - where these are "
    "not simulated.",
    "Possible, the work-conserving bound: both pools' utilisations if neither waited without need, in turn at 0 and "
    "the slower of the two above, from the same run's stage times.",
    "The bound takes the times as they are: a push and a training step that last longer because both pools share the "
    "machine count as work (columns training and push).",
    "KL: of the behaviour from the proximal policy, k3 estimate. IS weights: proximal over behaviour, not truncated; "
    "their variance is the median over the steps, as single steps with huge weights make up nearly all of a mean.",
    "Exact staleness shows what staleness does to an algorithm. A push then waits for the groups of its batch, so "
    "times and utilisation say nothing and are left out.",
)
CAPTIONS = {
    "trade_off": "What staleness costs and, where times count, what it buys, and the trade. Bars: standard error.",
    "accuracy_by_step": "Held-out accuracy by learner steps. Bars: standard error over seeds.",
    "accuracy_by_time": "Held-out accuracy by wall-clock. Bars: standard error over seeds.",
    "reward_by_step": "Training reward by learner steps, smoothed. Bands: standard error over seeds.",
    "reward_by_time": "Training reward by wall-clock, smoothed, on the span all seeds reach. Bands: standard error.",
    "utilisation": "Every second of a pool is one state. Diamonds: predicted from the measured durations.",
    "offpolicy": "How far the data is from the policy that trains on it. Bars: standard error.",
    "staleness": "Staleness of the rollouts that were trained on (oldest token).",
    "drops": "Groups that were trained on against those that were dropped, by reason: what dropping favours. A group "
    "that was dropped while it ran has a duration only.",
}


def write_report(folder: Path) -> str:
    """Writes table.md, {table,runs,evals}.csv, plots/*.png and report.html into `folder`; returns what to print.

    Raises:
        ConfigError: no finished run in it.
    """
    rows = rows_of(read_runs(folder))
    measured = compare(rows)
    pictures = draw_all(rows, folder / "plots", {m.staleness: m.predicted for m in measured if m.predicted})
    said = (recommendation(rows), time_to_accuracy(rows), corrections_compared(rows), ended_early(rows))
    sentences = [text for text in said if text]
    tables = markdown(rows) + ("\n" + prediction_table(measured) if measured else "")
    (folder / "table.md").write_text(tables + "\n" + "\n\n".join([*sentences, *NOTES]) + "\n")
    _write_csv(rows, folder / "table.csv")
    runs = [run for row in rows for run in row.runs]
    _write_runs(runs, folder / "runs.csv")
    _write_evals(runs, folder / "evals.csv")
    (folder / "report.html").write_text(_page(folder, rows, measured, pictures, sentences))
    return tables + "\n" + "\n".join(sentences)


def columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [column for column in COLUMNS if column[0] not in OF_GPUS or any(row.has(column[0]) for row in rows)]


def header(rows: Sequence[Row]) -> list[str]:
    return ["staleness", *(key for key, _ in rows[0].series), *(label for _, label, _ in columns(rows)), "seeds"]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's texts; what no run measured is `-`."""
    lines = []
    for row in rows:
        values = [_text(row, key, form) for key, _, form in columns(rows)]
        lines.append([str(row.staleness), *(label for _, label in row.series), *values, str(len(row.runs))])
    return lines


def _text(row: Row, key: str, form: str) -> str:
    estimate = row.estimate(key)
    return "-" if math.isnan(estimate.mean) else estimate.text(form)


def markdown(rows: Sequence[Row]) -> str:
    best = ranked(rows)[:1]
    lines = ["| " + " | ".join(header(rows)) + " |", "| " + "---: | " * len(header(rows))]
    for row, texts in zip(rows, cells(rows), strict=True):
        marked = [f"**{text}**" for text in texts] if row in best else texts
        lines.append("| " + " | ".join(marked) + " |" + (" best" if row in best else ""))
    return "\n".join(line.rstrip() for line in lines) + "\n"


PREDICTION_HEADER = (
    "staleness", "learner, measured", "predicted", "rollout, measured", "predicted", "staleness, measured",
    "predicted", "in flight, measured", "predicted", "both, measured", "work-conserving bound", "share of the bound",
)  # fmt: skip


def prediction_cells(measured: Sequence[Measured]) -> list[list[str]]:
    def percent(value: float | None) -> str:
        return "-" if value is None or math.isnan(value) else f"{value:.1%}"

    lines = []
    for m in measured:
        f = m.predicted
        learner, rollout, staleness, in_flight = (
            (f.learner, f.rollout, f.staleness, f.in_flight) if f else (None,) * 4
        )
        lines.append(
            [
                str(m.staleness), percent(m.learner), percent(learner), percent(m.rollout), percent(rollout),
                f"{m.staleness_mean:.2f}", "-" if staleness is None else f"{staleness:.2f}",
                percent(m.in_flight), percent(in_flight), percent(m.learner + m.rollout), percent(m.bound),
                percent((m.learner + m.rollout) / m.bound),
            ]
        )
    return lines


def prediction_table(measured: Sequence[Measured]) -> str:
    lines = ["| " + " | ".join(PREDICTION_HEADER) + " |", "| " + "---: | " * len(PREDICTION_HEADER)]
    lines += ["| " + " | ".join(texts) + " |" for texts in prediction_cells(measured)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    """Numbers, mean and standard error in columns of their own."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        keys = [key for key, _, _ in COLUMNS]
        names = [name for key in keys for name in (key, f"{key}_error")]
        writer.writerow(["staleness", *(key for key, _ in rows[0].series), *names, "seeds"])
        for row in rows:
            estimates = [row.estimate(key) for key in keys]
            numbers = [f"{number:.6g}" for e in estimates for number in (e.mean, e.error)]
            writer.writerow([row.staleness, *(label for _, label in row.series), *numbers, len(row.runs)])


def _write_runs(runs: Sequence[Run], path: Path) -> None:
    """Every run for itself, so that whoever doubts a mean or a test can take it again."""
    axes = [STALENESS, *(key for key, _ in runs[0].series), SEED]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*axes, *runs[0].values()])
        writer.writeheader()
        writer.writerows(
            {**run.labels, **{key: f"{value:.6g}" for key, value in run.values().items()}} for run in runs
        )


def _write_evals(runs: Sequence[Run], path: Path) -> None:
    """Every held-out evaluation, so that the times to an accuracy can be taken again, too."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        axes = [STALENESS, *(key for key, _ in runs[0].series), SEED]
        writer.writerow([*axes, "version", "seconds", "accuracy"])
        for run in runs:
            for version, seconds, accuracy in run.evals:
                writer.writerow([*(run.labels[axis] for axis in axes), f"{version:g}", f"{seconds:.3f}", accuracy])


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd }
th { border-bottom: 2px solid #444; vertical-align: bottom } tr.best { font-weight: 700; background: #fff6d6 }
.lead { font-size: 17px; background: #eef5fb; padding: .8rem 1rem; border-left: 4px solid #0072b2 }
figure { margin: 2rem 0 } img { max-width: 100% } figcaption, .note { color: #555; font-size: 13px }
"""


def _page(
    folder: Path, rows: Sequence[Row], measured: Sequence[Measured], pictures: Sequence[Path], sentences: Sequence[str]
) -> str:
    best = ranked(rows)[:1]
    marks = ["best" if row in best else "" for row in rows]
    parts = [f"<h1>{html.escape(folder.resolve().name)}</h1>"]
    parts += [f'<p class="lead">{html.escape(text)}</p>' for text in sentences]
    parts += ["<h2>Trade-off</h2>", _table(header(rows), cells(rows), marks)]
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in NOTES]
    if measured:
        parts += ["<h2>Utilisation: measured, predicted, possible</h2>"]
        parts += [_table(PREDICTION_HEADER, prediction_cells(measured), [""] * len(measured))]
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        caption = html.escape(CAPTIONS[picture.stem])
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    parts += ["<h2>How it was made</h2>", _origin(folder)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(folder.resolve().name)}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], marks: Sequence[str]) -> str:
    titles = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        f'<tr class="{mark}">' + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>"
        for line, mark in zip(lines, marks, strict=True)
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _origin(folder: Path) -> str:
    """Command, machine and config of the sweep, as far as they are there."""
    plan_file = folder / "sweep.json"
    plan: dict[str, Any] = json.loads(plan_file.read_text()) if plan_file.is_file() else {}
    commits = {record.commit for record in finished_cells(folder).values()}
    commit = ", ".join(sorted(commits - {""}))  # a sweep may have gone on with another program
    facts = {"command": plan.get("command", ""), **plan.get("machine", {}), **({"commit": commit} if commit else {})}
    lines = [f"{key}: {value}" for key, value in facts.items() if value]
    config = next((file.read_text() for file in sorted(folder.glob("**/config.yaml"))), "")
    return (
        f"<pre>{html.escape(chr(10).join(lines))}</pre><details><summary>Config of the first run</summary>"
        f"<pre>{html.escape(config)}</pre></details>"
    )
