"""Draws the plots of a report: a dot for each seed, and a line through the means if the settings have an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.base.telemetry.plots import STATE_COLORS, plain, smooth
from async_rl.base.telemetry.timeline import STATES
from async_rl.tools.sweeps.cells import Bound, bounds_title
from async_rl.tools.sweeps.results import Run
from async_rl.tools.sweeps.settings import SPEEDS, Setting, best_rows, speed_key, worth_keys
from async_rl.tools.sweeps.statistics import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from buffer.simulate import Result

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DPI = 110
MOST_LINES = 5
SECONDS = "seconds since the end of the first step"
_DOTS = " Each dot is a seed, each bar a mean ± standard error. Dots of a step's worth are jackknife values."
CAPTIONS = {
    "trade_off": f"What a step is worth, how busy the learner is, and what a minute brings.{_DOTS}",
    "learning": "Held-out accuracy and the reward of each policy version: means over seeds ± one standard error.",
    "utilisation": "Share of time that each pool spent in each state. Diamonds: predicted by the simulator.",
    "off_policy": f"How far the trained policy is from the policies that sampled its data.{_DOTS}",
}
"""The caption of each plot, by name, in the order of the page."""
Curve = Callable[[Run], tuple[Sequence[float], Sequence[float]]]
"""A function from a run to its x and y values."""


def draw_all(rows: Sequence[Setting], folder: Path, predicted: Mapping[Bound, Result]) -> dict[Path, str]:
    """Draw every plot for which there is data, as a PNG file in `folder`. Returns {file: caption}.

    Args:
        predicted: the simulated results by staleness bound.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounded = [row for row in rows if not row.exact]
    figures = {
        "trade_off": lambda: trade_off(rows),
        "learning": lambda: learning(rows),
        "utilisation": lambda: _utilisation(bounded, predicted),
        "off_policy": lambda: _off_policy(rows),
    }
    captions = {}
    seeds = sorted({len(row.runs) for row in rows})
    number = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    for name, draw in figures.items():
        if (figure := draw()) is not None:
            note = f"seeds of each setting: {number}; mean ± standard error"  # a plot may be shown without its caption
            figure.supxlabel(note, x=0.99, ha="right", fontsize=9, color="#555555")
            figure.savefig(folder / f"{name}.png", dpi=DPI)
            captions[folder / f"{name}.png"] = CAPTIONS[name]
    return captions


def _panels(count: int, width: float = 4.2, height: float = 3.6) -> tuple[Any, list[Axes]]:
    from matplotlib.figure import Figure  # without pyplot, whose backend and figures are those of the user's process

    columns = min(3, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 6.5), height * lines), layout="constrained")
    flat = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in flat[count:]:
        unused.set_visible(False)
    for one in flat:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, flat[:count]


def _legend(figure: Any, panels: Sequence[Axes]) -> None:
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if any(handles):
        columns = min(len(handles), int(figure.get_figwidth() // 2.2))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)


def _chosen(names: Sequence[Any]) -> list[Any]:
    """Return at most MOST_LINES of `names`, including the first and the last."""
    places = np.linspace(0, len(names) - 1, min(MOST_LINES, len(names)))
    return [names[round(place)] for place in places]


def _dots(axes: Axes, row: Setting, x: float, key: str, color: str, label: str = "") -> None:
    """Draw the value `key` of each seed of a row at x, side by side, and their mean with its standard error."""
    values, mean = row.values[key], row.estimate(key)
    shifts = np.linspace(-0.05, 0.05, len(values)) if len(values) > 1 else [0.0]
    axes.plot([x + shift for shift in shifts], values, ".", color=color, alpha=0.5, markersize=6)
    error = 0.0 if math.isnan(mean.error) else mean.error
    axes.errorbar([x], [mean.mean], yerr=[error], color=color, marker="_", markersize=11, capsize=3, label=label)


def _against_staleness(axes: Axes, rows: Sequence[Setting], key: str, label: str) -> None:
    """Draw the value `key` over the staleness settings. A line connects bounds, which have an order, but not depths."""
    bounds = sorted({row.staleness for row in rows})
    all_series = list(dict.fromkeys(row.series for row in rows))
    for number, series in enumerate(_chosen(all_series)):
        own = sorted((row for row in rows if row.series == series and row.has(key)), key=lambda row: row.staleness)
        shift = 0.14 * (number - (min(len(all_series), MOST_LINES) - 1) / 2)
        name = plain(", ".join(f"{axis} {value}" for axis, value in series))
        for place, row in enumerate(own):
            _dots(axes, row, bounds.index(row.staleness) + shift, key, OKABE_ITO[number], "" if place else name)
        if all(row.staleness.is_full for row in own):
            xs = [bounds.index(row.staleness) + shift for row in own]
            axes.plot(xs, [row.estimate(key).mean for row in own], color=OKABE_ITO[number], linewidth=1.2)
    axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds], rotation=60 if len(bounds) > 8 else 0)
    axes.set_xlabel(f"{bounds_title(bounds)}, versions")
    axes.set_ylabel(label)


def trade_off(rows: Sequence[Setting]) -> Any:
    """Return a figure of the efficiency of a step; in bounded mode also of utilisation and effective steps per minute.

    If no efficiency by accuracy is known, it shows the one by sampled reward. None if there is nothing to show.
    """
    labels = {"efficiency": "synchronous steps", "efficiency_sampled": "by sampled reward"}
    bounded = [row for row in rows if not row.exact]
    speed = speed_key(bounded)
    shown = [(rows, key, f"a step is worth, {labels[key]}") for key in worth_keys(rows)[:1]]
    shown += [(bounded, "learner", "learner utilisation, share of time")] if bounded else []
    shown += [(bounded, speed, SPEEDS[speed][0].replace(" by ", "\nby "))] if worth_keys(bounded) else []
    if not shown:
        return None
    figure, panels = _panels(len(shown))
    for axes, (of, key, label) in zip(panels, shown, strict=True):
        _against_staleness(axes, of, key, label)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        if key == "learner":
            axes.set_ylim(0, 1)
    _legend(figure, panels)
    return figure


