"""The driver measures for the depth: what it leaves out, how much time decisions may take, and what the status says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config import Config
from async_rl.depth.choice import Forecast
from async_rl.driver.depth_tuner import MOST_CPU, DepthTuner
from async_rl.driver.watchdog import Watchdog
from async_rl.messages.reports import (
    DepthMoved,
    EvaluationDue,
    GroupRecord,
    Report,
    ServersLost,
    StepDone,
    WorkerReport,
)
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.telemetry.metrics import Metric, reduce_metrics
from async_rl.telemetry.status import format_status
from tests.kit.configs import make_config
from tests.kit.depth.steps import step_values

GROUPS = tuple(GroupRecord(2.0 + number % 3, 0.0, 100, 2.0) for number in range(8))


class Driver:
    """A tuner with a watchdog, without processes: the reports come from the test. `measured` has the steps that count,
    `groups` the numbers of groups, and `sent` the moves.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config | None = None) -> None:
        self.config = config or make_config(
            staleness={"max": 4, "depth": "auto"}, learner={"prompts_per_step": 4}, run={"steps": 200}
        )
        self.measured: list[int] = []
        self.groups: list[int] = []
        self.sent: list[int] = []
        self.told: list[str] = []
        self.metrics: dict[str, float] = {}
        remote = SimpleNamespace(remote=lambda slots, reason: self.sent.append(slots))
        processes: Any = SimpleNamespace(actors={"learner/0": SimpleNamespace(move_depth=remote)}, place=None)
        log: Any = SimpleNamespace(
            add_metrics=lambda metrics: self.metrics.update(reduce_metrics(metrics)),
            logger=SimpleNamespace(note=self.told.append),
        )
        self.watchdog = Watchdog(self.config, processes)
        for name in ("buffer", "rollout/0", "rollout/1", "learner/0"):
            self.watchdog.begin(name)
        self.tuner = DepthTuner(self.config, processes, log, self.watchdog)
        controller, add_groups = self.tuner._controller, self.tuner._controller.add_groups
        add_step = controller.add_step

        def seen(version: int, values: Any, *, is_disturbed: bool) -> Any:
            if not is_disturbed:
                self.measured.append(version)
            return add_step(version, values, is_disturbed=is_disturbed)

        monkeypatch.setattr(controller, "add_step", seen)
        monkeypatch.setattr(
            controller, "add_groups", lambda groups: (self.groups.append(len(groups)), add_groups(groups))
        )

    def add(self, report: Report, servers: int = 1, is_evaluating: bool = False) -> Any:
        return self.tuner.add(report, servers, is_evaluating)

    def step(self, version: int, servers: int = 1, **changed: float) -> Any:
        metrics = tuple(Metric(key, value) for key, value in step_values(**changed).items())
        return self.add(StepDone(version=version, metrics=metrics), servers)


