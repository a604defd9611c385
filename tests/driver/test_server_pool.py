"""Servers that start, die and fail to start, and the pause of a learner without enough of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, RewardError, WaitTimeoutError
from async_rl.base.messages.reports import ServersLost, StepDone
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.status import PAUSED, RUNNING
from async_rl.run.processes import watchdog
from tests.kit.fake_servers import GONE, FakeServers

pytestmark = pytest.mark.processes  # together they wait for seconds
OpenRun = Callable[..., FakeServers]


def test_a_run_begins_with_its_fewest_servers_and_others_join_when_they_have_a_host(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 3})
    run.without_host = {"rollout/1", "rollout/2"}

    async def go_on() -> None:
        async with run.going_on():
            assert run.serving() == ["rollout/0"] and run.state("rollout/2") == "starting"
            run.without_host.clear()
            await run.until(lambda: len(run.serving()) == 3)

    asyncio.run(go_on())
    assert sorted(run.learner.calls) == [("add", f"rollout/{number}", 1) for number in range(3)]
    assert not run.asked and not run.learner.pauses and run.pool.statuses()[2].version == 7


def test_the_learner_starts_with_the_fewest_servers_and_all_evaluation_servers(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 2}, evals=1)
    run.slow, run.without_host = {"eval/0"}, {"rollout/1"}

    async def begin() -> None:
        async with asyncio.TaskGroup() as tasks:
            run.pool.begin(tasks, "tcp://buffer")
            starting = asyncio.create_task(run.pool.until_up())
            await run.until(lambda: run.state("rollout/0") == "filling")
            await run.looks()
            assert not starting.done() and run.learner.calls == []
            run.slow.clear()
            await starting
            assert run.pool.first_up() == "rollout/0"
            for task in run.pool.tasks:
                task.cancel()

    asyncio.run(begin())
    run.log.close()


def test_servers_of_one_gpu_start_one_after_the_other(open_run: OpenRun) -> None:
    for one_by_one, most in ((True, 1), (False, 2)):
        run = open_run(2, one_by_one=one_by_one)

        async def go_on(run: FakeServers = run) -> None:
            async with run.going_on():
                await run.until(lambda: len(run.serving()) == 2)

        asyncio.run(go_on())
        assert run.most_starting == most
        run.config.run_dir.rename(run.config.run_dir.with_name(str(one_by_one)))


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), WaitTimeoutError("too long"), AsyncRLError("no file")])
def test_a_server_that_can_not_start_while_others_serve_is_tried_again_for_ever(
    error: AsyncRLError, open_run: OpenRun
) -> None:
    run = open_run(2, max_restarts=1)

    async def go_on() -> None:
        async with run.going_on():
            await run.until(lambda: len(run.serving()) == 2)
            run.failures["rollout/1"] = [error] * 5
            run.die("rollout/1")
            await run.until(lambda: run.starts["rollout/1"] == 7 and len(run.serving()) == 2)

    asyncio.run(go_on())
    assert run.serving() == ["rollout/0", "rollout/1"]


def test_a_host_that_is_too_small_for_a_server_that_joins_does_not_end_the_run(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run = open_run({"min": 1, "max": 2})
    run.without_host = {"rollout/1"}

    async def go_on() -> None:
        async with run.going_on():
            run.learner.error = ConfigError("rollout.gpu_memory_utilization")
            run.without_host.clear()
            await run.until(lambda: run.starts["rollout/1"] > 2)
            run.learner.error = None
            await run.until(lambda: len(run.serving()) == 2)

    asyncio.run(go_on())


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), RewardError("no verdict")])
@pytest.mark.parametrize("servers", [1, {"min": 1, "max": 3}])
def test_before_a_server_has_served_its_error_ends_the_run(
    servers: int | dict[str, int], error: AsyncRLError, open_run: OpenRun
) -> None:
    run = open_run(servers, max_restarts=9)
    run.failures["rollout/0"] = [error] * 9
    run.slow = {"rollout/1", "rollout/2"}
    with pytest.raises(type(error)) as caught:
        asyncio.run(run.ended())
    assert caught.value is error and run.starts["rollout/0"] == 1


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), AsyncRLError("no file")])
def test_the_only_server_may_fail_to_start_max_restarts_times(error: AsyncRLError, open_run: OpenRun) -> None:
    run = open_run(1, max_restarts=2)
    run.failures["rollout/0"] = [None, error, error, error]

    async def go_on() -> None:
        async with run.going_on():
            run.die("rollout/0")
            await asyncio.Event().wait()

    with pytest.raises(type(error), match="3 times"):
        asyncio.run(go_on())
    assert run.starts["rollout/0"] == 3


@pytest.mark.parametrize("name", ["rollout/0", "eval/0"])
def test_a_server_may_die_max_restarts_times_between_two_steps(name: str, open_run: OpenRun) -> None:
    run = open_run(2, max_restarts=1, evals=1)

    async def go_on() -> None:
        async with run.going_on():
            for version in (1, 2, 3):
                run.pool.note_step(StepDone(version=version))
                await run.until(lambda: run.state(name) == "serving")
                run.die(name)
                await run.until(lambda: run.state(name) != "serving")
            await run.until(lambda: run.state(name) == "serving")
            run.die(name)
            await asyncio.Event().wait()

    with pytest.raises(ProcessDiedError, match="2 times"):
        asyncio.run(go_on())
    assert run.starts[name] == 4


def test_an_error_of_a_servers_work_ends_the_run_though_others_serve(open_run: OpenRun) -> None:
    """Else rewards that fail for good would be asked anew, by a server that starts again after every few groups."""
    run = open_run(2, max_restarts=9)

    async def go_on() -> None:
        async with run.going_on():
            run.die("rollout/0", RewardError("20 groups in a row"))
            await asyncio.Event().wait()

    with pytest.raises(RewardError, match="20 groups in a row"):
        asyncio.run(go_on())


def test_reports_of_an_earlier_start_of_a_server_are_ignored(open_run: OpenRun) -> None:
    run = open_run(2)

    async def go_on() -> None:
        async with run.going_on():
            await run.until(lambda: len(run.serving()) == 2)
            run.learner.has_weights = False
            run.pool.note_lost(ServersLost(servers=(("rollout/1", 1),)))
            await run.until(lambda: ("add", "rollout/1", 2) in run.learner.calls)
            run.learner.fill("rollout/1", 1)
            run.pool.note_lost(ServersLost(servers=(("rollout/1", 1),)))
            await run.looks()
            assert run.state("rollout/1") == "filling" and run.starts["rollout/1"] == 2
            run.learner.fill("rollout/1", 2)
            await run.until(lambda: run.state("rollout/1") == "serving")
            run.pool.note_lost(ServersLost(servers=(("rollout/1", 1),)))
            await run.looks()
            assert run.state("rollout/1") == "serving"

    asyncio.run(go_on())
    assert run.asked == [("abandon", "rollout/1", 1)]


def test_a_server_that_gets_no_weights_in_time_ends_the_run(open_run: OpenRun) -> None:
    run = open_run(1, batch_s=0.1, silent_s=0.1)
    run.learner.has_weights = False
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.batch_s"):
        asyncio.run(run.ended())


def test_the_versions_of_servers_are_those_of_the_last_step(open_run: OpenRun) -> None:
    run = open_run(2)
    run.pool.note_step(StepDone(version=4, metrics=(Metric("version/rollout/1", 3.0), Metric("version/buffer", 4.0))))
    assert [server.version for server in run.pool.statuses()] == [-1, 3]
    run.log.close()


def test_below_the_minimum_the_learner_pauses_and_goes_on_when_enough_serve(open_run: OpenRun) -> None:
    run = open_run({"min": 2, "max": 3})

    async def go_on() -> None:
        async with run.going_on():
            await run.until(lambda: len(run.serving()) == 3)
            run.slow = {"rollout/1", "rollout/2"}
            run.die("rollout/1")
            await run.until(lambda: run.starts["rollout/1"] == 2)
            assert run.learner.pauses == []
            run.die("rollout/2")
            await run.until(lambda: run.learner.pauses == ["pause"])
            run.slow = {"rollout/1"}
            await run.until(lambda: run.learner.pauses == ["pause", "go_on"])
            assert run.serving() == ["rollout/0", "rollout/2"]

    asyncio.run(go_on())


def test_a_run_without_enough_servers_for_pause_s_ends(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 2}, pause_s=0.2)

    async def go_on() -> None:
        async with run.going_on():
            run.ask("max", number=1)
            await run.until(lambda: run.serving() == ["rollout/0"])
            run.slow = {"rollout/0"}
            run.die("rollout/0")
            await asyncio.Event().wait()

    with pytest.raises(WaitTimeoutError, match=r"timeouts\.pause_s"):
        asyncio.run(go_on())
    assert run.learner.pauses == ["pause"]


def test_a_run_with_a_fixed_number_of_servers_does_not_pause(open_run: OpenRun) -> None:
    run = open_run(1, pause_s=0.05)

    async def go_on() -> None:
        async with run.going_on():
            run.slow = {"rollout/0"}
            run.die("rollout/0")
            await run.until(lambda: run.starts["rollout/0"] == 2)
            await asyncio.sleep(0.2)

    asyncio.run(go_on())
    assert run.learner.pauses == []


def test_the_status_of_a_run_has_the_watchers_pause_then_the_pause_without_servers(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.01)
    run = open_run({"min": 1, "max": 1})
    by_watcher, notes = f"{PAUSED} by the watcher since step 7", list[str]()

    async def look() -> None:
        await run.watchdog.look()
        notes.append(json.loads((run.config.run_dir / "status.json").read_text())["note"])

    async def go_on() -> None:
        async with run.going_on():
            run.watchdog.note = by_watcher
            run.slow = {"rollout/0"}
            run.die("rollout/0")
            await run.until(lambda: run.learner.pauses == ["pause"])
            await look()
            run.watchdog.note = RUNNING
            await look()
            run.slow.clear()
            await run.until(lambda: run.learner.pauses == ["pause", "go_on"])
            await look()

    asyncio.run(go_on())
    assert notes[0] == by_watcher and notes[2] == RUNNING
    assert notes[1].startswith(PAUSED) and notes[1] != by_watcher
