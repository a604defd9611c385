"""Reads from a run's journal how long its episodes of several turns sampled and used tools, and under which load."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rl.errors import AsyncRLError
from benchmarks.simulated_rollout import EpisodeTimes, GroupTimes
from buffer.journal.journal import FILE_NAME, check_schema

Numbers = npt.NDArray[np.float64]
MAX_GROUPS = 2000
"""If a run has more groups, those that are simulated are spread evenly over it."""
LEAST_S = 1e-6
LEAST_SPREAD = 0.01
"""If the speeds of the episodes on a full engine differ less, by standard deviation over mean, then the load was the
same all the time. Its effect can't be measured, and the engine counts as full, as with questions (workload_of)."""
LOAD_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""These values are tried for the time that each further group adds to sampling, as a share of the time that a group
takes alone: 0 if the engine has room, 1 if it is full."""
FITTED_GROUPS = 1000
"""The value is chosen by so many groups at the begin of the run, where the load varies most."""
ROUNDS = 8
"""After so many rounds an episode's time of sampling in a replay differs from the measured one by a percent on average
if the engine has much room, and by six if it is full."""
_QUERY = """
SELECT group_id, granted_s, groups.duration_s, turns, generate_s, episodes.duration_s,
    (SELECT SUM(response_tokens) FROM rollouts WHERE rollouts.group_id = episodes.group_id AND
        rollouts.episode = episodes.episode)
FROM episodes JOIN groups USING (group_id) ORDER BY group_id
"""


@dataclass(frozen=True, slots=True)
class MeasuredEpisodes:
    """The episodes of several turns of one run."""

    groups: tuple[GroupTimes, ...]
    """The groups in the order of their grants, with the time in which each episode would have been sampled if its group
    had been alone."""
    alone_s: float
    """The mean of that time."""
    load_s: float
    """The time that each further group that samples adds to `alone_s`: 0 if the engine has room, alone_s if it is full.
    It is fitted to the run's groups, of which some sampled under more load than others."""


def measure_episodes(run_dir: Path) -> MeasuredEpisodes | None:
    """Return the episodes in a run's journal as `_measure` does, once for each state of its files."""
    file = run_dir / FILE_NAME
    written = (path.stat().st_mtime_ns for path in (file, file.with_name(f"{file.name}-wal")) if path.exists())
    return _measure(file, tuple(written))


@lru_cache(maxsize=64)
def _measure(file: Path, written: tuple[int, ...]) -> MeasuredEpisodes | None:
    """Return the episodes in a run's journal.

    None: it is a run of questions and answers, or it has no journal that this version can read. Groups that were
    dropped while they ran are not in the journal. After a resume on a machine that was started anew since, the clocks
    of the two parts differ, so that groups may seem to overlap that did not.

    Args:
        written: the times at which the journal's files were written.
    """
    rows = _read(file)
    if not rows:
        return None
    group_ids, granted_s, group_s, turns, sampled_s, duration_s, tokens = np.array(rows, float).T
    _, firsts, sizes = np.unique(group_ids, return_index=True, return_counts=True)
    duration_s = np.maximum(duration_s, LEAST_S)
    sampled_s = np.clip(sampled_s, LEAST_S, duration_s)
    shares, turns = 1 / np.repeat(sizes, sizes), np.maximum(1, turns.astype(int))
    played = _Played(granted_s - granted_s.min(), turns, sampled_s, duration_s - sampled_s, shares)
    load_share = _load_share(played, np.maximum(1.0, tokens), firsts)
    alone_s = played.alone_s(load_share)
    rest_s = group_s[firsts] - np.maximum.reduceat(duration_s, firsts)
    times = list(map(EpisodeTimes, played.turns.tolist(), alone_s.tolist(), played.tools_s.tolist()))
    groups = [
        GroupTimes(tuple(times[first : first + size]), max(0.0, rest))
        for first, size, rest in zip(firsts.tolist(), sizes.tolist(), rest_s.tolist(), strict=True)
    ]
    every = math.ceil(len(groups) / MAX_GROUPS)
    return MeasuredEpisodes(tuple(groups[::every]), float(alone_s.mean()), float(alone_s.mean()) * load_share)


