"""The report that a weight push returns, and the tolerance with which its result is verified."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.telemetry.timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The result of one weight push: its times, bytes and lost servers on rank 0; other ranks get zeros."""

    seconds: float = 0.0
    """Time from the first gather to the moment at which every server generates again."""
    pause_s: float = 0.0
    """Time for which the servers were paused."""
    num_bytes: int = 0
    spans: tuple[Span, ...] = ()
    """The pause as a span of state `sync` for each server's pool."""
    lost: tuple[str, ...] = ()
    """Servers that died and were removed. If there are any, the push has failed: repeat it on every rank."""
    cause: str = ""
    """The error with which the push failed, if servers were lost or `repeats` is set."""
    repeats: bool = False
    """Repeat the push on every rank. A server could not use a sparse push and gets whole weights now, or it did not
    answer before the push and answers again, or the push broke although every server answers."""
    num_repeats: int = 0
    """How often the push was repeated before it succeeded, with the same servers."""
    changed_share: float = 1.0
    """The share of the values that a sparse push found changed; 1: whole weights or adapters were pushed."""

    @property
    def has_failed(self) -> bool:
        """Whether the push must be repeated, on every rank."""
        return bool(self.lost) or self.repeats


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed absolute difference between logprobs of server and learner at equal weights: its mean and largest."""

    mean: float
    largest: float
