"""Formats the summary of a run as the table that is printed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def format_summary(summary: Mapping[str, Any]) -> str:
    """Return the `summary` of a run as a table in text, with a line for each value that was measured, and the alarms.
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
    return f"\n{table}{alarms}{_next_commands(summary)}"


def _next_commands(summary: Mapping[str, Any]) -> str:
    """Return the lines that say where the trained model is and what to do with it; none without a run directory."""
    if not (folder := summary.get("run_dir")):
        return ""
    return f"\nThe model is in {folder}/model. Next:\n  async-rl eval {folder}/model\n  async-rl view {folder}\n"
