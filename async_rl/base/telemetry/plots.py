"""Plots a run's learning curve from its metrics.jsonl, and its timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.base.telemetry.metrics import PLAIN, read_declarations, read_metrics
from async_rl.base.telemetry.timeline import STATES, Span, State, state_changes, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
"""Okabe-Ito colours, which people with a colour vision deficiency can also distinguish."""

Series = tuple[list[float], list[float], list[float]]
"""(the steps where a metric was measured, its values, their weights in a mean over steps)."""

CURVES = (
    "reward/mean", "eval/accuracy", "staleness/max", "staleness/mean", "utilisation/learner", "utilisation/rollout"
)  # fmt: skip
"""The metrics shown in the learning curve."""


def plot_learning_curve(run_dir: str | Path) -> Path | None:
    """Write `run_dir/learning_curve.png`; returns its path, or None if neither reward nor accuracy was measured.

    Its panels show, over the steps: reward and held-out accuracy; staleness; utilisation of learner and rollout.
    """
    from matplotlib.figure import Figure  # without pyplot, whose backend and figures are those of the user's process

    run_dir = Path(run_dir)
    records, declared = read_metrics(run_dir / "metrics.jsonl"), read_declarations(run_dir)
    series = {key: _series(records, key, declared.get(key, PLAIN).by) for key in CURVES}
    reward, accuracy = series["reward/mean"], series["eval/accuracy"]
    if not reward[0] and not accuracy[0]:
        return None
    figure = Figure(figsize=(8, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    span = 1 if len(reward[0]) < 20 else len(reward[0]) // 12
    figure.suptitle(plain(run_dir.name) + (f"   (bold: average of about {span} steps)" if span > 1 else ""))
    _draw_reward(top, reward, accuracy, span)
    _draw_staleness(middle, series["staleness/max"], series["staleness/mean"], span)
    for pool, color, style in (("learner", BLUE, "-"), ("rollout", GREEN, "--")):
        _draw_line(bottom, series[f"utilisation/{pool}"], span, color, style, pool)
    bottom.set_ylabel("utilisation")
    bottom.set_ylim(-0.03, 1.03)
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.margins(x=0.03)
    bottom.set_xlabel("step (policy version)")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    path = run_dir / "learning_curve.png"
    figure.savefig(path, dpi=130)
    return path


def plain(text: str) -> str:
    """Return a user's text for a plot, with dollar signs escaped; two of them would mark mathematics."""
    return text.replace("$", r"\$")


def smooth(values: Sequence[float], weights: Sequence[float], span: int) -> list[float]:
    """Return the exponential moving average with weight 2 / (span + 1) on the newest value, corrected for start bias.

    Args:
        weights: the weight of each value, e.g. the time of its step; at least 0.
    """
    alpha = 2 / (span + 1)
    total = seen = 0.0
    averaged = []
    for value, weight in zip(values, weights, strict=True):
        total = (1 - alpha) * total + alpha * weight * value
        seen = (1 - alpha) * seen + alpha * weight
        averaged.append(total / seen if seen else value)
    return averaged


def _draw_reward(axes: Axes, reward: Series, accuracy: Series, span: int) -> None:
    _draw_line(axes, reward, span, BLUE, "-", "reward, mean of a batch")
    is_curve = len(accuracy[0]) > 2  # a line between two points would look like linear learning
    axes.plot(
        *accuracy[:2], color=ORANGE, marker="o", linestyle="--" if is_curve else "none", linewidth=1,
        label="held-out accuracy",
    )
    points = list(zip(*accuracy[:2], strict=True))
    for step, value in dict.fromkeys(points[:1] + points[-1:]):
        axes.annotate(
            f"{value:.2f}", (step, value), xytext=(0, -18), textcoords="offset points", ha="center", color=ORANGE,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    axes.margins(y=0.12)
    axes.set_ylabel("mean reward; share right")


def _draw_staleness(axes: Axes, maximum: Series, mean: Series, span: int) -> None:
    axes.plot(*maximum[:2], color=ORANGE, linestyle="none", marker="o", markersize=3, zorder=3, label="max")
    _draw_line(axes, mean, span, BLUE, "-", "mean over episodes")
    axes.set_ylabel("staleness, versions")
    axes.set_ylim(bottom=-0.1, top=max([1.0, *maximum[1], *mean[1]]) * 1.15)


def _draw_line(axes: Axes, series: Series, span: int, color: str, style: str, label: str) -> None:
    """Draw the values of a series in a pale colour, and their moving average over them in bold."""
    steps, values, weights = series
    if span > 1:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values, weights, span), color=color, linestyle=style, linewidth=2, label=label)


