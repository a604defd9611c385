"""`async-rl report`: makes tables, plots and one HTML page from the files of a run or a sweep."""

from __future__ import annotations

import base64
import csv
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.base.telemetry.metrics import PLAIN
from async_rl.tools.sweeps.cells import SEED, STALENESS, finished_cells
from async_rl.tools.sweeps.plan import Measured, compare
from async_rl.tools.sweeps.plots import draw_all
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.settings import (
    SPEEDS,
    WORTH,
    WORTH_BY_REWARD,
    Setting,
    best_rows,
    bounds_compared,
    cautions,
    efficiency_unknown,
    recommendation,
    settings_of,
    worth_keys,
)
from async_rl.tools.sweeps.tables import Table

Columns = dict[str, tuple[str, str]]
"""The (heading, number format) of each column, by the name of its value. Columns that no run measured are left out."""
TRADE_OFF: Columns = {
    **SPEEDS,
    "efficiency": ("a step is worth, synchronous steps", "{:.2f}"),
    "efficiency_sampled": ("a step is worth by sampled reward, steps at the lowest staleness", "{:.2f}"),
    "steps_per_minute": ("steps per minute", "{:.1f}"),
    "learner": ("utilisation, learner", "{:.1%}"),
    "rollout": ("utilisation, rollout", "{:.1%}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "staleness_max": ("staleness, max", "{:.0f}"),
    "kl": ("KL, nats per token", "{:.2g}"),
    "is_variance": ("IS-weight variance", "{:.3g}"),
    "ess": ("ESS / tokens", "{:.3f}"),
}
SYSTEM: Columns = {
    "tokens_per_s": ("trained tokens per s", "{:,.0f}"),
    "train_s": ("training, s", "{:.3f}"),
    "push_s": ("push, s", "{:.3f}"),
    "occupancy": ("occupancy of slots", "{:.1%}"),
    "gpu_learner": ("GPU of the learner, NVML", "{:.1%}"),
    "gpu_rollout": ("GPU of rollout, NVML", "{:.1%}"),
    "waited_for_late": ("learner waited for late groups", "{:.1%}"),
    "dropped": ("groups dropped as too late", "{:.2%}"),
}
LEARNING: Columns = {
    "accuracy_start": ("held-out accuracy, start", "{:.3f}"),
    "accuracy_end": ("held-out accuracy, end", "{:.3f}"),
    "improvement": ("improvement", "{:+.3f}"),
    "reward_mean": ("reward of the batches, mean", "{:.3f}"),
    "truncated": ("IS weights beyond cap or floor", "{:.2%}"),
    "masked": ("tokens masked as too old", "{:.2%}"),
    "clipped_positive": ("tokens clipped, advantage above 0", "{:.2%}"),
    "clipped_negative": ("tokens clipped, advantage below 0", "{:.2%}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "entropy_end": ("entropy, end", "{:.3f}"),
}
TINY = 1e-6
"""A smaller value, such as the KL of synchronous training, is rounding noise: tables show 0."""
NOTES = (
    "Every value is mean ± standard error over seeds. The start-up and the first step of a run are left out. The row "
    "that learns fastest per minute is bold; the sentence at the top says whether its lead is more than chance.",
    "A step is worth e synchronous steps if held-out accuracy after v steps is that of synchronous training after e v "
    "steps: staleness.max 0, other settings equal. Effective steps per minute are steps per minute times e. The error "
    "of e is the jackknife's over seeds, with the synchronous curve's in it. By sampled reward, e compares the rewards "
    "of policy versions with those at the lowest staleness of the sweep.",
    "Improvement is held-out accuracy at the end minus at the start, or without evaluations the mean reward of the "
    "last tenth of the steps minus that of the first. By it no setting is ranked: a learning curve is concave, so it "
    "flatters stale runs.",
    "The learner is utilised while it computes an update, the rollout pool while a group is in flight and no push "
    "pauses it. Predictions come from the simulator; - where it does not cover the run's rules.",
    "KL is the divergence of the behaviour policy from the proximal policy (k3 estimate). IS weights are the ratios of "
    "proximal over behaviour probability before truncation; their variance is the median over the steps.",
    "The reward of the policy: the answers of batch v that are s versions old count for version v - s, and a version "
    "for the time in which it is served. The rewards of the batches lag by the staleness, which flatters fresh runs.",
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.wide { overflow-x: auto } pre { overflow-x: auto; font-size: 12px }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd } td { white-space: nowrap }
th { border-bottom: 2px solid #444; vertical-align: bottom } tr.best { font-weight: 700; background: #fff6d6 }
.lead { font-size: 18px; background: #eef5fb; padding: .8rem 1rem; border-left: 4px solid #0072b2 }
figure { margin: 2rem 0 } img { max-width: 100% } figcaption, .note { color: #555; font-size: 13px }
"""


def write_report(folder: Path) -> str:
    """Write table.md, {runs,evals,metrics}.csv, plots/*.png and report.html into `folder`. Returns the text to print.

    Raises:
        ConfigError: the folder has no finished run.
    """
    rows = settings_of(read_runs(folder))
    measured = compare(rows)
    found = (
        value_table(rows, shown_columns(rows), "The trade-off"), *bounds_compared(rows), prediction(measured),
        value_table(rows, LEARNING, "What was learned"), value_table(rows, SYSTEM, "The system"),
    )  # fmt: skip
    tables = [table for table in found if table]
    sentences = [text for text in (recommendation(rows), *efficiency_unknown(rows), *cautions(rows)) if text]
    (folder / "table.md").write_text("\n\n".join([*sentences, _markdown(tables), *NOTES]) + "\n")
    metrics = _write_csvs(rows, folder)
    pictures = draw_all(rows, folder / "plots", {m.staleness: m.predicted for m in measured if m.predicted})
    (folder / "report.html").write_text(_page(folder, tables, metrics, sentences, pictures))
    return _markdown(tables) + "\n" + "\n".join(sentences)


def _markdown(tables: Sequence[Table]) -> str:
    return "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)


def shown_columns(rows: Sequence[Setting]) -> Columns:
    """Return the columns TRADE_OFF with the efficiency by accuracy or, if that is not known, by sampled reward."""
    others = {*WORTH, *WORTH_BY_REWARD} - {*worth_keys(rows)}
    return {key: column for key, column in TRADE_OFF.items() if key not in others}


def value_table(rows: Sequence[Setting], columns: Columns, title: str) -> Table | None:
    """Return a table with a row for each combination of settings, or None if no run measured any of the columns.

    A `-` stands for a value that was not measured.
    """
    columns = {key: column for key, column in columns.items() if any(row.has(key) for row in rows)}
    header = ["staleness", *(key for key, _ in rows[0].series), *(label for label, _ in columns.values()), "seeds"]
    lines = []
    for row in rows:
        texts = []
        for key, (_, form) in columns.items():
            value = row.estimate(key)
            is_tiny = 0 < abs(value.mean) < TINY
            texts.append("-" if math.isnan(value.mean) else "0" if is_tiny else value.text(form))
        lines.append([str(row.staleness), *(label for _, label in row.series), *texts, str(len(row.runs))])
    best = tuple(map(rows.index, best_rows(rows)))
    return Table(header, lines, title, best) if columns else None


def prediction(measured: Sequence[Measured]) -> Table | None:
    """Return a table of measured and predicted utilisation and staleness at each bound; None without `measured`."""
    header = (
        "staleness", "learner, measured", "predicted", "rollout, measured", "predicted", "staleness, measured",
        "predicted",
    )  # fmt: skip

    def text(value: float | None, form: str = "{:.1%}") -> str:
        return "-" if value is None or math.isnan(value) else form.format(value)

    lines = []
    for m in measured:
        learner, rollout, staleness = (
            getattr(m.predicted, name, None) for name in ("utilisation", "rollout", "mean_staleness")
        )
        lines.append([
            str(m.staleness), text(m.learner), text(learner), text(m.rollout), text(rollout),
            text(m.staleness_mean, "{:.2f}"), text(staleness, "{:.2f}"),
        ])  # fmt: skip
    return Table(header, lines, "Utilisation: measured and predicted") if measured else None


def _write_csvs(rows: Sequence[Setting], folder: Path) -> Table:
    """Write runs.csv, evals.csv and metrics.csv; return the table of the last one.

    runs.csv has a line for every run, evals.csv one for every held-out evaluation, metrics.csv one for every metric:
    how it is reduced over steps, its unit, and its figure in each run.
    """
    runs = [run for row in rows for run in row.runs]
    settings = [STALENESS, *(key for key, _ in rows[0].series)]
    axes = [*settings, SEED]
    values = [
        [*(run.labels[axis] for axis in axes), *(f"{of_runs[number]:.6g}" for of_runs in row.values.values())]
        for row in rows for number, run in enumerate(row.runs)
    ]
    _write_csv(folder / "runs.csv", [*axes, *rows[0].values], values)
    evals = [
        [*(run.labels[axis] for axis in axes), f"{version:g}", f"{seconds:.3f}", accuracy]
        for run in runs for version, seconds, accuracy in run.evals
    ]
    _write_csv(folder / "evals.csv", [*axes, "version", "seconds", "accuracy"], evals)
    figures = [run.figures.all() for run in runs]
    declared = {key: each for run in runs for key, each in run.declarations.items()}
    labels = [" ".join(f"{axis}={run.labels[axis]}" for axis in axes) for run in runs]
    lines = []
    for key in sorted({key for of_run in figures for key in of_run}):
        each = declared.get(key, PLAIN)
        how = f"{each.over_steps} by {each.by}" if each.by else each.over_steps
        lines.append([key, how, each.unit, *(f"{of_run.get(key, math.nan):.6g}" for of_run in figures)])
    every_metric = Table(["metric", "over steps", "unit", *labels], lines)
    _write_csv(folder / "metrics.csv", every_metric.header, lines)
    return every_metric


def _write_csv(path: Path, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])


def _page(
    folder: Path, tables: Sequence[Table], metrics: Table, sentences: Sequence[str], pictures: Mapping[Path, str]
) -> str:
    """Return the HTML page with all pictures embedded. It begins with the sentences and the trade-off.

    Args:
        metrics: the table of every metric, which the page shows collapsed.
        pictures: {file: caption}.
    """
    name = html.escape(folder.resolve().name)
    figures = []
    for picture, text in pictures.items():
        data, caption = base64.b64encode(picture.read_bytes()).decode(), html.escape(text)
        image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        figures.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    said = [f'<p class="{"note" if place else "lead"}">{html.escape(text)}</p>' for place, text in enumerate(sentences)]
    shown = [f'<div class="wide">{table.html()}</div>' for table in tables]
    every = f'<details><summary>Every metric</summary><div class="wide">{metrics.html()}</div></details>'
    parts = [
        f"<h1>{name}</h1>", *said[:1], *figures[:1], *said[1:], *shown[:2], *figures[1:], *shown[2:],
        *(f'<p class="note">{html.escape(note)}</p>' for note in NOTES), every, _origin(folder),
    ]  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _origin(folder: Path) -> str:
    """Return how the results were made, as HTML: command, machine, commits, and the config of the first run."""
    plan_file = folder / "sweep.json"
    plan: dict[str, Any] = json.loads(plan_file.read_text()) if plan_file.is_file() else {}
    commits = {record.commit for record in finished_cells(folder).values()} - {""}
    facts = {"command": plan.get("command", ""), **plan.get("machine", {})}
    if commits:
        facts["commit"] = ", ".join(sorted(commits))  # cells of one sweep may come from several commits
    config = next((file.read_text() for file in sorted(folder.glob("**/config.yaml"))), "")
    lines = "\n".join(f"{key}: {value}" for key, value in facts.items() if value)
    return (
        f"<h2>How it was made</h2><pre>{html.escape(lines)}</pre><details><summary>Config of the first run</summary>"
        f"<pre>{html.escape(config)}</pre></details>"
    )
