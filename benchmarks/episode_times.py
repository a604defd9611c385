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
"""If the loads of the groups differ less, by standard deviation over mean, no line is fitted to them."""
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
    load = _loads(granted_s, duration_s, sampled_s / duration_s / np.repeat(sizes, sizes))

    # The longer a reply, the longer it takes: the line is fitted to the time of a token.
    of_group = np.add.reduceat(np.stack([sampled_s, load * sampled_s, tokens]), firsts, axis=1)
    group_load, token_s = of_group[1] / of_group[0], of_group[0] / of_group[2]
    mean_load = float(np.average(load, weights=sampled_s))
    full = float(token_s @ of_group[2] / of_group[2].sum()) / mean_load  # the steepest line: 0 at no load
    slope = 0.0
    if group_load.std() > LEAST_SPREAD * mean_load:
        slope = float(np.clip(np.polyfit(group_load, token_s, 1, w=np.sqrt(of_group[2]))[0], 0.0, full))
    alone = (full - slope) * mean_load + slope
    alone_s = sampled_s * alone / ((full - slope) * mean_load + slope * np.maximum(1.0, load))

    rest_s = group_s[firsts] - np.maximum.reduceat(duration_s, firsts)
    times = list(map(EpisodeTimes, turns.astype(int).tolist(), alone_s.tolist(), (duration_s - sampled_s).tolist()))
    groups = [
        GroupTimes(tuple(times[first : first + size]), max(0.0, rest))
        for first, size, rest in zip(firsts.tolist(), sizes.tolist(), rest_s.tolist(), strict=True)
    ]
    every = math.ceil(len(groups) / MAX_GROUPS)
    return MeasuredEpisodes(tuple(groups[::every]), float(alone_s.mean()), float(alone_s.mean()) * slope / alone)


def _loads(granted_s: Numbers, duration_s: Numbers, shares: Numbers) -> Numbers:
    """Return for each episode the mean over its time of the sum of `shares` of the episodes that run.

    Args:
        shares: the part of a group that the episode's sampling is, averaged over its time.
    """
    times = np.concatenate([granted_s, granted_s + duration_s])
    order = np.argsort(times, kind="stable")
    times = times[order]
    running = np.cumsum(np.concatenate([shares, -shares])[order])
    integral = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    ends, begins = np.interp(granted_s + duration_s, times, integral), np.interp(granted_s, times, integral)
    loads: Numbers = (ends - begins) / duration_s
    return loads


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