@pytest.mark.parametrize(("servers", "measured"), [((), [3]), (("eval/0",), [2, 3])])
def test_a_step_beside_an_evaluation_is_measured_if_rollout_servers_do_not_make_it(
    servers: tuple[str, ...], measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    driver.step(1)  # which warms up
    driver.add(EvaluationDue(version=1, servers=servers), is_evaluating=not servers)
    driver.step(2)  # the evaluation ends beside it
    driver.step(3)
    assert driver.measured == measured


def checkpoint(driver: Driver) -> None:
    driver.step(3, checkpoint__pause_s=0.5)


def pause_of_the_guard(driver: Driver) -> None:
    driver.step(3, time__paused_s=20.0)


def held_push(driver: Driver) -> None:
    driver.step(3, time__held_by_eval_s=20.0)


def loss_that_the_driver_sees(driver: Driver) -> None:
    driver.add(ServersLost(servers=(("rollout/1", "http://there:1"),)))
    driver.step(3)


def server_started_again(driver: Driver) -> None:
    driver.watchdog.forget("rollout/0")
    driver.watchdog.begin("rollout/0")
    driver.step(3)


def buffer_started_again(driver: Driver) -> None:
    driver.watchdog.begin("buffer")
    driver.step(3)


@pytest.mark.parametrize(
    "disturb",
    [
        checkpoint, pause_of_the_guard, held_push, loss_that_the_driver_sees, server_started_again,
        buffer_started_again,
    ],
)
def test_a_step_with_a_checkpoint_or_a_lost_process_is_left_out(
    disturb: Callable[[Driver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)
    for version in (1, 2):
        driver.step(version)
    disturb(driver)
    driver.step(4)
    assert driver.measured == [2, 4]


def test_the_step_after_a_push_that_lost_a_server_is_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    for version in (1, 2):
        driver.step(version)
    driver.add(ServersLost(servers=(("rollout/1", "http://there:1"),)))
    driver.step(3, push__lost_servers=1.0)
    for version in (4, 5):
        driver.step(version)
    assert driver.measured == [2, 5]


def test_after_servers_came_or_went_steps_count_from_the_next_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    for version, servers in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 1), (6, 1)):
        driver.step(version, servers)
    assert driver.measured == [2, 4, 6]


def test_groups_beside_an_evaluation_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.step(1)
    driver.add(WorkerReport(groups=GROUPS[:1]))
    driver.add(EvaluationDue(version=1), is_evaluating=True)
    driver.add(WorkerReport(groups=GROUPS[:2]), is_evaluating=True)
    driver.add(WorkerReport(groups=GROUPS[:3]))  # the evaluation has ended in this step
    driver.step(2)
    driver.add(WorkerReport(groups=GROUPS[:4]))
    assert driver.groups == [1, 4]


def test_a_run_in_which_nothing_can_be_measured_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    driver.add(WorkerReport(groups=GROUPS))
    for version in range(1, 30):
        driver.step(version, checkpoint__pause_s=0.5)
    (told,) = driver.told
    assert told.startswith("staleness.depth auto has measured too little in 24 steps, so the depth stays 1.25: ")


def test_depths_are_told_in_quarters_also_if_batches_do_not_divide_by_four(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 10})
    driver = Driver(monkeypatch, config)
    driver.add(DepthMoved(version=3, slots=23, reason="why"))
    assert driver.told == ["depth 1.25 of at most 8 since step 3: why"]


def test_groups_that_waited_for_another_buffer_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of the first step, which warm up."""
    driver = Driver(monkeypatch)
    driver.add(WorkerReport(groups=GROUPS[:1]))
    driver.step(1)
    driver.add(WorkerReport(groups=GROUPS[:2]))
    driver.watchdog.begin("buffer")
    driver.add(WorkerReport(groups=GROUPS[:3]))
    driver.step(2)
    driver.add(WorkerReport(groups=GROUPS[:4]))
    assert driver.groups == [2, 4]


def test_decisions_take_at_most_a_hundredth_of_a_core_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a second of a core: the second has to wait until the run is 100 s old, the third until 150 s."""
    clock = SimpleNamespace(now_s=0.0, cpu_s=0.0)

    def look(prospect: Any) -> dict[float, Forecast]:
        clock.cpu_s += 0.5
        return {1.25: Forecast(1.25, 12.0, 1.25, 0.9)}

    monkeypatch.setattr(
        "async_rl.driver.depth_tuner.time",
        SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: clock.cpu_s),
    )
    driver = Driver(monkeypatch)
    monkeypatch.setattr(driver.tuner._controller, "look", look)
    decided: list[float] = []
    for version in range(1, 170):
        clock.now_s = float(version)
        decision = driver.step(version)
        driver.add(WorkerReport(groups=GROUPS))
        if decision:
            asyncio.run(decision)
            decided.append(clock.now_s)
        assert clock.cpu_s <= max(0.5, MOST_CPU * clock.now_s)
    # Due at step 8 and every 15 steps after a decision, or as soon as the run is old enough for one more.
    assert decided == [8, 100, 150]
    assert driver.metrics["auto/cpu_s"] == pytest.approx(1.5)


