"""Reads from a run's journal how long its episodes of several turns sampled and used tools, and under which load."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass
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
"""If the loads of the groups differ less, by standard deviation over mean, the engine counts as one with room."""
LOAD_SHARES = np.linspace(0.0, 1.0, 101).tolist()
"""These values are tried for the time that each further group adds to sampling, as a share of the time that a group
takes alone: 0 if the engine has room, 1 if it is full."""
_QUERY = """
SELECT group_id, granted_s, groups.duration_s, turns, generate_s, episodes.duration_s,
    (SELECT SUM(response_tokens) FROM rollouts WHERE rollouts.group_id = episodes.group_id AND
        rollouts.episode = episodes.episode)
FROM episodes JOIN groups USING (group_id)
WHERE group_id NOT IN (SELECT group_id FROM uses WHERE version = 0) ORDER BY group_id
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
    """Return the episodes in a run's journal, without those of the first batch, which waited for the start.

    None: it is a run of questions and answers, or it has no journal that this version can read. Groups that were
    dropped while they ran are not in the journal.
    """
    rows = _read(run_dir / FILE_NAME)
    if not rows:
        return None
    group_ids, granted_s, group_s, turns, sampled_s, duration_s, tokens = np.array(rows, float).T
    _, firsts, sizes = np.unique(group_ids, return_index=True, return_counts=True)
    duration_s = np.maximum(duration_s, LEAST_S)
    sampled_s = np.clip(sampled_s, LEAST_S, duration_s)
    speed = _Speeds(granted_s, duration_s, sampled_s / duration_s / np.repeat(sizes, sizes))
    load_share = _load_share(speed, sampled_s, tokens, firsts)
    alone_s = sampled_s * speed(load_share)
    rest_s = group_s[firsts] - np.maximum.reduceat(duration_s, firsts)
    times = list(map(EpisodeTimes, turns.astype(int).tolist(), alone_s.tolist(), (duration_s - sampled_s).tolist()))
    groups = [
        GroupTimes(tuple(times[first : first + size]), max(0.0, rest))
        for first, size, rest in zip(firsts.tolist(), sizes.tolist(), rest_s.tolist(), strict=True)
    ]
    every = math.ceil(len(groups) / MAX_GROUPS)
    return MeasuredEpisodes(tuple(groups[::every]), float(alone_s.mean()), float(alone_s.mean()) * load_share)


class _Speeds:
    """Computes how fast episodes were sampled under the load there was, against groups that are alone.

    The mean is over the speeds at all times of an episode, not over the loads: an episode that samples most of its time
    beside many others, and then alone, is sampled mostly while it is alone.

    Args:
        shares: the part of a group that the episode's sampling is, averaged over its time.
    """

    def __init__(self, granted_s: Numbers, duration_s: Numbers, shares: Numbers) -> None:
        self._begins, self._ends = granted_s, granted_s + duration_s
        times = np.concatenate([self._begins, self._ends])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._load = np.maximum(1.0, np.cumsum(np.concatenate([shares, -shares])[order]))

    def __call__(self, load_share: float) -> Numbers:
        """Return each episode's mean speed: 1 at no load; each further group adds `load_share` to the time taken."""
        speeds = 1 / (1 + load_share * (self._load - 1))
        integral = np.concatenate([[0.0], np.cumsum(speeds[:-1] * np.diff(self._times))])
        passed = np.interp(self._ends, self._times, integral) - np.interp(self._begins, self._times, integral)
        return np.asarray(passed / (self._ends - self._begins))


def _load_share(speed: _Speeds, sampled_s: Numbers, tokens: Numbers, firsts: npt.NDArray[np.int64]) -> float:
    """Return the one of LOAD_SHARES with which the time of a token, without the load, differs least between groups."""
    speeds = speed(1.0)
    if speeds.std() <= LEAST_SPREAD * speeds.mean():
        return 0.0

    def unequal(load_share: float) -> float:
        group_s, group_tokens = np.add.reduceat(np.stack([sampled_s * speed(load_share), tokens]), firsts, axis=1)
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
