"""The buffer's account: what became of every admitted group, and whether dropping is biased."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from buffer.store_rows import DROP_REASONS, DropReason, Row


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass(slots=True)
class Fates:
    """Lengths and rewards of the groups that met one fate, over the whole run."""

    response_tokens: Mean = field(default_factory=Mean)
    reward: Mean = field(default_factory=Mean)
    duration_s: Mean = field(default_factory=Mean)

    def add(self, row: Row, now_s: float) -> None:
        """A group that was still running has neither length nor reward, only the time it had had."""
        if row.outcome is None:
            self.duration_s.add(now_s - row.granted_s)
            return
        self.response_tokens.add(row.outcome.response_tokens)
        self.reward.add(row.outcome.reward)
        self.duration_s.add(row.outcome.duration_s)

    def metrics(self, prefix: str) -> dict[str, float]:
        means = {"response_tokens": self.response_tokens, "reward": self.reward, "duration_s": self.duration_s}
        return {f"{prefix}/{name}": mean.total / mean.count for name, mean in means.items() if mean.count}


class Account:
    """Counts since the start of the run: admitted = trained at least once + dropped + what the store still has.

    A requeued prompt's group is among the dropped; its next group is admitted anew.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.trained = 0
        self.uses = 0
        self.requeued = 0
        self.dropped: Counter[DropReason] = Counter()
        self.last_failure = ""
        self._trained_fates = Fates()
        self._dropped_fates: dict[DropReason, Fates] = {
            "late": Fates(), "zero_variance": Fates(), "future_version": Fates(),
        }

    def drop(self, row: Row, reason: DropReason, now_s: float) -> None:
        self.dropped[reason] += 1
        if reason in self._dropped_fates:
            self._dropped_fates[reason].add(row, now_s)

    def train(self, row: Row) -> None:
        """One use of a group."""
        self.uses += 1
        if row.is_fresh:
            self.trained += 1
            self._trained_fates.add(row, 0.0)

    def metrics(self) -> dict[str, float]:
        """Numbers of groups since the start; means of lengths and rewards by fate, to see what dropping favours."""
        values = {
            "buffer/admitted": float(self.admitted),
            "buffer/trained": float(self.trained),
            "buffer/uses": float(self.uses),
            "buffer/requeued": float(self.requeued),
            **{f"buffer/dropped_{reason}": float(self.dropped[reason]) for reason in DROP_REASONS},
            **self._trained_fates.metrics("buffer/trained"),
        }
        for reason, fates in self._dropped_fates.items():
            values |= fates.metrics(f"buffer/dropped_{reason}")
        return values
