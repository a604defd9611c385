"""Run directories of simulated runs with episodes of several turns, with a journal of what the simulator did."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.simulate import Workload, simulate
from benchmarks.simulated_rollout import GroupTimes, RolloutPool, RunningGroup
from buffer.journal.journal import FILE_NAME
from buffer.journal.tables import SCHEMA
from tests.benchmarks.factories import make_sweep

HAS_TURNS = ("task.name=", "task.env=my_games:Game", "rollout.max_episode_tokens=2000")
Lines = Iterable[tuple[int, float, float, Sequence[tuple[int, float, float, int]]]]
"""(group id, time of its grant, its duration, and of each episode (turns, seconds of sampling, duration, tokens))"""


def write_journal(folder: Path, groups: Lines) -> None:
    with closing(sqlite3.connect(folder / FILE_NAME)) as database:
        database.executescript(SCHEMA)
        for group_id, granted_s, duration_s, episodes in groups:
            database.execute(
                "INSERT INTO groups (group_id, granted_s, duration_s) VALUES (?, ?, ?)",
                (group_id, granted_s, duration_s),
            )
            for number, (turns, generate_s, episode_s, tokens) in enumerate(episodes):
                database.execute(
                    "INSERT INTO episodes (group_id, episode, turns, generate_s, duration_s) VALUES (?, ?, ?, ?, ?)",
                    (group_id, number, turns, generate_s, episode_s),
                )
                database.execute(
                    "INSERT INTO rollouts (group_id, rollout, episode, response_tokens) VALUES (?, ?, ?, ?)",
                    (group_id, number, number, tokens),
                )
        database.commit()


class RecordedPool(RolloutPool):
    """A pool that measures its groups as a worker does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.episodes: dict[int, list[Any]] = defaultdict(list)
        self.sampled: dict[int, float] = defaultdict(float)
        self.episode_ends: dict[int, float] = {}

    def start(self, group_id: int, times: GroupTimes) -> RunningGroup:
        self.began[group_id] = self.now_s
        return super().start(group_id, times)

    def _sample(self, episode: Any) -> None:
        if id(episode) not in self.since:
            self.episodes[episode.group.group_id].append(episode)
        self.since[id(episode)] = self.now_s
        super()._sample(episode)

    def _end_turn(self) -> None:
        episode = self._sampling[0][2]
        self.sampled[id(episode)] += self.now_s - self.since[id(episode)]
        super()._end_turn()

    def _go_on(self, episode: Any) -> None:
        if not episode.turns_left:
            self.episode_ends[id(episode)] = self.now_s
        super()._go_on(episode)

    def _end_group(self, group: RunningGroup) -> None:
        self.ended[group.group_id] = self.now_s
        super()._end_group(group)

    def lines(self) -> Lines:
        for group_id, end_s in sorted(self.ended.items()):
            began_s = self.began[group_id]
            episodes = self.episodes[group_id]
            times = zip(episodes[0].group.times.episodes, episodes, strict=True)
            yield group_id, began_s, end_s - began_s, [
                (of.turns, self.sampled[id(e)], self.episode_ends[id(e)] - began_s, 10 * of.turns) for of, e in times
            ]


def make_episode_sweep(
    folder: Path, workload: Workload, bounds: Sequence[int], steps: int, late_s: float = 0.0
) -> Path:
    """A sweep with the simulator's times for a workload with `groups`.

    Args:
        late_s: the time that the learner waits for late groups in each step.
    """
    sizes = (
        f"rollout.concurrency={workload.concurrency}", f"learner.prompts_per_step={workload.prompts_per_step}",
        f"staleness.late={workload.late}",
    )
    sweep = make_sweep(folder, bounds, 1, steps, workload, (*HAS_TURNS, *sizes))
    for cell, bound in zip(sorted((sweep / "cells").iterdir()), bounds, strict=True):
        pools: list[RecordedPool] = []

        def record(*arguments: Any, kept: list[RecordedPool] = pools) -> RecordedPool:
            kept.append(RecordedPool(*arguments))
            return kept[-1]

        with patch("benchmarks.simulate.RolloutPool", record):
            simulate(workload, bound, steps)
        write_journal(cell, pools[0].lines())
        metrics = (cell / "metrics.jsonl").read_text()
        late = f'"buffer/waited_for_late_s": {late_s}, "staleness/max"'
        (cell / "metrics.jsonl").write_text(metrics.replace('"staleness/max"', late))
    return sweep
