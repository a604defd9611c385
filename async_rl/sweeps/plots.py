"""Draws the plots of a report. Staleness has the ordered colours of cividis, everything else those of Okabe and Ito."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.sweeps.cells import Bound, bounds_title
from async_rl.sweeps.policy_curve import PolicyPoint
from async_rl.sweeps.settings import Setting
from async_rl.sweeps.significance import SPEEDS, speed_key, unit_axes
from async_rl.telemetry.plot_learning_curve import plain, smooth
from async_rl.telemetry.plot_timeline import STATE_COLORS
from async_rl.telemetry.timeline import STATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from buffer.simulate import Result

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DPI = 130
STEP, SECONDS = "learner step", "seconds since the end of the first step"
ONLY_KEPT = ("reward_by_step", "reward_by_time")
"""Pictures of the rewards of batches, which can't be compared across staleness: those of committed sweeps are kept."""
Series = tuple[tuple[str, str], ...]


def draw_all(rows: Sequence[Setting], folder: Path, predicted: Mapping[Bound, Result]) -> list[Path]:
    """Draw every plot that there is data for as a PNG file in `folder`; return the paths.

    If the runs have no steps, as they were read from CSV files, the earlier plots of steps are kept.

    Args:
        predicted: the simulated results by staleness bound.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounded = [row for row in rows if not row.exact]
    stepped = [row for row in rows if all(run.steps for run in row.runs)]
    stepped_bounded = [row for row in stepped if not row.exact]
    pictures: list[tuple[str, Callable[[], Any]]] = [
        ("trade_off", lambda: _trade_off(rows)),
        ("depth_beside_bound", lambda: _depth_beside_bound(bounded)),
        ("accuracy_by_step", lambda: _accuracy_curves(rows, 0, STEP)),
        ("accuracy_by_time", lambda: _accuracy_curves(bounded, 1, SECONDS)),
        ("policy_reward_by_version", lambda: _reward_curves(stepped, lambda point: point.version, "policy version")),
        ("policy_reward_by_time", lambda: _reward_curves(stepped_bounded, lambda point: point.served_s, SECONDS)),
        *((name, lambda: None) for name in ONLY_KEPT),
        ("utilisation", lambda: _utilisation(stepped_bounded, predicted)),
        ("offpolicy", lambda: _offpolicy(rows)),
        ("staleness", lambda: _staleness_histogram(stepped)),
    ]
    paths = []
    for name, draw in pictures:
        figure = draw()
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=DPI)
        if figure is not None or (not stepped and (folder / f"{name}.png").is_file()):
            paths.append(folder / f"{name}.png")
    return paths


def by_series(rows: Sequence[Setting]) -> dict[Series, list[Setting]]:
    found: dict[Series, list[Setting]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return {series: sorted(of_series, key=lambda row: row.staleness) for series, of_series in found.items()}


def series_name(series: Series, others: Sequence[Series] = ()) -> str:
    """Return the labels of a series as text, without the labels that all `others` have too."""
    return plain(", ".join(
        f"{key} {label}" for key, label in series if not others or any((key, label) not in other for other in others)
    ))


def make_panels(count: int, width: float = 4.2, height: float = 3.6, **options: Any) -> tuple[Any, list[Axes]]:
    """Return (figure, its panels), three in a line; `options` are those of Figure.subplots."""
    from matplotlib.figure import Figure  # without pyplot, whose backend and figures are those of the user's process

    columns = min(3, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 6.5), height * lines), layout="constrained")
    flat = list(figure.subplots(lines, columns, squeeze=False, **options).flat)
    for unused in flat[count:]:
        unused.set_visible(False)
    for one in flat:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, flat[:count]


def _against_staleness(axes: Axes, rows: Sequence[Setting], key: str, label: str) -> None:
    bounds = sorted({row.staleness for row in rows})
    all_series = by_series(rows)
    for number, (series, of_series) in enumerate(all_series.items()):
        estimates = [row.estimate(key) for row in of_series]
        shift = 0.08 * (number - (len(all_series) - 1) / 2)
        axes.errorbar(
            [bounds.index(row.staleness) + shift for row in of_series], [e.mean for e in estimates],
            yerr=[0.0 if math.isnan(e.error) else e.error for e in estimates], capsize=3,
            color=OKABE_ITO[number % len(OKABE_ITO)], marker=MARKERS[number % len(MARKERS)],
            label=series_name(series, list(all_series)),
        )
    axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    axes.set_xlabel(f"{bounds_title(bounds)}, versions")
    axes.set_title(label, fontsize=10)


def _legend(figure: Any, panels: Sequence[Axes], place: str = "outside upper center", **options: Any) -> None:
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if any(handles):
        columns = 1 if "right" in place else min(len(handles), int(figure.get_figwidth() // 2.2))
        figure.legend(handles.values(), handles.keys(), loc=place, ncols=columns, frameon=False, **options)


def _trade_off(rows: Sequence[Setting]) -> Any:
    """Return a figure of what a step is worth and, for bounded mode, the learner's utilisation and effective steps a
    minute, each over the staleness bound. Where efficiency can't be told, it shows that by sampled reward instead, and
    where that can't be told either, the improvement.
    """
    what = "accuracy" if any(run.evals for row in rows for run in row.runs) else "reward"
    if any(row.has("efficiency") for row in rows):
        worth, speed = ("efficiency", "synchronous steps that a step is worth"), "effective steps per minute"
    elif any(row.has("efficiency_sampled") for row in rows):
        worth, speed = ("efficiency_sampled", "worth of a step by sampled reward"), SPEEDS["effective_steps_sampled"][0]
    else:
        worth, speed = ("improvement", f"{what} gained in the run"), f"{what} gained per minute"
    bounded = [row for row in rows if not row.exact]
    figure, panels = make_panels(3 if bounded else 1)
    _against_staleness(panels[0], rows, *worth)
    if bounded:
        _against_staleness(panels[1], bounded, "learner", "learner utilisation, share of time")
        panels[1].set_ylim(0, 1)
        speed += "".join(f",\nin steps of the same {axis}" for axis in unit_axes(bounded))
        _against_staleness(panels[2], bounded, speed_key(bounded), speed)
    for axes in panels:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _legend(figure, panels)
    return figure


def _depth_beside_bound(rows: Sequence[Setting]) -> Any:
    """Return a figure of speed, reward and the worst KL over the measured mean staleness: bounds are a line, depths
    below a bound are points beside it. It is None without both. The reward of runs without steps is that of the batches
    with its lag taken off to first order.
    """
    bounds = [row for row in rows if row.staleness.is_full]
    depths = [row for row in rows if not row.staleness.is_full]
    reward, order = ("policy_reward", "") if rows and rows[0].has("policy_reward") else ("reward_less_lag", ", about")
    shown = {
        "steps_per_minute": "learner steps per minute",
        reward: f"reward of the policy, mean over the time{order}",
        "kl_p95": "KL of a step, 95th percentile, nats a token",
    }
    if not (bounds and depths) or not all(row.has(key) for row in rows for key in shown):
        return None
    below = sorted({row.staleness.max for row in depths})
    groups = {"bound": bounds} | {f"depth / {m}": [row for row in depths if row.staleness.max == m] for m in below}
    figure, panels = make_panels(len(shown))
    for axes, (key, title) in zip(panels, shown.items(), strict=True):
        for number, (label, group) in enumerate(groups.items()):
            group = sorted(group, key=lambda row: row.estimate("staleness_mean").mean)
            xs, ys = ([row.estimate(name) for row in group] for name in ("staleness_mean", key))
            color = OKABE_ITO[number % len(OKABE_ITO)]
            axes.errorbar(
                [x.mean for x in xs], [y.mean for y in ys], yerr=[0.0 if math.isnan(y.error) else y.error for y in ys],
                capsize=3, color=color, marker=MARKERS[number % len(MARKERS)], label=label,
                linestyle="-" if number == 0 else ":" if len(below) > 1 else "",
            )  # fmt: skip
            if 0 < number < len(below):  # its depths lie below those of the largest bound, which have names
                continue
            for place, (row, x, y) in enumerate(zip(group, xs, ys, strict=True)):
                # Below the line of bounds, and to both sides of the depths, which lie close together.
                sides = ((5, -12), "left"), ((7, 4), "left"), ((-7, 4), "right")
                offset, side = sides[0] if number == 0 else sides[2 - place % 2]
                axes.annotate(
                    str(row.staleness), (x.mean, y.mean), offset, textcoords="offset points", fontsize=8, ha=side,
                    color=color,
                )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("staleness of trained episodes, mean")
        if key != reward:  # its differences are small beside its distance from 0
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.margins(x=0.1)
    _legend(figure, panels)
    return figure


def _accuracy_curves(rows: Sequence[Setting], x: int, x_label: str) -> Any:
    if any(len(run.evals) < 3 for row in rows for run in row.runs):
        return None

    def draw(axes: Axes, row: Setting, style: dict[str, Any]) -> None:
        # The k-th evaluations of all seeds are averaged, although they are not at exactly the same step.
        count = min(len(run.evals) for run in row.runs)
        points = np.array([run.evals[: count - 1] + run.evals[-1:] for run in row.runs])  # [seeds, count, 3]
        means, errors = _mean_and_error(points[:, :, 2])
        axes.errorbar(points[:, :, x].mean(axis=0), means, yerr=errors, capsize=2, marker="o", markersize=4, **style)

    return _curves(rows, x_label, "held-out accuracy", draw)


def _reward_curves(rows: Sequence[Setting], x: Callable[[PolicyPoint], float], x_label: str) -> Any:
    """Return a figure of the mean reward of each policy version, smoothed, with standard errors over seeds.

    It is None if there is no row in which two versions of each run are known.
    """
    rows = [row for row in rows if all(len(run.policy_curve.points) > 1 for run in row.runs)]

    def draw(axes: Axes, row: Setting, style: dict[str, Any]) -> None:
        curves = []
        for run in row.runs:
            points = run.policy_curve.points
            weights = [point.episodes for point in points]
            values = smooth([point.reward for point in points], weights, max(1, len(points) // 15))
            curves.append(([x(point) for point in points], values))
        grid = np.linspace(max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves), 60)
        means, errors = _mean_and_error(np.array([np.interp(grid, xs, values) for xs, values in curves]))
        axes.plot(grid, means, **style)
        axes.fill_between(grid, means - errors, means + errors, color=style["color"], alpha=0.18, linewidth=0)

    return _curves(rows, x_label, "reward of the policy, smoothed", draw)


def _curves(
    rows: Sequence[Setting], x_label: str, y_label: str, draw: Callable[[Axes, Setting, dict[str, Any]], None]
) -> Any:
    """Return a figure with a panel for each series, in which `draw` draws a line for each bound; None without rows."""
    if not rows:
        return None
    from matplotlib import colormaps

    series = by_series(rows)
    bounds = sorted({row.staleness for row in rows})
    figure, panels = make_panels(len(series), width=6.5, height=4.2, sharey=True)
    for axes, (name, of_series) in zip(panels, series.items(), strict=True):
        for row in of_series:
            place = bounds.index(row.staleness)
            draw(axes, row, {
                "color": colormaps["cividis"](place / max(1, len(bounds) - 1) * 0.92), "label": f"{row.staleness}",
                "linestyle": ("-", "--", "-.", ":")[place % 4], "linewidth": 1.8,
            })
        axes.set_title(series_name(name), fontsize=10)
        axes.set_xlabel(x_label)
    panels[0].set_ylabel(y_label)
    _legend(figure, panels, "outside right upper", title=bounds_title(bounds))
    return figure


def _mean_and_error(lines: Any) -> tuple[Any, Any]:
    """Return mean and standard error [points] over the seeds of `lines` [seeds, points]; a single seed has error 0."""
    if len(lines) == 1:
        return lines[0], np.zeros_like(lines[0])
    return lines.mean(axis=0), lines.std(axis=0, ddof=1) / math.sqrt(len(lines))


def _utilisation(rows: Sequence[Setting], predicted: Mapping[Bound, Result]) -> Any:
    """Return a figure of each pool's shares of time by state, as stacked bars over the bounds of the first series.

    Marks show the predicted busy share, the occupancy of slots, and the GPU's utilisation by NVML.
    """
    if not rows:
        return None
    series, rows = next(iter(by_series(rows).items()))
    figure, panels = make_panels(2, width=5.6, height=4.2, sharey=True)
    places = range(len(rows))
    for axes, kind in zip(panels, ("learner", "rollout"), strict=True):
        bottom = np.zeros(len(rows))
        for state in STATES:
            key = f"utilisation/{kind}" + ("" if state == "busy" else f"/{state}")
            heights = np.array([np.mean([run.summary.get(key, 0.0) for run in row.runs]) for row in rows])
            if heights.any():
                axes.bar(
                    places, heights, bottom=bottom, color=STATE_COLORS[state], label=state.replace("_", " "),
                    width=0.7, edgecolor="white", linewidth=0.5,
                )
            bottom += heights
        results = [predicted.get(row.staleness) for row in rows]
        shares = [(r.utilisation if kind == "learner" else r.rollout) if r else math.nan for r in results]
        if any(results):
            axes.plot(places, shares, "kD", markersize=7, markerfacecolor="white", label="busy, predicted")
        if kind == "rollout":
            occupancy = [row.estimate("occupancy").mean for row in rows]
            axes.plot(places, occupancy, "k_", markersize=16, markeredgewidth=2, label="occupancy of slots")
        if any(row.has(f"gpu_{kind}") for row in rows):
            by_nvml = [row.estimate(f"gpu_{kind}").mean for row in rows]
            axes.plot(places, by_nvml, "kx", markersize=7, label="GPU, by NVML")
        axes.set_xticks(places, [str(row.staleness) for row in rows])
        axes.set_xlabel(f"{bounds_title([row.staleness for row in rows])}, versions")
        axes.set_title(f"{kind} pool" + (f", {series_name(series)}" if series else ""), fontsize=10)
    panels[0].set_ylabel("share of time")
    panels[0].set_ylim(0, 1.02)
    _legend(figure, panels)
    return figure


def _offpolicy(rows: Sequence[Setting]) -> Any:
    figure, panels = make_panels(3)
    _against_staleness(panels[0], rows, "is_variance", "variance of the IS weights, median step")
    _against_staleness(panels[1], rows, "ess", "effective sample size / tokens")
    _against_staleness(panels[2], rows, "kl", "KL(behaviour || proximal), nats a token")
    panels[0].set_yscale("symlog", linthresh=1e-3)  # the variance is 0 where nothing is stale, and spans decades
    panels[0].set_ylim(bottom=0)
    panels[2].set_ylim(bottom=0)
    panels[1].set_ylim(top=min(1.02, max(1.005, panels[1].get_ylim()[1])))
    _legend(figure, panels)
    return figure


def _staleness_histogram(rows: Sequence[Setting]) -> Any:
    """Return a figure of the share of trained episodes at each staleness, a panel for each bound, all series together.

    Runs in exact mode are drawn only if there are no others.
    """
    if not rows:
        return None
    rows = [row for row in rows if not row.exact] or rows
    bounds = sorted({row.staleness for row in rows})
    largest = max(bound.max for bound in bounds)
    figure, panels = make_panels(len(bounds), width=3.0, height=2.4, sharey=True)
    for axes, bound in zip(panels, bounds, strict=True):
        counts = np.zeros(largest + 1)
        for run in (run for row in rows if row.staleness == bound for run in row.runs):
            for step in run.steps[1:]:
                counts += [step.get(f"staleness/episodes_{k}") or 0.0 for k in range(largest + 1)]
        if not counts.any():
            continue
        axes.bar(range(largest + 1), counts / counts.sum(), color=OKABE_ITO[0], width=0.8)
        axes.axvline(bound.max + 0.5, color=OKABE_ITO[1], linestyle="--", linewidth=1.5)
        axes.set_title(f"{bounds_title([bound])} {bound}", fontsize=9)
        axes.set_xlim(-0.7, largest + 0.7)
        axes.set_xticks(range(0, largest + 1, max(1, largest // 5)))
    figure.supxlabel("staleness of a trained episode, versions (dashed: the bound)", fontsize=10)
    figure.supylabel("share of episodes", fontsize=10)
    return figure