def _series(records: Sequence[Mapping[str, float | None]], key: str, by: str) -> Series:
    """Return the series of the metric `key`.

    Args:
        by: the metric whose values are the weights. If it was not measured, every step has weight 1.
    """
    measured = [(record, value) for record in records if (value := record.get(key)) is not None]
    weights = [record.get(by) or 0.0 for record, _ in measured]
    if not any(weights):
        weights = [1.0] * len(measured)
    return [record["step"] or 0.0 for record, _ in measured], [value for _, value in measured], weights


STATE_COLORS: dict[State, str] = {
    "busy": "#0072B2", "wait_data": "#E69F00", "wait_weights": "#F0E442", "sync": "#CC79A7", "eval": "#009E73",
    "checkpoint": "#56B4E9", "other": "#999999",
}  # fmt: skip
"""Okabe-Ito colours, which people with a colour vision deficiency can also distinguish."""

STEPS_SHOWN = 10


def plot_timeline(
    spans: Iterable[Span], busy: Mapping[str, float], step_ends_s: Sequence[float], path: str | Path,
    first_step: int = 1, there: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path | None:
    """Plot the middle STEPS_SHOWN learner steps to the image `path`; returns it, or None for less than two steps.

    Args:
        spans: all spans of the run, or those since it was resumed.
        busy: each pool's busy share over all these steps, which is written next to its lane.
        step_ends_s: end of each learner step; the first step is start-up and is not drawn.
        first_step: the number of the first of these steps, above 1 in a resumed run.
        there: [pool] the intervals while it was there. A pool without an entry was there all the time.
    """
    if len(step_ends_s) < 2 or not step_ends_s[-1] > step_ends_s[0]:
        return None
    from matplotlib.figure import Figure  # without pyplot, whose backend and figures are those of the user's process
    from matplotlib.patches import Patch

    pools = sorted(busy)
    first = max(0, (len(step_ends_s) - 1 - STEPS_SHOWN) // 2)
    last = min(first + STEPS_SHOWN, len(step_ends_s) - 1)
    start_s, end_s = step_ends_s[first], step_ends_s[last]
    shown = [span for span in spans if span.start_s < end_s and span.end_s > start_s]
    figure = Figure(figsize=(11, 1.6 + 0.55 * len(pools)), layout="constrained")
    axes = figure.subplots()
    seen: set[State] = set()
    for row, pool in enumerate(pools):
        of_pool = [span for span in shown if span.pool == pool]
        windows = within((there or {}).get(pool), start_s, end_s)
        for state, from_s, to_s in (each for window in windows for each in state_changes(of_pool, *window)):
            seen.add(state)
            axes.barh(row, to_s - from_s, left=from_s - start_s, height=0.8, color=STATE_COLORS[state], linewidth=0)
        axes.annotate(
            f"{busy[pool]:.0%} busy", (1.01, row), xycoords=axes.get_yaxis_transform(), va="center",
            annotation_clip=False,
        )
    for step_end_s in step_ends_s[first : last + 1]:
        axes.axvline(step_end_s - start_s, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(pools)), pools)
    axes.invert_yaxis()
    axes.set_xlim(0, end_s - start_s)
    axes.set_xlabel(_x_label(first_step + first + 1, first_step + last, is_resumed=first_step > 1))
    axes.spines[["top", "right", "left"]].set_visible(False)
    order = [state for state in STATES if state in seen]
    figure.legend(
        handles=[Patch(color=STATE_COLORS[state], label=state.replace("_", " ")) for state in order],
        loc="outside upper center", ncols=len(STATES), frameon=False,
    )
    figure.savefig(path, dpi=130)
    return Path(path)


def _x_label(first: int, last: int, is_resumed: bool) -> str:
    """Return the label with the first and the last step of a plot, and the steps covered by the busy shares."""
    of_shares = "all steps since the resume" if is_resumed else "whole run"
    return f"seconds; learner steps {first} to {last}, ends dotted (busy shares: {of_shares})"
