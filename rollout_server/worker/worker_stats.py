"""The statistics and messages of one rollout worker.

    WorkerStats   its timeline, its status, and how long its groups take
    EpisodeLog    the metrics of its episodes, and the first error of each kind for the console
    FlatRewards   a warning about groups in which all answers get the same reward
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from async_rl.base.config import Config
from async_rl.base.telemetry.metrics import GROUPS, Metric
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Span, State, Timeline
from async_rl.base.types import Prompt
from rollout_server.episodes.episode import ENDS, End, Episode, episode_metrics

_log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 300
MIXED_WARNING_GROUPS = 256
"""A warning is given after this many groups in a row whose answers all have one reward, if it differs between groups.
"""
_KEPT_GROUPS = 16
"""The number of newest groups whose answers the warning describes."""
_TROUBLES: dict[End, str] = {"timeout": "ran out of time", "error": "ended with an error of the agent"}
"""For each end of an episode whose reward does not come from its last answer: a description."""


@dataclass(frozen=True, slots=True)
class _Wait:
    doing: str
    waits_on: str
    began_s: float
    """When the wait began, on the monotonic clock."""
    limit_s: float
    noun: str


class WorkerStats:
    """Counts the groups, evaluations and waits of one worker, for its timeline, its status and its metrics.

    The timeline is `busy` while a group is in flight, else `eval` while an evaluation runs, else `wait_weights`: a
    worker without a group waits for admission, which the next served weights open. For an evaluation server, `busy`
    means that an evaluation runs.
    """

    def __init__(self, pool: str) -> None:
        self._timeline = Timeline(pool)
        is_for_evaluations = pool.startswith("eval")
        self._evaluating: State = "busy" if is_for_evaluations else "eval"
        self._idle = ("a version to evaluate", "learner/0") if is_for_evaluations else ("admission", "buffer (learner)")
        """What an idle worker waits for, and the process that gives it."""
        self._span_start_s = time.monotonic()
        self._changed_s = self._span_start_s
        """The last time when `in_flight` rose from 0 or fell to 0."""
        self._waits: dict[int, _Wait] = {}
        """The waits that have not ended yet: for groups, for greedy answers and for answers to held-out prompts."""
        self._num_evaluations = 0
        self.about = ""
        """A description of the worker, which `status` adds to its report."""
        self.in_flight = 0
        """The number of groups that were granted and that the buffer has not yet acknowledged."""
        self._group_seconds = 0.0
        """The integral of in_flight over time until _counted_s."""
        self._counted_s = time.monotonic()
        self._finished: list[tuple[float, float]] = []
        """(seconds in flight, mean number of groups in flight meanwhile) of each group since the last drain."""
        self._began: dict[int, tuple[float, float]] = {}
        """For each group in flight, by id: the time when it began, and the value of _group_seconds then."""

    def begin_group(self, group_id: int) -> None:
        self._change_in_flight(+1)
        self._began[group_id] = self._counted_s, self._group_seconds

    def end_group(self, group_id: int) -> None:
        start_s, group_seconds = self._began.pop(group_id)
        self._change_in_flight(-1)
        seconds = max(self._counted_s - start_s, 1e-9)
        self._finished.append((seconds, (self._group_seconds - group_seconds) / seconds))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context during which an evaluation counts as running."""
        self._close_span()
        self._num_evaluations += 1
        try:
            yield
        finally:
            self._close_span()
            self._num_evaluations -= 1

    @contextlib.contextmanager
    def waiting(self, doing: str, waits_on: str, limit_s: float, noun: str = "requests") -> Iterator[None]:
        """A context during which `status` shows one more request as waiting.

        Args:
            doing, waits_on: what the request does and what it waits for.
            limit_s: the time limit shown to the watchdog, which declares a process dead if it waits much longer.
            noun: a plural noun for such requests.
        """
        wait = _Wait(doing, waits_on, time.monotonic(), limit_s, noun)
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    def status(self) -> Status:
        """Return the status for the watchdog: how many requests do what, and the wait that is closest to its limit."""
        now_s = time.monotonic()
        if not self._waits:
            doing, waits_on = f"waits for {self._idle[0]}", self._idle[1]
            if self.in_flight:
                doing, waits_on = f"prepares {self.in_flight} groups", ""
            return Status(
                doing=doing, waits_on=waits_on, since_s=self._changed_s, told_s=now_s, about=self.about,
                groups=self.in_flight,
            )  # fmt: skip
        first = min(self._waits.values(), key=lambda wait: wait.began_s + wait.limit_s)
        counts = Counter((wait.doing, wait.noun) for wait in self._waits.values())
        doing = ", ".join(f"{doing} {number} {noun}" for (doing, noun), number in sorted(counts.items()))
        return Status(
            doing=doing, waits_on=first.waits_on, since_s=first.began_s, told_s=now_s, limit_s=first.limit_s,
            about=self.about, groups=self.in_flight,
        )  # fmt: skip

    def drain_spans(self) -> tuple[Span, ...]:
        self._close_span()
        return self._timeline.drain()

    def drain_groups(self) -> list[Metric]:
        """Return metrics of the groups that have ended since the last call; [] if none has.

        They are three means: of the duration in seconds, of its square, and of the number of groups in flight. The
        simulator predicts utilisation from them.
        """
        finished, self._finished = self._finished, []
        if not finished:
            return []
        n = len(finished)
        return [
            Metric("rollout/group_s", sum(seconds for seconds, _ in finished) / n, weight=n, by=GROUPS),
            Metric("rollout/group_s_squared", sum(seconds**2 for seconds, _ in finished) / n, weight=n, by=GROUPS),
            Metric("rollout/concurrency", sum(concurrency for _, concurrency in finished) / n, weight=n, by=GROUPS),
        ]

    def _change_in_flight(self, change: int) -> None:
        if 0 in (self.in_flight, self.in_flight + change):
            self._close_span()
            self._changed_s = self._span_start_s
        now_s = time.monotonic()
        self._group_seconds += self.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s
        self.in_flight += change

    def _close_span(self) -> None:
        """Add the time since the last call to the timeline, as busy, eval or wait_weights."""
        now_s = time.monotonic()
        idle: State = self._evaluating if self._num_evaluations else "wait_weights"
        self._timeline.add("busy" if self.in_flight else idle, self._span_start_s, now_s)
        self._span_start_s = now_s


