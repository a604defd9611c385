"""`async-rl report RUN RUN ...`: finished and running runs side by side, by step, by time and by tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from async_rl.config.yaml_text import read_yaml
from async_rl.errors import ConfigError
from async_rl.sweeps.pages import html_page, written
from async_rl.sweeps.plots import DPI, OKABE_ITO, SECONDS, STEP, make_panels
from async_rl.sweeps.records import PLACE_KEYS, leaves
from async_rl.sweeps.report import INSTEAD, LAGGING, LEARNING, TRADE_OFF, rewards_over
from async_rl.sweeps.results import Run, opened_run
from async_rl.sweeps.settings import WORTH, WORTH_BY_REWARD, policy_rewards
from async_rl.sweeps.tables import Table
from async_rl.telemetry.figures import is_warm_up, trained_tokens
from async_rl.telemetry.plot_learning_curve import plain, smooth
from async_rl.telemetry.status import saved_state

TOKENS = "tokens trained on"
REWARD, ACCURACY = "reward of the policy, smoothed", "held-out accuracy"
CAPTION = (
    "Each run by learner step, by the time since the end of its first step, and by the tokens that it trained on. The "
    "reward is that of each policy version, credited with the answers that it sampled, in whichever batch they were."
)
_LEFT_OUT = (*WORTH, *WORTH_BY_REWARD, *INSTEAD, *LAGGING)
"""The values that only a sweep can tell, or that flatter stale runs."""
_VALUES = {key: column for key, column in (LEARNING | TRADE_OFF).items() if key not in _LEFT_OUT}


def write_comparison(folders: Sequence[Path], out: Path) -> str:
    """Write table.md, compared.png and report.html into `out`; return the text to print.

    Raises:
        ConfigError: a folder is no run directory, or its run has not trained a step, or `out` can't be written to.
    """
    runs = dict(zip(_names(folders), map(opened_run, folders), strict=True))
    tables = [_values(runs), _settings(runs)]
    text = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    notes = [note for note in (_seconds_compared(runs), _went_on(runs)) if note]
    text += "".join(f"\n{note}\n" for note in notes)
    picture = out / "compared.png"
    with written(out, "Set --out to a folder where you may write"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(text)
        _draw(runs, picture)
        (out / "report.html").write_text(html_page("Runs side by side", tables, notes, [], {picture: CAPTION}))
    return text


def tokens_by_step(run: Run) -> dict[float, float]:
    """Return {step: tokens that the run has trained on until then}."""
    steps = [step.get("step") or 0.0 for step in run.steps]
    return dict(zip(steps, accumulate(map(trained_tokens, run.steps)), strict=True))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own or, where others have that too, with the folders above it."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    repeated = next(path for path, count in Counter(paths).items() if count > 1)
    raise ConfigError(f"each run must be named once, got {repeated} twice")


def _values(runs: Mapping[str, Run]) -> Table:
    rewards, _ = policy_rewards(list(runs.values()))
    found = {
        name: run.values() | {"policy_reward": reward}
        for (name, run), reward in zip(runs.items(), rewards, strict=True)
    }
    rows = [
        ["state", *(_state(run) for run in runs.values())],
        ["steps", *(f"{len(run.steps):,}" for run in runs.values())],
        ["minutes after the first step", *(f"{run.seconds[-1] / 60:.1f}" for run in runs.values())],
        [TOKENS, *(f"{max(tokens_by_step(run).values()):,.0f}" for run in runs.values())],
    ]
    for key, (label, form) in _VALUES.items():
        values = [values[key] for values in found.values()]
        if not all(map(math.isnan, values)):
            rows.append([label, *("-" if math.isnan(value) else form.format(value) for value in values)])
    return Table(["", *runs], rows, "Runs")


def _state(run: Run) -> str:
    """Return `ended` for a run that has a summary, `ended early` for one that was ended before, or what it does."""
    state = saved_state(run.folder) or "unknown"
    return "ended" if run.has_ended else "ended early" if state == "ended" else state


def _seconds_compared(runs: Mapping[str, Run]) -> str:
    """Return one sentence that says over which seconds the policies' rewards are averaged, and for which run, or ""."""
    _, seconds = policy_rewards(list(runs.values()))
    shortest = next((name for name, run in runs.items() if run.policy_curve.end_s == seconds), "")
    return f"{rewards_over(seconds)}: of {shortest} no more is known." if shortest else ""


def _went_on(runs: Mapping[str, Run]) -> str:
    """Return one sentence that names the runs that went on from a checkpoint, whose clocks began again, or ""."""
    names = [name for name, run in runs.items() if sum(map(is_warm_up, run.steps)) > 1]
    if not names:
        return ""
    return (
        "These runs went on from a checkpoint, so their times are those of their parts added up, without each part's "
        f"start and first step: {', '.join(names)}."
    )


def _settings(runs: Mapping[str, Run]) -> Table:
    """Return a table of the settings in which the runs differ; `-` where a run's version had no such setting."""
    configs = [leaves(read_yaml((run.folder / "config.yaml").read_text())[0]) for run in runs.values()]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [str(config.get(key, "-")) for config in configs]
        if len(set(values)) > 1 and key not in PLACE_KEYS:
            rows.append([key, *values])
    return Table(["setting", *runs], rows or [["none", *("" for _ in runs)]], "Settings that differ")


def _axes_of(run: Run) -> dict[str, Callable[[float, float], float]]:
    """Return by label what a point of a run, (step, seconds), has on each axis."""
    tokens = tokens_by_step(run)
    return {
        STEP: lambda step, seconds: step,
        SECONDS: lambda step, seconds: seconds,
        TOKENS: lambda step, seconds: tokens.get(step, 0.0),
    }


def _draw(runs: Mapping[str, Run], file: Path) -> None:
    figure, grid = make_panels(6, width=5.0, sharey="row")
    for number, (name, run) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": OKABE_ITO[number % len(OKABE_ITO)], "label": plain(name)}
        points = run.policy_curve.points
        weights = [point.episodes for point in points]
        values = smooth([point.reward for point in points], weights, max(1, len(points) // 15))
        for place, (label, of_point) in enumerate(_axes_of(run).items()):
            grid[place].plot([of_point(point.version, point.served_s) for point in points], values, **style)
            xs = [of_point(step, seconds) for step, seconds, _ in run.evals]
            grid[3 + place].plot(xs, [accuracy for *_, accuracy in run.evals], marker="o", **style)
            grid[place].set_xlabel(label)
            grid[3 + place].set_xlabel(label)
    grid[0].set_ylabel(REWARD)
    grid[3].set_ylabel(ACCURACY)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
    figure.savefig(file, dpi=DPI)
