"""Counts how many rollout groups ended in which way, and measures whether dropping some of them biases the data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.store_rows import DROP_REASONS, DropReason, Row

MEASURED_OUTCOMES = ("trained", "late", "zero_variance", "future_version")
"""The outcomes of a group for which means of length, reward and duration are kept."""

OutcomeStats = dict[str, list[float]]
"""[quantity: response_tokens, reward, duration_s] its total over the groups of one outcome, and their number."""


@dataclass(slots=True)
class GroupAccounting:
    """Counts groups since the start of the run: admitted = trained at least once + dropped + still in the store.

    A group whose prompt is requeued counts as dropped, and the prompt's next group counts as admitted.
    """

    admitted: int = 0
    trained: int = 0
    uses: int = 0
    requeued: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    outcome_stats: dict[str, OutcomeStats] = field(
        default_factory=lambda: {outcome: {} for outcome in MEASURED_OUTCOMES}
    )
    last_failure: str = ""

    def drop(self, row: Row, reason: DropReason, now_s: float) -> None:
        """Count a dropped group. Of a group that was still running only the duration up to `now_s` is measured."""
        self.dropped[reason] += 1
        self._measure(reason, row, now_s)

    def train(self, row: Row) -> None:
        """Count one use of a group in a batch."""
        self.uses += 1
        if row.is_fresh:
            self.trained += 1
            self._measure("trained", row, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return numbers of groups since the start, and means by outcome, which show what groups dropping favours."""
        values = {f"buffer/{name}": float(getattr(self, name)) for name in ("admitted", "trained", "uses", "requeued")}
        values |= {f"buffer/dropped_{reason}": float(self.dropped[reason]) for reason in DROP_REASONS}
        for outcome, stats in self.outcome_stats.items():
            prefix = "buffer/trained" if outcome == "trained" else f"buffer/dropped_{outcome}"
            values |= {f"{prefix}/{name}": total / number for name, (total, number) in stats.items()}
        return values

    def scalars(self) -> dict[str, Any]:
        """Return the accounting as plain values that JSON can hold."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stats = {outcome: dict(stats) for outcome, stats in self.outcome_stats.items()}
        return {**plain, "dropped": dict(self.dropped), "outcome_stats": stats}

    @classmethod
    def restored(cls, scalars: Mapping[str, Any]) -> GroupAccounting:
        """Return the accounting from which `scalars` were made."""
        stats = {outcome: dict(stats) for outcome, stats in scalars["outcome_stats"].items()}
        return cls(**{**scalars, "dropped": Counter(scalars["dropped"]), "outcome_stats": stats})

    def _measure(self, outcome: str, row: Row, now_s: float) -> None:
        stats = self.outcome_stats.get(outcome)
        if stats is None:
            return
        measured = {"duration_s": now_s - row.granted_s}
        if row.outcome:
            measured = {name: getattr(row.outcome, name) for name in ("response_tokens", "reward", "duration_s")}
        for name, value in measured.items():
            total, number = stats.get(name, (0.0, 0))
            stats[name] = [total + value, number + 1]