class EpisodeLog:
    """Collects the metrics of a worker's episodes, and the first error of each kind as a line for the console."""

    def __init__(self, worker: str, config: Config) -> None:
        self._worker = worker
        self._has_turns = config.task.has_turns
        self._max_rows = config.rollout.max_rows
        self._episodes: list[Mapping[str, float]] = []
        """The metrics of each episode of several turns since the last call of `drain_metrics`."""
        self._noted: set[str] = set()
        """The kinds of errors that have been noted."""
        self._notes: list[str] = []
        self.report_now = asyncio.Event()
        """Set for lines that must not come after the end of a run that they explain."""

    def add(self, episodes: Sequence[Episode], origin: str, *, are_trained: bool) -> None:
        """Record episodes: their errors as notes and, if they will be trained on, their metrics for the next report.

        Args:
            origin: a description of the data row that the episodes belong to.
            are_trained: False for held-out and greedy episodes, which would change the means of the others.
        """
        for episode in episodes:
            if self._has_turns and are_trained:
                ends = {f"end_{end}": float(episode.end == end) for end in ENDS}
                dropped_rows = max(0, len(episode.rows) - self._max_rows)
                self._episodes.append(episode.metrics | ends | {"dropped_rows": dropped_rows})
            if episode.error:
                self._note_error(episode, origin, is_trained=are_trained)

    def note(self, text: str) -> None:
        """Add a line for the console, and ask for a report now."""
        self._notes.append(f"{self._worker}: {text}")
        self.report_now.set()

    def note_once(self, kind: str, text: str) -> bool:
        """Add a line for the console to the next report, unless one of the same `kind` was added.

        Returns whether it did.
        """
        if kind in self._noted:
            return False
        self._noted.add(kind)
        self._notes.append(f"{self._worker}: {text}")
        return True

    def drain_metrics(self) -> list[Metric]:
        """Return the metrics of the episodes added since the last call."""
        episodes, self._episodes = self._episodes, []
        return list(episode_metrics(episodes))

    def drain_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _note_error(self, episode: Episode, origin: str, *, is_trained: bool) -> None:
        which = "an episode" if is_trained else "a held-out or greedy episode"
        said = f"{which} ended with `{episode.end}`: {episode.error} (on {origin})"
        rest = f"only counted, in episode/end_{episode.end}" if is_trained else "not shown"
        reward = " Its reward is 0." if episode.end == "error" else ""
        is_new = self.note_once(episode.error_kind, f"{said}.{reward} Further ones of this kind are {rest}")
        if is_new and episode.traceback:
            _log.warning("%s\n%s", said, episode.traceback)


