"""An episode: its limits, how it ends, and what is left of it. Environments and agents play through `Attempt`.

Whatever their code does (raise, hang, leave tasks behind), its episode ends and the fault is counted.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from async_rl.base.errors import shown
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.types import EpisodeEnd
from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.conversation.rows import WholeRow
from rollout_server.episodes.conversation.session import CLOSE_S as SESSION_CLOSE_S
from rollout_server.episodes.conversation.session import EpisodeOver, Session
from rollout_server.episodes.tools.tool import ToolCounts
from rollout_server.episodes.user_code.faults import Fault
from rollout_server.episodes.user_code.time_limits import CANCEL_S, ForeignCode, OverdueError

CLOSE_S = 10.0
"""The time limit of an environment's `close`."""
MAX_ATTEMPTS = 2
"""How often an episode is played if its environment or agent fails, each time with a fresh session."""

END_S = SESSION_CLOSE_S + CLOSE_S + 4 * CANCEL_S
"""How long an attempt may take to end after its time limit: the waits of `Attempt.run` for all that it cancels and
closes.
"""

End = Literal[EpisodeEnd, "failed"]
ENDS: tuple[End, ...] = get_args(End)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The time limits of an episode, and the reward of an episode that exceeds its own."""

    tool_s: float
    """The time limit of one tool call."""
    turn_s: float
    """The time limit of one call of the environment; for an agent, of the time between a reply and its next request."""
    episode_s: float
    """The time limit of the whole episode."""
    on_timeout: Literal["zero", "partial", "drop"] = "zero"
    """The reward of an episode that ran out of time. zero: 0. partial: the reward of its turns. drop: it is dropped."""

    @property
    def longest_s(self) -> float:
        """The time after which an episode has surely ended, all its attempts included."""
        return MAX_ATTEMPTS * (self.episode_s + END_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that has ended: its trainable rows, the model's last reply, the way it ended, and its metrics."""

    rows: tuple[WholeRow, ...]
    """Its trainable rows; empty if it failed, is dropped, or sampled no reply."""
    answer: str
    """The content of the model's last reply."""
    end: End
    """done: the environment ended it, or it answers a question. length, turns: no room, or no turn was left. timeout:
    see `error`. error: the agent raised because of what the model replied, and the reward is 0. failed: the environment
    or the agent failed, and the episode has no rows."""
    error: str = ""
    """The reason for the end, in a sentence; empty if the episode is done."""
    error_kind: str = ""
    """Equal for errors of one class that were raised in one place, whatever their texts say."""
    traceback: str = ""
    """The traceback of what the environment or the agent raised."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics with keys of `EPISODE_METRICS`, and the environment's as `env/<name>`. A question has none."""
    messages: tuple[Message, ...] = ()
    """The conversation as the model saw it last, and its last reply."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The scores by the names of the rewards, and their metrics; `env`: what the environment or the agent gave."""
    has_verdict: bool = True
    """False: a reward gave no verdict on it, so that it has no rows."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        return sum(reward for row in self.rows for reward in row.turn_rewards)

    def with_reward(self, reward: float, rewards: Mapping[str, float] = MappingProxyType({})) -> Episode:
        """Return the episode with a reward added to its last turn, and with the `rewards` that it is made of."""
        *rows, last = self.rows
        *earlier, last_reward = last.turn_rewards
        last = replace(last, turn_rewards=(*earlier, last_reward + reward))
        return replace(self, rows=(*rows, last), rewards={**self.rewards, **rewards})


EPISODE_METRICS = (
    "turns", "tool_calls", "failed_tool_calls", "tool_s", "generate_s", "duration_s", "sampled_tokens",
    "observed_tokens", "timeouts", "failed", "rewritten", "leaked_tasks", "given_up_calls",
)  # fmt: skip
"""The metrics that every episode with turns has. `timeouts` counts overdue calls and an overdue episode, `failed`
attempts."""

_SUMMED = ("timeouts", "failed", "rewritten", "leaked_tasks", "given_up_calls", "dropped_rows")
"""The metrics that count something rare: the log has their sum over a step, and the mean of the others."""


def episode_metrics(episodes: Sequence[Mapping[str, float]]) -> Iterator[Metric]:
    """Yield the metrics `episode/<name>` of all `episodes`, each given as its own metrics: a sum for rare counts,
    else the mean. `episode/ended` is their number, the weight of the means over several steps.
    """
    if episodes:
        yield Metric("episode/ended", len(episodes), "sum")
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.items():
            values.setdefault(name, []).append(value)
    for name, found in values.items():
        if name in _SUMMED:
            yield Metric(f"episode/{name}", sum(found), "sum")
        else:
            yield Metric(f"episode/{name}", sum(found) / len(found), weight=len(found))


class EpisodeFailedError(Exception):
    """An environment or an agent raised, or returned something wrong. The message says what and where.

    The episode ends as `failed`, and is played once more.

    Args:
        fault: the exception that it raised.
    """

    end: End = "failed"

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class ModelAtFaultError(EpisodeFailedError):
    """An agent raised because of what the model replied. The episode ends as `error`: with its rows, and reward 0."""

    end: End = "error"


def finite(value: Any, what: str) -> float:
    """Return a reward or a metric as a float.

    Raises:
        EpisodeFailedError: `value` is no finite number; the message names it by `what`.
    """
    try:
        number = float(value)
    except OverflowError:
        raise EpisodeFailedError(f"{what} must be a finite number, got one beyond the range of a float") from None
    except Exception:  # float runs the code of the value's class
        raise EpisodeFailedError(f"{what} must be a number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise EpisodeFailedError(f"{what} must be a finite number, got {number}")
    return number


async def first_success(attempt: Callable[[], Awaitable[Episode]]) -> Episode:
    """Play an episode, and once more if its environment or agent fails; return the last attempt."""
    num_failed = 0
    while True:
        episode = await attempt()
        num_failed += episode.end == "failed"
        if episode.end != "failed" or num_failed == MAX_ATTEMPTS:
            return replace(episode, metrics={**episode.metrics, "failed": num_failed})


class Attempt(ABC):
    """One attempt to play an episode, with an environment or an agent, which a subclass has `play` and `close` for.

    Args:
        session: a fresh one. The attempt closes it.
    """

    def __init__(self, limits: EpisodeLimits, session: Session) -> None:
        self.limits = limits
        self.session = session
        self.foreign = ForeignCode()
        """Runs the code of the environment, its tools or the agent."""
        self.metrics: dict[str, float] = {}
        """The metrics of the environment."""
        self.tool_counts = ToolCounts()

    @abstractmethod
    async def play(self) -> None:
        """Play the episode; return when it is done.

        Raises:
            EpisodeOver, OverdueError, EpisodeFailedError, ModelAtFaultError: something else has ended it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the environment, or end the agent's session. It is called in any case, with a time limit."""

    async def run(self) -> Episode:
        """Play within the time limit of the episode, close the session and the rest, and return the episode.

        Raises:
            AsyncRLError: the engine failed.
        """
        began_s = asyncio.get_running_loop().time()
        end: End = "done"
        error: tuple[str, str, str] | None = None
        try:
            async with asyncio.timeout(self.limits.episode_s) as limit:
                await self.play()
        except EpisodeOver as over:
            end = "failed" if over.reason == "ended" else over.reason
            error = _described(over)
        except TimeoutError as overdue:
            if not (limit.expired() or isinstance(overdue, OverdueError)):
                raise
            end = "timeout"
            error = _described(
                overdue, f"the episode took longer than {self.limits.episode_s:g} s (timeouts.episode_s)"
            )
        except EpisodeFailedError as failed:
            end, error = failed.end, _described(failed)
        finally:
            num_leaked, close_error = await self._close()
        duration_s = asyncio.get_running_loop().time() - began_s
        said, kind, lines = error or close_error
        return Episode(
            rows=self._rows(end), answer=self.session.last_answer, end=end, error=said, error_kind=f"{end} {kind}",
            traceback=lines, messages=self.session.last_messages,
            metrics={
                **self._metrics(duration_s, num_leaked, end),
                **{f"env/{name}": value for name, value in self.metrics.items()},
            },
        )  # fmt: skip

    async def _close(self) -> tuple[int, tuple[str, str, str]]:
        """Close the session and the environment. Return (number of tasks left behind, the error of `close`)."""
        error = ("", "", "")
        await self.session.close()
        await self.foreign.end_cancelled_calls()
        try:
            await self.foreign.call(self.close, CLOSE_S, "the environment's close")
        except Exception as raised:
            fault = Fault.of(raised)
            error = _described(EpisodeFailedError(f"the environment's close raised {fault}", fault))
        return await self.foreign.end_created_tasks(), error

    def _rows(self, end: End) -> tuple[WholeRow, ...]:
        rows = self.session.rows()
        if not rows or end == "failed" or (end == "timeout" and self.limits.on_timeout == "drop"):
            return ()
        if end == "error" or (end == "timeout" and self.limits.on_timeout == "zero"):
            rows = [replace(row, turn_rewards=(0.0,) * len(row.turn_rewards)) for row in rows]
        if end not in ("done", "error"):
            rows[-1] = replace(rows[-1], finish_reason="timeout" if end == "timeout" else "length")
        return tuple(rows)

    def _metrics(self, duration_s: float, num_leaked: int, end: End) -> dict[str, float]:
        session, tools = self.session, self.tool_counts
        values = (
            session.num_turns, tools.calls, tools.failed, tools.tool_s, session.generate_s, duration_s,
            session.num_sampled_tokens, session.num_observed_tokens, tools.timeouts + (end == "timeout"), 0,
            session.counts.rewritten, num_leaked, self.foreign.num_given_up,
        )  # fmt: skip
        return dict(zip(EPISODE_METRICS, values, strict=True))


def _described(error: Exception, default: str = "") -> tuple[str, str, str]:
    """Return (what an error says or `default`, its kind, the traceback of the user's code that raised it or "").

    The kind holds the places in this package that it came through, and class and place of what the user's code raised.
    """
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    fault = error.fault if isinstance(error, EpisodeFailedError) else None
    if fault is None:
        return str(error) or default, " ".join(places), ""
    return str(error), f"{' '.join(places)} {fault.name} {fault.at}", fault.traceback