class _WorkClock:
    """The engine's work clock over real time: the more groups sample at a time, the slower it is.

    Args:
        begins_s, ends_s: the sampling of each turn.
        shares: the part of a group that each turn's episode is.
        load_share: the time that each further group adds, as a share of the time that a group takes alone.
    """

    def __init__(self, begins_s: Numbers, ends_s: Numbers, shares: Numbers, load_share: float) -> None:
        times = np.concatenate([begins_s, ends_s])
        order = np.argsort(times, kind="stable")
        load = np.maximum(1.0, np.cumsum(np.concatenate([shares, -shares])[order]))  # from each of `times` on
        self.times_s = np.append(times[order], times.max() + times.max() - times.min() + 1)  # it goes on after the end
        passed = np.diff(self.times_s) / (1 + load_share * (load - 1))
        self.work_s = np.concatenate([[0.0], np.cumsum(passed)])

    def end(self, begins_s: Numbers, work_s: Numbers) -> Numbers:
        """Return the times at which turns end that begin at `begins_s` and take `work_s` on this clock."""
        return np.interp(np.interp(begins_s, self.times_s, self.work_s) + work_s, self.work_s, self.times_s)


@dataclass(frozen=True, slots=True)
class _Played:
    """The episodes of a run: when they began, and how long they sampled in all of their turns and used tools between.

    All arrays have one element for each episode.
    """

    granted_s: Numbers
    turns: npt.NDArray[np.int64]
    sampled_s: Numbers
    tools_s: Numbers
    shares: Numbers
    """The part of its group that each episode is."""

    def alone_s(self, load_share: float) -> Numbers:
        """Return the time in which each episode would have been sampled if its group had been alone.

        It is the work with which a replay of the run takes the measured times of sampling. The turns of an episode
        have equal work, as in the simulator. Each round replays all turns by the work clock of the round before, sets
        right the work of the episodes that took too long or too short, and makes a new work clock of the turns.
        """
        work_s = self.sampled_s / self.turns
        episodes, begins_s, ends_s = self._replay(work_s, None)
        for _ in range(ROUNDS):
            clock = _WorkClock(begins_s, ends_s, self.shares[episodes], load_share)
            for _ in range(2):  # with one replay for each clock the rounds swing
                _, begins_s, ends_s = self._replay(work_s, clock)
                work_s = work_s * self.sampled_s / np.maximum(LEAST_S, np.bincount(episodes, ends_s - begins_s))
        return np.asarray(work_s * self.turns)

    def first(self, number: int) -> _Played:
        """Return the first `number` episodes."""
        return _Played(*(getattr(self, array.name)[:number] for array in fields(self)))

    def _replay(
        self, work_s: Numbers, clock: _WorkClock | None
    ) -> tuple[npt.NDArray[np.int64], Numbers, Numbers]:
        """Return (episode, begin, end) of the sampling of all turns, if each turn of an episode takes `work_s`.

        Args:
            clock: None: work takes as long in real time.
        """
        tools_s = self.tools_s / np.maximum(1, self.turns - 1)
        now_s, played = self.granted_s.copy(), []
        for number in range(self.turns.max()):
            episodes = np.flatnonzero(self.turns > number)
            begins_s = now_s[episodes]
            ends_s = clock.end(begins_s, work_s[episodes]) if clock else begins_s + work_s[episodes]
            now_s[episodes] = ends_s + tools_s[episodes]
            played.append((episodes, begins_s, ends_s))
        episodes, begins_s, ends_s = map(np.concatenate, zip(*played, strict=True))
        return episodes, begins_s, ends_s


def _load_share(played: _Played, tokens: Numbers, firsts: npt.NDArray[np.int64]) -> float:
    """Return the one of LOAD_SHARES with which the time of a token, without the load, differs least between groups."""
    firsts, num_episodes = firsts[:FITTED_GROUPS], np.append(firsts, len(tokens))[: FITTED_GROUPS + 1][-1]
    played, tokens = played.first(num_episodes), tokens[:num_episodes]
    speeds = played.alone_s(1.0) / played.sampled_s
    if speeds.std() <= LEAST_SPREAD * speeds.mean():
        return 1.0

    def unequal(load_share: float) -> float:
        alone_s = played.alone_s(load_share)
        group_s, group_tokens = np.add.reduceat(np.stack([alone_s, tokens]), firsts, axis=1)
        relative = group_s / group_tokens * group_tokens.sum() / group_s.sum()
        return float(np.average((relative - 1) ** 2, weights=group_tokens))

    return min(LOAD_SHARES, key=unequal)


def _read(file: Path) -> list[tuple[float, ...]]:
    has_log = file.with_name(f"{file.name}-wal").exists()  # else nobody writes: let SQLite create no file beside it
    uri = f"{file.absolute().as_uri()}?mode=ro" + ("" if has_log else "&immutable=1")
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            check_schema(database, file)
            rows: list[tuple[float, ...]] = database.execute(_QUERY).fetchall()
    except (sqlite3.Error, AsyncRLError):
        return []
    return rows
