"""Servers that start, die and fail to start, and the pause of a learner without enough of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, RewardError, WaitTimeoutError
from async_rl.base.messages.reports import ServersLost, StepDone
from async_rl.base.telemetry.status import format_status
from async_rl.run.processes import server_pool, watchdog
from tests.kit.fake_servers import GONE, FakeServers

pytestmark = [pytest.mark.anyio, pytest.mark.processes]  # together they wait for seconds
OpenRun = Callable[..., FakeServers]


async def test_a_run_begins_with_its_fewest_servers_and_others_join_when_they_have_a_host(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 3})
    run.without_host = {"rollout/1", "rollout/2"}
    async with run.going_on():
        assert run.serving() == ["rollout/0"] and run.state("rollout/2") == "starting"
        run.without_host.clear()
        await run.until(lambda: len(run.serving()) == 3)
    assert sorted(run.learner.calls) == [("add", f"rollout/{number}", 1) for number in range(3)]
    assert not run.asked and not run.learner.pauses and run.pool.statuses()[2].version == 7


async def test_the_learner_starts_with_the_fewest_servers_and_all_evaluation_servers(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 2}, evals=1)
    run.slow, run.without_host = {"eval/0"}, {"rollout/1"}
    async with asyncio.TaskGroup() as tasks:
        run.pool.begin(tasks, "tcp://buffer")
        starting = asyncio.create_task(run.pool.until_up())
        await run.until(lambda: run.state("rollout/0") == "filling")
        await run.looks()
        assert not starting.done() and run.learner.calls == []
        run.slow.clear()
        await starting
        assert await run.pool.until_up() == "rollout/0"
        for task in run.pool.tasks:
            task.cancel()
    run.log.close()


async def test_all_workers_hear_where_a_judge_server_was_started_again(open_run: OpenRun) -> None:
    run = open_run(2, evals=1, judges=2)
    async with run.going_on():
        await run.until(lambda: all(run.state(name) == "serving" for name in run.pool.servers))
        assert run.judge_urls == {}
        run.die("judge/1")
        await run.until(lambda: run.starts["judge/1"] == 2 and run.state("judge/1") == "serving")
    urls = ["http://judge/0/1", "http://judge/1/2"]  # of the first start of judge/0, of the second of judge/1
    assert run.judge_urls == {"rollout/0": urls, "rollout/1": urls, "eval/0": urls}


@pytest.mark.parametrize(("one_by_one", "most"), [(True, 1), (False, 2)])
async def test_servers_of_one_gpu_start_one_after_the_other(one_by_one: bool, most: int, open_run: OpenRun) -> None:
    run = open_run(2, one_by_one=one_by_one)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
    assert run.most_starting == most


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), WaitTimeoutError("too long"), AsyncRLError("no file")])
async def test_a_server_that_can_not_start_while_others_serve_is_tried_again_for_ever(
    error: AsyncRLError, open_run: OpenRun
) -> None:
    run = open_run(2, max_restarts=1)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.failures["rollout/1"] = [error] * 5
        run.die("rollout/1")
        await run.until(lambda: run.starts["rollout/1"] == 7 and len(run.serving()) == 2)
    assert run.serving() == ["rollout/0", "rollout/1"]


async def test_a_host_that_is_too_small_for_a_server_that_joins_does_not_end_the_run(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run = open_run({"min": 1, "max": 2})
    run.without_host = {"rollout/1"}
    async with run.going_on():
        run.learner.error = ConfigError("rollout.gpu_memory_utilization")
        run.without_host.clear()
        await run.until(lambda: run.starts["rollout/1"] > 2)
        run.learner.error = None
        await run.until(lambda: len(run.serving()) == 2)


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), RewardError("no verdict")])
@pytest.mark.parametrize("servers", [1, {"min": 1, "max": 3}])
async def test_before_a_server_has_served_its_error_ends_the_run(
    servers: int | dict[str, int], error: AsyncRLError, open_run: OpenRun
) -> None:
    run = open_run(servers, max_restarts=9)
    run.failures["rollout/0"] = [error] * 9
    run.slow = {"rollout/1", "rollout/2"}
    with pytest.raises(type(error)) as caught:
        await run.ended()
    assert caught.value is error and run.starts["rollout/0"] == 1


@pytest.mark.parametrize("error", [GONE, ConfigError("a key"), AsyncRLError("no file")])
async def test_the_only_server_may_fail_to_start_max_restarts_times(error: AsyncRLError, open_run: OpenRun) -> None:
    run = open_run(1, max_restarts=2)
    run.failures["rollout/0"] = [None, error, error, error]
    with pytest.raises(type(error), match="3 times"):
        async with run.going_on():
            run.die("rollout/0")
            await asyncio.Event().wait()
    assert run.starts["rollout/0"] == 3


@pytest.mark.parametrize("name", ["rollout/0", "eval/0"])
async def test_a_server_may_die_max_restarts_times_between_two_steps(name: str, open_run: OpenRun) -> None:
    run = open_run(2, max_restarts=1, evals=1)
    with pytest.raises(ProcessDiedError, match="2 times"):
        async with run.going_on():
            for version in (1, 2, 3):
                run.pool.note_step(StepDone(version=version))
                await run.until(lambda: run.state(name) == "serving")
                run.die(name)
                await run.until(lambda: run.state(name) != "serving")
            await run.until(lambda: run.state(name) == "serving")
            run.die(name)
            await asyncio.Event().wait()
    assert run.starts[name] == 4


async def test_an_error_of_a_servers_work_ends_the_run_though_others_serve(open_run: OpenRun) -> None:
    """Else rewards that fail for good would be asked anew, by a server that starts again after every few groups."""
    run = open_run(2, max_restarts=9)
    with pytest.raises(RewardError, match="20 groups in a row"):
        async with run.going_on():
            run.die("rollout/0", RewardError("20 groups in a row"))
            await asyncio.Event().wait()


async def test_reports_of_an_earlier_start_of_a_server_are_ignored(open_run: OpenRun) -> None:
    run = open_run(2)
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
    assert run.asked == [("abandon", "rollout/1", 1)]


async def test_a_server_that_gets_no_weights_in_time_ends_the_run(open_run: OpenRun) -> None:
    run = open_run(1, batch_s=0.1, silent_s=0.1)
    run.learner.has_weights = False
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.batch_s"):
        await run.ended()


async def test_a_server_on_shared_gpus_waits_for_weights_while_another_one_starts(open_run: OpenRun) -> None:
    run = open_run(2, batch_s=0.1, silent_s=0.1, colocated=True)
    async with run.going_on():
        run.learner.has_weights = False  # its push waits for the end of that start
        run.die("rollout/0")
        await run.until(lambda: run.state("rollout/0") == "filling")
        await asyncio.sleep(0.5)
        run.learner.fill("rollout/0", 2)
        await run.until(lambda: run.state("rollout/0") == "serving")
    assert run.starts["rollout/0"] == 2


async def test_a_joiner_that_gets_no_weights_in_time_is_tried_less_and_less_often(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "LONGEST_RETRY_S", 0.0)  # does not hold for a server that fails while it fills
    run = open_run({"min": 1, "max": 2}, batch_s=0.1, silent_s=0.1)
    run.without_host = {"rollout/1"}
    async with run.going_on():
        run.learner.has_weights = False
        run.without_host.clear()
        await run.until(lambda: run.pool.servers["rollout/1"].retry_s >= 4 * server_pool.RETRY_S)
        run.learner.has_weights = True
        await run.until(lambda: len(run.serving()) == 2)
        assert run.pool.servers["rollout/1"].retry_s == 0.0


async def test_below_the_minimum_the_learner_pauses_and_goes_on_when_enough_serve(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.0)
    run = open_run({"min": 2, "max": 3})

    async def first_line() -> str:
        await run.watchdog.look()
        return format_status(run.config.run_dir).splitlines()[0]

    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 3)
        assert (await first_line()).endswith(": running")
        run.slow = {"rollout/1", "rollout/2"}
        run.die("rollout/1")
        await run.until(lambda: run.starts["rollout/1"] == 2)
        assert run.learner.pauses == []
        run.die("rollout/2")
        await run.until(lambda: run.learner.pauses == ["pause"])
        assert (await first_line()).endswith(": paused: fewer than 2 rollout servers serve")
        run.slow = {"rollout/1"}
        await run.until(lambda: run.learner.pauses == ["pause", "go_on"])
        assert (await first_line()).endswith(": running")
        assert run.serving() == ["rollout/0", "rollout/2"]


async def test_a_run_without_enough_servers_for_pause_s_ends(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 2}, pause_s=0.2)
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.pause_s"):
        async with run.going_on():
            run.ask("max", number=1)
            await run.until(lambda: run.serving() == ["rollout/0"])
            run.slow = {"rollout/0"}
            run.die("rollout/0")
            await asyncio.Event().wait()
    assert run.learner.pauses == ["pause"]


async def test_a_run_with_a_fixed_number_of_servers_does_not_pause(open_run: OpenRun) -> None:
    run = open_run(1, pause_s=1.0)  # the start has this limit too
    async with run.going_on():
        run.slow = {"rollout/0"}
        run.die("rollout/0")
        await run.until(lambda: run.starts["rollout/0"] == 2)
        await asyncio.sleep(1.2)
    assert run.learner.pauses == []