class FlatRewards:
    """Warns about flat groups: many groups in a row whose answers all get the same reward.

    The buffer counts the flat groups, because it sees the groups of all workers. This class keeps the newest groups as
    examples.

    Args:
        limit: how many groups in a row with the same reward make `add` return the warning.
        has_answer: returns whether the reward can find an answer in a response, or None if that is not known.
        ends_after: the number of groups in a row with the same reward after which the run ends, if the buffer drops
            flat groups; 0: it does not drop them. If it does, `add` also warns of many flat groups with different
            rewards, because the learner waits for others in vain.
    """

    def __init__(
        self, limit: int, has_answer: Callable[[Prompt, str], bool | None], ends_after: int = 0
    ) -> None:
        self._limit = limit
        self._ends_after = ends_after
        self._mixed_limit = max(MIXED_WARNING_GROUPS, limit) if ends_after else math.inf
        """The next warning is given after this many groups in a row whose answers all have one reward. The number
        doubles with each warning, so that a task where few prompts have a difference gets few warnings."""
        self._has_answer = has_answer
        self._count = 0
        """The count of groups in a row with the same reward, as the buffer gave it last."""
        self._groups: deque[tuple[Prompt, Sequence[Episode]]] = deque(maxlen=_KEPT_GROUPS)
        self.has_only_errors = True
        """Whether all episodes so far have ended with an error of the agent: the code is more likely wrong than the
        model."""

    def add(self, prompt: Prompt, episodes: Sequence[Episode], counts: tuple[int, int]) -> str:
        """Keep a delivered group. Returns a warning if the buffer's count reaches a limit with this group, else "".

        Args:
            counts: how many flat groups came in a row, over all workers: (those with the same reward in all groups,
                for example only zeros; those with any rewards).
        """
        count, in_row = counts
        episodes = [episode for episode in episodes if episode.rows]
        self.has_only_errors &= all(episode.end == "error" for episode in episodes)
        self._groups.append((prompt, episodes))
        if len({episode.reward for episode in episodes}) > 1:
            return ""
        has_reached = self._count < self._limit <= count
        self._count = count
        if has_reached:
            return self._warning(episodes[0].reward)
        if count < in_row >= self._mixed_limit:
            self._mixed_limit = 2 * in_row
            return self._mixed_warning(in_row)
        return ""

    def _mixed_warning(self, in_row: int) -> str:
        flat = [{episode.reward for episode in episodes} for _, episodes in self._groups]
        newest = ", ".join(f"{reward:g}" for rewards in flat if len(rewards) == 1 for reward in rewards)
        return (
            f"{in_row} groups in a row had one reward for all of their answers, though not each the same, and were "
            f"dropped (algorithm.filter_zero_variance). The newest had {newest}. The learner waits for groups whose "
            "answers differ in reward: more do with a larger rollout.group_size, a higher rollout.temperature or "
            "another data set"
        )

    def _warning(self, reward: float) -> str:
        groups = [group for group in self._groups if all(episode.reward == reward for episode in group[1])]
        answers = [(prompt, episode) for prompt, group in groups[-self._limit :] for episode in group]
        cut = sum(episode.rows[-1].finish_reason == "length" for _, episode in answers)
        found = [self._has_answer(prompt, episode.answer) for prompt, episode in answers]
        parts = [f"{cut / len(answers):.0%} were cut off by a limit on tokens (rollout.max_response_tokens) or turns"]
        in_trouble = [episode for _, episode in answers if episode.end in _TROUBLES]
        for end, words in _TROUBLES.items():
            if number := sum(episode.end == end for episode in in_trouble):
                parts.append(f"{number / len(answers):.0%} {words} (episode/end_{end})")
        if None not in found:
            parts.append(f"in {found.count(False) / len(answers):.0%} the reward found no answer")
        if 2 * len(in_trouble) > len(answers):
            newest = f"The newest of those ended so: {in_trouble[-1].error}"
        else:
            answer = next(episode.answer for _, episode in reversed(answers) if episode.end not in _TROUBLES)
            newest = f"The newest one ends: {answer[-SHOWN_CHARACTERS:]!r}"
        goes_on = self._ends_after and not self.has_only_errors
        until = f" The run goes on, and ends after {self._ends_after} in a row." if goes_on else ""
        *others, last = parts
        told = f"{', '.join(others)}, and {last}" if others else last
        return (
            f"{self._limit} groups in a row had the same reward, {reward:g}, for every answer: they have nothing to "
            f"teach.{until} Of their last {len(answers)} answers {told}. {newest}"
        )
