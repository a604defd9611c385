"""Plots a run's learning curve, staleness and utilisation from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.base.telemetry.figures import kind_of
from async_rl.base.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
"""Okabe-Ito colours, which people with a colour vision deficiency can also distinguish."""

Series = tuple[list[float], list[float], list[float]]
"""The steps of a metric, its values at these steps, and their weights in a mean over steps."""

Records = list[dict[str, float | None]]


def plot_learning_curve(run_dir: str | Path) -> Path | None:
    """Write `run_dir/learning_curve.png`; returns its path, or None if neither reward nor accuracy was measured.

    The panels show, over the step: reward and held-out accuracy; staleness; utilisation of learner and rollout.
    """
    from matplotlib.figure import Figure  # without pyplot, whose backend and figures are those of the user's process

    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    reward, accuracy = _series(records, "reward/mean"), _series(records, "eval/accuracy")
    if not reward[0] and not accuracy[0]:
        return None
    figure = Figure(figsize=(8, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    span = 1 if len(reward[0]) < 20 else len(reward[0]) // 12
    figure.suptitle(plain(run_dir.name) + (f"   (bold: average of about {span} steps)" if span > 1 else ""))
    _draw_reward(top, reward, accuracy, span)
    _draw_staleness(middle, records, span)
    _draw_utilisation(bottom, records, span)
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
    """Return a text of the user for a plot; two dollar signs would else be the marks of mathematics."""
    return text.replace("$", r"\$")


def smooth(values: Sequence[float], weights: Sequence[float], span: int) -> list[float]:
    """Return the exponential moving average of weight 2 / (span + 1) on the newest value, corrected for start bias.

    Args:
        weights: what each value counts, e.g. the time of its step; at least 0.
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
    axes.plot(*accuracy[:2], color=ORANGE, marker="o", linestyle="--", linewidth=1, label="held-out accuracy")
    points = list(zip(*accuracy[:2], strict=True))
    for step, value in dict.fromkeys(points[:1] + points[-1:]):
        axes.annotate(
            f"{value:.2f}", (step, value), xytext=(0, -18), textcoords="offset points", ha="center", color=ORANGE,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    axes.margins(y=0.12)
    axes.set_ylabel("reward, accuracy")


def _draw_staleness(axes: Axes, records: Records, span: int) -> None:
    maximum, mean = _series(records, "staleness/max"), _series(records, "staleness/mean")
    axes.plot(*maximum[:2], color=ORANGE, linestyle="none", marker="o", markersize=3, zorder=3, label="max")
    _draw_line(axes, mean, span, BLUE, "-", "mean over episodes")
    axes.set_ylabel("staleness, versions")
    axes.set_ylim(bottom=-0.1, top=max([1.0, *maximum[1], *mean[1]]) * 1.15)


def _draw_utilisation(axes: Axes, records: Records, span: int) -> None:
    for pool, color, style in (("learner", BLUE, "-"), ("rollout", GREEN, "--")):
        _draw_line(axes, _series(records, f"utilisation/{pool}"), span, color, style, pool)
    axes.set_ylabel("utilisation, share of time")
    axes.set_ylim(-0.03, 1.03)


def _draw_line(axes: Axes, series: Series, span: int, color: str, style: str, label: str) -> None:
    """Draw the values of a series in a pale colour, and over them their moving average in bold."""
    steps, values, weights = series
    if span > 1:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values, weights, span), color=color, linestyle=style, linewidth=2, label=label)


def _series(records: Records, key: str) -> Series:
    measured = [(record, value) for record in records if (value := record.get(key)) is not None]
    weights = [record.get(kind_of(key).weight) or 0.0 for record, _ in measured]
    if not any(weights):
        weights = [1.0] * len(measured)
    return [record["step"] or 0.0 for record, _ in measured], [value for _, value in measured], weights

