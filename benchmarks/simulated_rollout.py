"""Simulates a rollout pool: groups of episodes that sample replies at one shared engine and use tools in between.

The engine has a clock of its own, its work clock, which is slower the more episodes sample, and stands still while a
push pauses it. Tools, environments and rewards take real time, and nothing of the engine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EpisodeTimes:
    """The times of one episode, which are spread evenly over its turns."""

    turns: int
    generate_s: float
    """The time in which it samples replies, on the engine's work clock."""
    tools_s: float
    """The time that it spends with tools and its environment: after all turns but the last, or after the only one."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """The times of one rollout group. Its episodes begin together, and it ends `rest_s` after the last of them."""

    episodes: tuple[EpisodeTimes, ...]
    rest_s: float = 0.0

    @property
    def generate_s(self) -> float:
        """The sum over all episodes."""
        return sum(episode.generate_s for episode in self.episodes)

    @property
    def duration_s(self) -> float:
        """The time from its begin to its end if the work clock is never slower than real time."""
        return max(episode.generate_s + episode.tools_s for episode in self.episodes) + self.rest_s

    def scaled(self, factor: float) -> GroupTimes:
        """Return the group with `factor` times the time of sampling."""
        return GroupTimes(
            tuple(EpisodeTimes(e.turns, factor * e.generate_s, e.tools_s) for e in self.episodes), self.rest_s
        )


@dataclass(slots=True)
class RunningGroup:
    """A group in flight, or one that has ended."""

    group_id: int
    times: GroupTimes
    num_left: int
    """The number of its episodes that have not ended."""
    sampled: list[tuple[float, float]] = field(default_factory=list)
    """The begin and end of each turn's sampling, on the work clock."""

    @property
    def sampled_until(self) -> float:
        """The work clock when its last token was sampled."""
        return max(end for _, end in self.sampled)


@dataclass(slots=True)
class _Episode:
    group: RunningGroup
    turns_left: int
    turn_work_s: float
    turn_tools_s: float
    has_one_turn: bool


class RolloutPool:
    """All groups in flight, and the clocks.

    Args:
        pace: returns the real time of one second of the work clock, from the number of groups that sample: an episode
            counts as its share of a group.
        on_end: is called with each group that ends, and may start others.
    """

    def __init__(self, pace: Callable[[float], float], on_end: Callable[[RunningGroup], None]) -> None:
        self._pace = pace
        self._on_end = on_end
        self.now_s = 0.0
        self.work_s = 0.0
        self.busy_s = 0.0
        """The time in which a group is in flight and no push pauses the engine."""
        self.group_seconds = 0.0
        """The integral over time of the number of groups in flight."""
        self.num_groups = 0
        """The number of groups in flight."""
        self.num_ended = 0
        self.holds_turns = False
        """Whether no further turn may begin."""
        self._load = 0.0
        self._numbers = itertools.count()  # of events, so that equal times are served in order
        self._sampling: list[tuple[float, int, _Episode]] = []
        """Episodes that sample, by the end of their turn on the work clock."""
        self._elsewhere: list[tuple[float, int, _Episode]] = []
        """Episodes with their tools, and groups in their rest, by the end of it in real time."""
        self._held: list[_Episode] = []

    @property
    def is_sampling(self) -> bool:
        return bool(self._sampling)

    def start(self, group_id: int, times: GroupTimes) -> RunningGroup:
        group = RunningGroup(group_id, times, len(times.episodes))
        self.num_groups += 1
        for e in times.episodes:
            turn_tools_s = e.tools_s / max(1, e.turns - 1)
            self._sample(_Episode(group, e.turns, e.generate_s / e.turns, turn_tools_s, e.turns == 1))
        return group

    def stop(self, group_ids: Iterable[int]) -> None:
        """End these groups at once, without calling `on_end`."""
        stopped = set(group_ids)
        self.num_groups -= len(stopped)
        for heap in (self._sampling, self._elsewhere):
            heap[:] = [event for event in heap if event[2].group.group_id not in stopped]
            heapq.heapify(heap)
        self._held = [episode for episode in self._held if episode.group.group_id not in stopped]
        self._load = math.fsum(1 / len(event[2].group.times.episodes) for event in self._sampling)

    def release_turns(self) -> None:
        """Let turns begin again, first those that were held."""
        self.holds_turns = False
        held, self._held = self._held, []
        for episode in held:
            self._sample(episode)

    def advance(self, seconds: float | None, is_paused: bool = False) -> None:
        """Let `seconds` pass, in which the engine stands still if `is_paused`.

        None: until a group ends or, if turns are held back, until no episode samples.
        """
        left_s, before = math.inf if seconds is None else seconds, self.num_ended
        while True:
            pace = math.inf if is_paused else self._pace(self._load)
            sampled_s = (self._sampling[0][0] - self.work_s) * pace if self._sampling and not is_paused else math.inf
            elsewhere_s = self._elsewhere[0][0] - self.now_s if self._elsewhere else math.inf
            passed_s = min(left_s, sampled_s, elsewhere_s)
            assert passed_s < math.inf, "no group is in flight"
            self._pass(passed_s, pace, is_paused)
            left_s -= passed_s
            if passed_s == sampled_s:
                self._end_turn()
            elif passed_s == elsewhere_s:
                self._end_wait()
            elif seconds is not None:
                return
            if seconds is None and (self.num_ended > before or (self.holds_turns and not self._sampling)):
                return

    def _pass(self, seconds: float, pace: float, is_paused: bool) -> None:
        self.now_s += seconds
        self.work_s += seconds / pace
        self.group_seconds += seconds * self.num_groups
        if self.num_groups and not is_paused:
            self.busy_s += seconds

    def _sample(self, episode: _Episode) -> None:
        if self.holds_turns:
            self._held.append(episode)
            return
        end = self.work_s + episode.turn_work_s
        episode.group.sampled.append((self.work_s, end))
        heapq.heappush(self._sampling, (end, next(self._numbers), episode))
        self._load += 1 / len(episode.group.times.episodes)

    def _end_turn(self) -> None:
        """End the turn whose sampling ends first; its episode then waits for its tools, or goes on if it has none."""
        self.work_s, _, episode = heapq.heappop(self._sampling)
        self._load -= 1 / len(episode.group.times.episodes)
        episode.turns_left -= 1
        if episode.turn_tools_s and (episode.turns_left or episode.has_one_turn):
            self._wait(episode, episode.turn_tools_s)
        else:
            self._go_on(episode)

    def _end_wait(self) -> None:
        self.now_s, _, episode = heapq.heappop(self._elsewhere)
        if episode.group.num_left:
            self._go_on(episode)
        else:
            self._end_group(episode.group)

    def _go_on(self, episode: _Episode) -> None:
        """Let an episode begin its next turn; after its last one, and if it is the group's last, end the group."""
        group = episode.group
        if episode.turns_left:
            self._sample(episode)
            return
        group.num_left -= 1
        if group.num_left == 0 and group.times.rest_s:
            self._wait(episode, group.times.rest_s)
        elif group.num_left == 0:
            self._end_group(group)

    def _wait(self, episode: _Episode, seconds: float) -> None:
        heapq.heappush(self._elsewhere, (self.now_s + seconds, next(self._numbers), episode))

    def _end_group(self, group: RunningGroup) -> None:
        self.num_groups -= 1
        self.num_ended += 1
        self._on_end(group)