def learning(rows: Sequence[Setting]) -> Any:
    """Return a figure of held-out accuracy and of the policy's reward, by version and by time; None without curves.

    It has at most five settings: the best, and others from the lowest to the highest staleness.
    """
    order = sorted(rows, key=lambda row: (row.series, row.staleness))
    best = best_rows(rows)[:1]
    others = [row for row in order if row not in best]
    chosen = _chosen(order) if len(order) <= MOST_LINES else best + _chosen(others)[: MOST_LINES - len(best)]
    shown = [row for row in order if row in chosen]
    has_evals = all(len(run.evals) > 2 for row in shown for run in row.runs)
    has_rewards = all(len(run.policy_curve) > 1 for row in shown for run in row.runs)
    has_times = not any(row.exact for row in shown)
    curves: list[tuple[str, str, Curve]] = []
    if has_evals:
        curves.append(("policy version", "held-out accuracy", lambda run: _columns(run.evals, 0, 2)))
        if has_times:
            curves.append((SECONDS, "held-out accuracy", lambda run: _columns(run.evals, 1, 2)))
    if has_rewards:
        label = "reward of the policy, smoothed"
        curves.append(("policy version", label, lambda run: _reward(run, [p.version for p in run.policy_curve])))
        if has_times:
            curves.append((SECONDS, label, lambda run: _reward(run, [p.served_s for p in run.policy_curve])))
    if not curves:
        return None
    figure, panels = _panels(len(curves), width=5.0)
    for axes, (x_label, y_label, curve) in zip(panels, curves, strict=True):
        for number, row in enumerate(shown):
            found = [curve(run) for run in row.runs]
            grid = np.linspace(max(xs[0] for xs, _ in found), min(xs[-1] for xs, _ in found), 60)
            means = [estimate(values) for values in zip(*(np.interp(grid, xs, ys) for xs, ys in found), strict=True)]
            mean, error = np.array([(each.mean, np.nan_to_num(each.error)) for each in means]).T
            axes.plot(grid, mean, color=OKABE_ITO[number], label=plain(row.name))
            axes.fill_between(grid, mean - error, mean + error, color=OKABE_ITO[number], alpha=0.15, linewidth=0)
            if len(found[0][0]) <= 12:  # few enough evaluations to see each
                for xs, ys in found:
                    axes.plot(xs, ys, ".", color=OKABE_ITO[number], alpha=0.5, markersize=5)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    _legend(figure, panels)
    return figure


def _columns(points: Sequence[Sequence[float]], x: int, y: int) -> tuple[list[float], list[float]]:
    return [point[x] for point in points], [point[y] for point in points]


def _reward(run: Run, xs: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    points = run.policy_curve
    rewards, weights = [point.reward for point in points], [point.episodes for point in points]
    return xs, smooth(rewards, weights, max(1, len(points) // 15))


def _utilisation(rows: Sequence[Setting], predicted: Mapping[Bound, Result]) -> Any:
    """Return a figure of each pool's shares of time by state, as stacked bars over the bounds of the first series.

    Args:
        predicted: the simulated results by staleness bound.
    """
    if not rows:
        return None
    rows = sorted((row for row in rows if row.series == rows[0].series), key=lambda row: row.staleness)
    figure, panels = _panels(2, width=5.6, height=4.2)
    places = range(len(rows))
    for axes, kind in zip(panels, ("learner", "rollout"), strict=True):
        bottom = np.zeros(len(rows))
        for state in STATES:
            key = f"utilisation/{kind}" + ("" if state == "busy" else f"/{state}")
            heights = np.array([np.mean([run.summary.get(key, 0.0) for run in row.runs]) for row in rows])
            if heights.any():
                axes.bar(places, heights, 0.7, bottom, color=STATE_COLORS[state], label=state.replace("_", " "))
            bottom += heights
        results = [predicted.get(row.staleness) for row in rows]
        if any(results):
            shares = [(r.utilisation if kind == "learner" else r.rollout) if r else math.nan for r in results]
            axes.plot(places, shares, "kD", markersize=7, markerfacecolor="white", label="busy, predicted")
        axes.set_xticks(places, [str(row.staleness) for row in rows], rotation=60 if len(rows) > 8 else 0)
        axes.set_xlabel(f"{bounds_title([row.staleness for row in rows])}, versions")
        axes.set_ylabel(f"{kind} pool, share of time")
        axes.set_ylim(0, 1.02)
    _legend(figure, panels)
    return figure


def _off_policy(rows: Sequence[Setting]) -> Any:
    figure, panels = _panels(3)
    _against_staleness(panels[0], rows, "is_variance", "variance of the IS weights, median step")
    _against_staleness(panels[1], rows, "ess", "effective sample size / tokens")
    _against_staleness(panels[2], rows, "kl", "KL(behaviour || proximal), nats a token")
    panels[0].set_yscale("symlog", linthresh=1e-3)  # the variance is 0 where nothing is stale, and spans decades
    panels[0].set_ylim(bottom=0)
    panels[2].set_ylim(bottom=0)
    _legend(figure, panels)
    return figure
