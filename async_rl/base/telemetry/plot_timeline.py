"""Plots the timeline of a run, with one lane for each pool and one colour for each state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from async_rl.base.telemetry.timeline import STATES, Span, State, state_changes

STATE_COLORS: dict[State, str] = {
    "busy": "#0072B2", "wait_data": "#E69F00", "wait_weights": "#F0E442", "sync": "#CC79A7", "eval": "#009E73",
    "checkpoint": "#56B4E9", "other": "#999999",
}  # fmt: skip
"""Okabe-Ito colours, which people with a colour vision deficiency can also distinguish."""

STEPS_SHOWN = 10


def plot_timeline(
    spans: Iterable[Span], busy: Mapping[str, float], step_ends_s: Sequence[float], path: str | Path,
    first_step: int = 1,
) -> Path | None:
    """Plot the middle STEPS_SHOWN learner steps to the image `path`; returns it, or None for less than two steps.

    Args:
        spans: all spans of the run, or those since it was resumed.
        busy: [pool] busy share over all these steps, which is written beside the pool's lane.
        step_ends_s: end of each learner step; the first step is start-up and is not drawn.
        first_step: the number of the first of these steps, above 1 in a resumed run.
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
        for state, from_s, to_s in state_changes([s for s in shown if s.pool == pool], start_s, end_s):
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
    """Return the label that names the first and the last step of a plot, and the steps of the busy shares beside it."""
    of_shares = "all steps since the resume" if is_resumed else "whole run"
    return f"seconds; learner steps {first} to {last}, ends dotted (busy shares: {of_shares})"
