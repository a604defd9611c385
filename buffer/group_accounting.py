"""The buffer's account: what became of every admitted group, and whether dropping is biased."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from buffer.store_rows import DROP_REASONS, DropReason, Row


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass(slots=True)
class OutcomeStats:
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

    def scalars(self) -> list[list[float]]:
        """[total, count] of each mean, for `restored`."""
        return [[mean.total, mean.count] for mean in (self.response_tokens, self.reward, self.duration_s)]

    @classmethod
    def restored(cls, scalars: Sequence[Sequence[float]]) -> OutcomeStats:
        return cls(*(Mean(total, int(count)) for total, count in scalars))


class GroupAccounting:
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
        self._fates: dict[DropReason | Literal["trained"], OutcomeStats] = {
            outcome: OutcomeStats() for outcome in ("trained", "late", "zero_variance", "future_version")
        }

    def drop(self, row: Row, reason: DropReason, now_s: float) -> None:
        self.dropped[reason] += 1
        if reason in self._fates:
            self._fates[reason].add(row, now_s)

    def train(self, row: Row) -> None:
        """One use of a group."""
        self.uses += 1
        if row.is_fresh:
            self.trained += 1
            self._fates["trained"].add(row, 0.0)

    def metrics(self) -> dict[str, float]:
        """Numbers of groups since the start; means of lengths and rewards by fate, to see what dropping favours."""
        values = {
            "buffer/admitted": float(self.admitted),
            "buffer/trained": float(self.trained),
            "buffer/uses": float(self.uses),
            "buffer/requeued": float(self.requeued),
            **{f"buffer/dropped_{reason}": float(self.dropped[reason]) for reason in DROP_REASONS},
        }
        for name, fates in self._fates.items():
            values |= fates.metrics("buffer/trained" if name == "trained" else f"buffer/dropped_{name}")
        return values

    def scalars(self) -> dict[str, Any]:
        """All of it but `last_failure`, as plain values, for `restore`."""
        return {
            "admitted": self.admitted, "trained": self.trained, "uses": self.uses, "num_requeued": self.requeued,
            "dropped": dict(self.dropped), "fates": {name: fates.scalars() for name, fates in self._fates.items()},
        }

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """What `scalars` said at one moment; other keys in it are passed over."""
        self.admitted, self.trained, self.uses = (scalars[key] for key in ("admitted", "trained", "uses"))
        self.requeued = scalars["num_requeued"]
        self.dropped = Counter({cast(DropReason, reason): n for reason, n in scalars["dropped"].items()})
        self._fates = {name: OutcomeStats.restored(scalars["fates"][name]) for name in self._fates}
