"""`async-rl report`: makes tables, plots and one HTML page from the files of a run or a sweep."""

from __future__ import annotations

import csv
import html
import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from async_rl.sweeps.cells import SEED, STALENESS
from async_rl.sweeps.pages import html_page, written
from async_rl.sweeps.plots import draw_all
from async_rl.sweeps.prediction import Measured, compare
from async_rl.sweeps.records import finished_cells
from async_rl.sweeps.results import Run, read_results
from async_rl.sweeps.settings import WORTH, WORTH_BY_REWARD, Setting, efficiency_unknown, settings_of
from async_rl.sweeps.significance import (
    SPEEDS,
    best_row,
    best_rows,
    bounds_compared,
    corrections_compared,
    ended_early,
    not_evaluated,
    went_on,
    which_are_bold,
)
from async_rl.sweeps.tables import Table, tables_in
from buffer.stored_group import DROP_REASONS

TRADE_OFF: dict[str, tuple[str, str]] = {
    "is_variance": ("IS-weight variance", "{:.3g}"),
    "kl": ("KL, nats per token", "{:.2g}"),
    "efficiency": ("a step is worth, synchronous steps", "{:.2f}"),
    "efficiency_sampled": ("a step is worth by sampled reward, steps at the lowest staleness", "{:.2f}"),
    "improvement": ("improvement", "{:+.3f}"),
    "learner": ("utilisation, learner", "{:.1%}"),
    **SPEEDS,
    "rollout": ("utilisation, rollout", "{:.1%}"),
    "occupancy": ("occupancy of slots", "{:.1%}"),
    "gpu_learner": ("GPU of the learner, NVML", "{:.1%}"),
    "gpu_rollout": ("GPU of rollout, NVML", "{:.1%}"),
    "ess": ("ESS / tokens", "{:.3f}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "staleness_max": ("staleness, max", "{:.0f}"),
    "steps_per_minute": ("steps per minute", "{:.1f}"),
    "tokens_per_s": ("trained tokens per s", "{:,.0f}"),
    "train_s": ("training, s", "{:.3f}"),
    "push_s": ("push, s", "{:.3f}"),
}
"""The heading and number format of each column by its value. Columns that no run measured are left out."""
INSTEAD = ("improvement", "per_minute")
"""The columns that stand only where efficiency and effective steps can't be told at all: they flatter stale runs."""
LEARNING: dict[str, tuple[str, str]] = {
    "accuracy_start": ("held-out accuracy, start", "{:.3f}"),
    "accuracy_end": ("held-out accuracy, end", "{:.3f}"),
    "reward_mean": ("reward of the batches, mean", "{:.3f}"),
    "policy_reward": ("reward of the policy, mean over the time", "{:.3f}"),
    "reward_over_time": ("reward of the batches, mean over the time, which lags by the staleness", "{:.3f}"),
    "reward_less_lag": ("the same with the lag taken off, to first order", "{:.3f}"),
    "truncated": ("IS weights beyond cap or floor", "{:.2%}"),
    "masked": ("tokens masked as too old", "{:.2%}"),
    "clipped_positive": ("tokens clipped, advantage above 0", "{:.2%}"),
    "clipped_negative": ("tokens clipped, advantage below 0", "{:.2%}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "dropped": ("groups dropped as too late", "{:.2%}"),
    "entropy_end": ("entropy, end", "{:.3f}"),
}
LAGGING = ("reward_over_time", "reward_less_lag")
"""The columns that stand only where the rewards of the policies are not known, as of runs without steps."""
TAILS: dict[str, tuple[str, str]] = {
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "kl_median": ("KL of a step, median", "{:.2g}"),
    "kl_p95": ("KL, 95th percentile", "{:.2g}"),
    "kl_largest": ("KL, largest", "{:.2g}"),
    "is_variance_median": ("IS-weight variance of a step, median", "{:.2g}"),
    "is_variance_p95": ("variance, 95th percentile", "{:.2g}"),
    "is_variance_largest": ("variance, largest", "{:.2g}"),
    "is_weight_largest": ("largest IS weight", "{:.3g}"),
    "waited_for_late": ("learner waited for late groups", "{:.1%}"),
}
WORTH_NOTE = (
    "A step is worth e synchronous steps if held-out accuracy after v steps is that of synchronous training after e v "
    "steps: staleness.max 0, other settings equal. Effective steps per minute are steps per minute times e, the "
    "synchronous steps that would have taught as much. e is fitted to the evaluations of all seeds. Its error is that "
    "of the jackknife over seeds, with the error of the synchronous curve in it."
)
REWARD_NOTE = (
    "The reward of the policy: the answers of batch v that are s versions old count for version v - s, and a version "
    "for the time in which it is served, over the seconds that all runs have. The rewards of the batches themselves "
    "are those of the policies that sampled them: they lag by the staleness, which flatters fresh runs. Taking the lag "
    "off to first order adds staleness times seconds a step over the run's seconds times the accuracy gained; where "
    "the run still learns at its end, that is too much. By sampled reward, a step is worth e steps at the lowest "
    "staleness of the sweep if the policy after v steps has the reward of the policy after e v steps there."
)
NOTES = (
    "Every value is mean ± standard error over seeds. The start-up and the first step of a run are left out.",
    WORTH_NOTE,
    "Improvement is held-out accuracy at the end minus at the start. Where nothing was evaluated, it is the mean "
    "reward of the last tenth of the steps minus that of the first tenth. It stands only where e can't be told. It "
    "flatters stale runs, because a learning curve is concave: a run that learns half as fast gains more than half.",
    "The learner is utilised while it computes an update. The rollout pool is utilised while at least one rollout "
    "group is in flight and no push pauses it. Occupancy is the number of running requests over the server's slots. "
    "The NVML columns are the share of time in which any kernel ran; pools that share a GPU have the same value.",
    "KL is the KL divergence of the behaviour policy from the proximal policy (k3 estimate). IS weights are the "
    "probability ratios of the proximal over the behaviour policy before truncation. Their variance is the median over "
    "the steps, because a few steps with very large weights would dominate a mean.",
    REWARD_NOTE,
    "The worst steps: quantiles over the steps of a run, then the mean over seeds. A KL or variance whose 95th "
    "percentile is far above its median comes from few steps, and the largest is the larger the more steps there are. "
    "The learner waits for late groups where a batch is held back by groups that may not become older, see "
    "staleness.late.",
    "Predictions come from the simulator, which is given the measured durations and the run's rules. A prediction is - "
    "where the simulator does not cover these rules. Groups in flight are groups that were granted a slot and "
    "that the buffer has not acknowledged yet, over rollout.concurrency, averaged over time.",
    "The work-conserving bound is the sum of both utilisations if neither pool ever waited without need: the stages "
    "one after the other at staleness 0, and the slower pool without pause above. It takes training and push as long "
    "as they were measured, also where they last longer because both pools share the machine.",
    "Groups that were trained on stand beside groups that were dropped. A difference in length or reward is the bias "
    "that dropping brings. Groups that were dropped while they ran have a duration only.",
    "With staleness.mode=exact a push waits for the groups of its batch. Times and utilisation are left out there.",
)
CAPTIONS = {
    "trade_off": "What a step is worth, how busy the learner is, and what a minute brings. Bars: standard error.",
    "depth_beside_bound": "Speed, reward of the policy and the worst KL by measured staleness. Bars: standard error.",
    "accuracy_by_step": "Held-out accuracy by learner step. Bars: standard error over seeds.",
    "accuracy_by_time": "Held-out accuracy by wall-clock time. Bars: standard error over seeds.",
    "policy_reward_by_version": "Reward of each policy version in training, smoothed. Bands: standard error.",
    "policy_reward_by_time": "The same by the time when the version was first served. Bands: standard error.",
    "reward_by_step": "Reward of each batch in training, smoothed: it lags by the staleness. Bands: standard error.",
    "reward_by_time": "The same by wall-clock time. Bands: standard error over seeds.",
    "utilisation": "Share of time that each pool spent in each state. Diamonds: busy share predicted by the simulator.",
    "offpolicy": "How far the policy that is trained is from the policies that sampled its data. Bars: standard error.",
    "staleness": "Staleness of the oldest token of each episode that was trained on.",
}


def write_report(folder: Path) -> str:
    """Write table.md, {table,runs,evals}.csv, plots/*.png and report.html into `folder`; return the text to print.

    If a sweep's cells are missing, as in one committed to git, its runs.csv and evals.csv stand for them, and the
    tables and plots that need the steps of the runs stay as they are.

    Raises:
        ConfigError: the folder holds no finished run, and none that has trained a step, or can't be written to.
    """
    runs = read_results(folder)
    rows = settings_of(runs)
    has_steps = any(run.steps for run in runs)
    measured = compare(rows) if has_steps and all(run.has_ended for run in runs) else []
    found = (
        value_table(rows, shown_columns(rows), "The trade-off"), prediction(measured), *bounds_compared(rows),
        *corrections_compared(rows), dropped_groups(rows), value_table(rows, shown_learning(rows), "What was learned"),
        value_table(rows, TAILS, "The worst steps"),
    )  # fmt: skip
    tables = [table for table in found if table]
    kept = [] if has_steps else _kept_tables(folder, {table.title for table in tables})
    tables += kept
    ends = (ended_early(rows), not_evaluated(rows), went_on(rows), so_far(runs))
    said = (best_row(rows), *efficiency_unknown(rows), seconds_compared(rows), *ends)
    sentences = [text for text in said if text]
    notes = [f"{NOTES[0]} {which_are_bold(rows)}", *NOTES[1:]]
    if kept:
        notes.append(f"Kept from a report made of the runs' steps: {'; '.join(table.title for table in kept)}.")
    text = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    with written(folder, "Copy the folder to where you may write, and make the report of the copy"):
        (folder / "table.md").write_text(text + "\n" + "\n\n".join([*sentences, *notes]) + "\n")
        _write_csvs(rows, folder)
        pictures = draw_all(rows, folder / "plots", {m.staleness: m.predicted for m in measured if m.predicted})
        (folder / "report.html").write_text(_page(folder, tables, sentences, notes, pictures))
    return text + "\n" + "\n".join(sentences)


def shown_columns(rows: Sequence[Setting]) -> dict[str, tuple[str, str]]:
    """Return TRADE_OFF without the columns INSTEAD, or with them, if the efficiency of no row can be told.

    That by sampled reward stands only where that by held-out accuracy can't be told.
    """
    told = next((keys for keys in (WORTH, WORTH_BY_REWARD) if any(row.has(keys[0]) for row in rows)), INSTEAD)
    others = {*WORTH, *WORTH_BY_REWARD, *INSTEAD} - {*told}
    return {key: column for key, column in TRADE_OFF.items() if key not in others}


def shown_learning(rows: Sequence[Setting]) -> dict[str, tuple[str, str]]:
    """Return LEARNING without the columns LAGGING, or with them, if the policies' rewards are known of no row."""
    is_known = any(row.has("policy_reward") for row in rows)
    return {key: column for key, column in LEARNING.items() if not (is_known and key in LAGGING)}


def seconds_compared(rows: Sequence[Setting]) -> str:
    """Return one sentence that says over which seconds the policies' rewards are averaged, or ""."""
    found = {value for row in rows for value in row.values["policy_seconds"] if not math.isnan(value)}
    return f"{rewards_over(min(found))}." if found else ""


def rewards_over(seconds: float) -> str:
    """Return what the rewards of policies are means over, without a full stop."""
    return f"Rewards of policies are means over the first {seconds:.1f} s after the first step"


def so_far(runs: Sequence[Run]) -> str:
    """Return a sentence on the run that has not ended, or ""."""
    counts = [len(run.steps) for run in runs if not run.has_ended]
    return f"The run has not ended: this is of its first {counts[0]} steps." if counts else ""


def _kept_tables(folder: Path, titles: Collection[str]) -> list[Table]:
    """Return the tables of an earlier table.md whose titles are not among `titles`."""
    file = folder / "table.md"
    return [table for table in tables_in(file.read_text() if file.is_file() else "") if table.title not in titles]


def value_table(rows: Sequence[Setting], columns: dict[str, tuple[str, str]], title: str) -> Table | None:
    """Return a table with a row for each combination of settings, or None if no run measured any of the columns.

    A `-` stands for a value that the runs of the row did not measure.
    """
    columns = {key: column for key, column in columns.items() if any(row.has(key) for row in rows)}
    header = ["staleness", *(key for key, _ in rows[0].series), *(label for label, _ in columns.values()), "seeds"]
    lines = []
    for row in rows:
        estimates = [(row.estimate(key), form) for key, (_, form) in columns.items()]
        texts = ["-" if math.isnan(value.mean) else value.text(form) for value, form in estimates]
        lines.append([str(row.staleness), *(label for _, label in row.series), *texts, str(len(row.runs))])
    best = tuple(map(rows.index, best_rows(rows)))
    return Table(header, lines, title, best) if columns else None


def prediction(measured: Sequence[Measured]) -> Table | None:
    """Return a table with a line for each staleness bound: utilisation and staleness, measured and predicted.

    The last columns have the work-conserving bound of both utilisations. The result is None if `measured` is empty.
    """
    header = (
        "staleness", "learner, measured", "predicted", "rollout, measured", "predicted", "staleness, measured",
        "predicted", "in flight, measured", "predicted", "both pools, measured", "work-conserving bound",
        "share of the bound",
    )  # fmt: skip

    def percent(value: float | None) -> str:
        return "-" if value is None or math.isnan(value) else f"{value:.1%}"

    lines = []
    for m in measured:
        learner, rollout, staleness, in_flight = (
            getattr(m.predicted, name, None) for name in ("utilisation", "rollout", "mean_staleness", "in_flight")
        )
        lines.append([
            str(m.staleness), percent(m.learner), percent(learner), percent(m.rollout), percent(rollout),
            f"{m.staleness_mean:.2f}", "-" if staleness is None else f"{staleness:.2f}", percent(m.in_flight),
            percent(in_flight), percent(m.learner + m.rollout), percent(m.bound),
            percent((m.learner + m.rollout) / m.bound),
        ])  # fmt: skip
    return Table(header, lines, "Utilisation: measured, predicted, possible") if measured else None


def dropped_groups(rows: Sequence[Setting]) -> Table | None:
    """Return a table of mean length, reward and duration of trained and of dropped groups; None if none was dropped."""
    lines = []
    for row in rows:
        for outcome in ("trained", *(f"dropped_{reason}" for reason in DROP_REASONS)):
            values = []
            for name in ("response_tokens", "reward", "duration_s"):
                key = f"buffer/{outcome}/{name}"
                found = [run.summary["buffer"][key] for run in row.runs if key in run.summary["buffer"]]
                values.append(f"{sum(found) / len(found):.3g}" if found else "-")
            if values != ["-"] * 3:
                lines.append([row.name, outcome.replace("dropped_", "dropped: ").replace("_", " "), *values])
    header = ("setting", "groups", "response tokens, mean", "reward, mean", "seconds, mean")
    return Table(header, lines, "Dropped groups") if any(line[1] != "trained" for line in lines) else None


def _write_csvs(rows: Sequence[Setting], folder: Path) -> None:
    """Write table.csv (means and standard errors), runs.csv (every run) and evals.csv (every held-out evaluation)."""
    runs = [run for row in rows for run in row.runs]
    settings = [STALENESS, *(key for key, _ in rows[0].series)]
    keys = list(dict.fromkeys([*TRADE_OFF, *LEARNING, *TAILS]))
    names = [name for key in keys for name in (key, f"{key}_error")]
    means = []
    for row in rows:
        estimates = [row.estimate(key) for key in keys]
        numbers = [f"{number:.6g}" for e in estimates for number in (e.mean, e.error)]
        means.append([row.staleness, *(label for _, label in row.series), *numbers, len(row.runs)])
    _write_csv(folder / "table.csv", [*settings, *names, "seeds"], means)
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


def _write_csv(path: Path, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])


def _page(
    folder: Path, tables: Sequence[Table], sentences: Sequence[str], notes: Sequence[str], pictures: Sequence[Path]
) -> str:
    captioned = {picture: CAPTIONS[picture.stem] for picture in pictures}
    tail = f"<h2>How it was made</h2>{_origin(folder)}"
    return html_page(folder.resolve().name, tables, sentences, notes, captioned, tail)


def _origin(folder: Path) -> str:
    plan_file = folder / "sweep.json"
    plan: dict[str, Any] = json.loads(plan_file.read_text()) if plan_file.is_file() else {}
    commits = {record.commit for record in finished_cells(folder).values()} - {""}
    facts = {"command": plan.get("command", ""), **plan.get("machine", {})}
    if commits:
        facts["commit"] = ", ".join(sorted(commits))  # cells of one sweep may come from several commits
    lines = [f"{key}: {value}" for key, value in facts.items() if value]
    return (
        f"<pre>{html.escape(chr(10).join(lines))}</pre><details><summary>Config of the first run</summary>"
        f"<pre>{html.escape(_first_config(folder))}</pre></details>"
    )


def _first_config(folder: Path) -> str:
    """Return the config of the first run. Of a sweep it is written to first_run.yaml, and read there without cells."""
    kept = folder / "first_run.yaml"
    found = next((file.read_text() for file in sorted(folder.glob("**/config.yaml"))), "")
    if found and (folder / "cells").is_dir():
        kept.write_text(found)
    return found or (kept.read_text() if kept.is_file() else "")