def test_while_a_decision_is_looked_for_no_other_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    begun = []
    for version in range(1, 30):
        if decision := driver.step(version):
            begun.append((version, decision))
        driver.add(WorkerReport(groups=GROUPS))
    ((version, decision),) = begun
    assert version == 8
    decision.close()


def test_the_status_says_the_depth_and_since_when_a_move_has_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def configured(depth: float | str) -> Config:
        return make_config(
            staleness={"max": 4, "depth": depth}, learner={"prompts_per_step": 4},
            run={"dir": str(tmp_path), "name": "r"},
        )  # fmt: skip

    def told(watchdog: Watchdog) -> str:
        watchdog.write_status("running")
        return "".join(format_status(tmp_path / "r").splitlines()[1:2])

    (tmp_path / "r").mkdir()
    nobody: Any = SimpleNamespace(actors={})
    assert told(Watchdog(configured(1.5), nobody)) == "depth 1.5 of at most 4"
    assert told(Watchdog(configured("max"), nobody)) == ""
    driver = Driver(monkeypatch, configured("auto"))
    assert told(driver.watchdog) == "depth 1.25 of at most 4"
    driver.add(DepthMoved(version=23, slots=10, reason="6 % more steps than 1.25"))
    assert told(driver.watchdog) == "depth 1.5 of at most 4 since step 23"
    assert driver.told == ["depth 1.5 of at most 4 since step 23: 6 % more steps than 1.25"]


@pytest.mark.parametrize(("moves", "depth"), [(True, 2.0), (False, 1.25)])
def test_a_resume_begins_at_the_depth_of_the_checkpoint_if_that_run_moved_it(
    moves: bool, depth: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = checkpoint_folder(tmp_path / "r", 7)
    folder.mkdir(parents=True)
    buffer = {"scalars": {"slots": 24}, "fresh_per_step": 8, "moves_slots": moves}
    state = TrainingState(version=7, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer=buffer)
    write_training_state(folder, state)
    config = make_config(
        staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 4}, run={"resume": str(folder)}
    )
    assert Driver(monkeypatch, config).tuner._controller.depth == depth


def test_a_move_counts_once_the_buffer_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)

    def shown(version: int, **changed: float) -> tuple[float, float]:
        if decision := driver.step(version, **changed):
            decision.close()
        return driver.metrics["staleness/depth"], driver.metrics["auto/moves"]

    for version in range(1, 9):
        assert shown(version) == (1.25, 0.0)
    assert shown(9, alarm__kl=1.0) == (1.25, 0.0)
    assert driver.sent == [8]
    driver.add(DepthMoved(version=10, slots=8, reason="half a batch less than 1.25, because the KL is high"))
    assert shown(10) == (1.0, 1.0)


@pytest.mark.parametrize("method", ["prospect", "look", "decide"])
def test_an_error_of_a_decision_is_told_and_ends_neither_the_run_nor_alarms(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of a window")

    monkeypatch.setattr(driver.tuner._controller, method, fail)
    driver.tuner._controller.add_groups(GROUPS)
    for version in range(1, 20):
        if decision := driver.step(version):
            asyncio.run(decision)
    (told,) = driver.told
    assert told.startswith("staleness.depth auto can not decide: ZeroDivisionError('of a window'). The depth stays 1.2")
    driver.step(20, alarm__kl=1.0)
    assert driver.sent == [8]  # depth 1


def test_a_run_that_loses_a_server_is_not_said_to_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    for version in range(1, 40):
        if decision := driver.step(version, servers=1 if version < 30 else 2):
            decision.close()
            driver.tuner._is_deciding = False
        driver.add(WorkerReport(groups=GROUPS))
    assert driver.told == []
