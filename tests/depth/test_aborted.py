"""With late groups dropped, the window knows of the long ones only how long they ran until they were aborted."""

from __future__ import annotations

import dataclasses

import pytest

from async_rl.config import StalenessConfig
from async_rl.depth.window import RecentWindow
from async_rl.messages.reports import GroupRecord
from buffer.simulate import WORKER, GroupTime, Simulation, Workload, simulate
from tests.kit.configs import make_config
from tests.kit.depth.steps import step_values

TOOLS = Workload(
    prompts_per_step=16, concurrency=80, train_s=10.0, sync_s=0.5, pause_s=0.25, group_mean_s=4.0, receive_s=0.1,
    groups=[GroupTime(4.0)] * 8 + [GroupTime(4.0, 60.0)] * 2, late="drop",
)
"""A fifth of the groups waits 60 s for a tool, six times as long as a step takes."""


class Recorded(Simulation):
    """Keeps a record of each group that finished or was aborted, as a rollout worker does."""

    def __init__(self, workload: Workload, staleness: StalenessConfig) -> None:
        self.times: dict[int, tuple[float, GroupTime]] = {}
        self.records: list[GroupRecord] = []
        super().__init__(workload, staleness, 0)

    def group_time(self) -> GroupTime:
        time = super().group_time()
        self.times[len(self.times)] = self.now_s, time  # group ids count up from 0
        return time

    def on_finished(self, group_id: int) -> None:
        _, time = self.times[group_id]
        self.records.append(GroupRecord(time.sampling_s, time.waiting_s, 100, 1.0))

    def _abort(self) -> None:
        for group_id in self.store.aborts(WORKER):
            self.records.append(GroupRecord(0.0, self.now_s - self.times[group_id][0], 0, 1.0, is_aborted=True))
        super()._abort()


@pytest.mark.parametrize(("bound", "depth"), [(2, 1.25), (3, 1.5), (4, 2.0)])
def test_depths_are_forecast_as_the_long_groups_that_were_dropped_make_them(bound: int, depth: float) -> None:
    run = Recorded(TOOLS, StalenessConfig(max=bound, depth=depth))
    run.run(60)
    assert not any(record.waiting_s for record in run.records[-128:] if not record.is_aborted)
    window = RecentWindow(
        make_config(
            staleness={"max": bound, "depth": "auto", "late": "drop"}, learner={"prompts_per_step": 16},
            rollout={"concurrency": 80},
        )
    )
    window.add_groups(run.records)
    for version in (1, 2):
        window.add_step(version, step_values(time__train_s=10.0))
    seen = dataclasses.replace(window.workload(servers=1), load_s=0.0)
    short = dataclasses.replace(seen, groups=[time for time in seen.groups if time.sampling_s < 5], group_mean_s=4.0)
    off = {"seen": 0.0, "short": 0.0}
    for other in (1.0, 1.5, 2.0):
        step_s = [simulate(each, bound, 80, depth=other, begin=10).step_s for each in (TOOLS, seen, short)]
        assert step_s[1] == pytest.approx(step_s[0], rel=0.2)  # 16 % of the window's groups are long, not 20
        off["seen"] += abs(step_s[1] - step_s[0])
        off["short"] += abs(step_s[2] - step_s[0])
    assert off["seen"] < off["short"] / 2
