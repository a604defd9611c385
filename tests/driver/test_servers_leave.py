"""Servers that join and leave a run: at a person's request, and with their hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from async_rl.base.errors import ProcessKilledError
from async_rl.base.messages.reports import ServersLost
from async_rl.base.run_dir.run_dir import locked
from async_rl.run.processes import server_pool
from tests.kit.fake_servers import GONE, FakeServers

pytestmark = [pytest.mark.anyio, pytest.mark.processes]  # together they wait for seconds
URLS = ("http://10.0.0.1:3", "http://10.0.0.2:3")
OpenRun = Callable[..., FakeServers]


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_a_removed_server_finishes_its_groups_and_its_name_can_join_again(
    is_repeated: bool, open_run: OpenRun
) -> None:
    run = open_run({"min": 1, "max": 2})
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.groups["rollout/1"] = 2
        run.ask("remove", name="rollout/1")
        await run.until(lambda: run.state("rollout/1") == "draining")
        if is_repeated:
            run.ask("remove", name="rollout/1")
        await run.until(lambda: run.asked.count(("retire", "rollout/1", 1)) > 2)
        assert run.serving() == ["rollout/0"] and "rollout/1" in run.actors
        assert run.learner.calls[-1] == ("leave", "rollout/1", 1)
        run.groups["rollout/1"] = 0
        await run.until(lambda: run.released == ["rollout/1"])
        assert run.state("rollout/1") == "gone" and "rollout/1" not in run.actors
        run.ask("max", number=2)
        await run.until(lambda: len(run.serving()) == 2)
    assert run.starts["rollout/1"] == 2 and ("add", "rollout/1", 2) in run.learner.calls
    assert run.asked[-1] == ("abandon", "rollout/1", 1) and run.notes.count("rollout/1 joins") == 1
    assert not run.has_noted("refused: ")


async def test_a_server_that_drains_for_too_long_or_not_at_all_leaves_with_groups(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 3}, leave_s=0.1)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 3)
        run.groups.update({"rollout/1": 9, "rollout/2": 9})
        run.ask("remove", name="rollout/1", now=True)
        await run.until(lambda: run.released == ["rollout/1"])
        assert run.asked == [("abandon", "rollout/1", 1)]
        run.ask("remove", name="rollout/2")
        await run.until(lambda: run.released == ["rollout/1", "rollout/2"])
    assert run.asked[1] == ("retire", "rollout/2", 1) and run.asked[-1] == ("abandon", "rollout/2", 1)
    assert run.starts == {"rollout/0": 1, "rollout/1": 1, "rollout/2": 1}


@pytest.mark.parametrize("state", ["without a host", "starting", "filling"])
async def test_a_server_that_does_not_serve_yet_leaves_at_once(state: str, open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 2}, max_restarts=0)
    run.slow, starts = {"rollout/1"}, int(state != "without a host")
    run.without_host = set() if starts else {"rollout/1"}
    async with run.going_on():
        if state == "filling":
            run.learner.has_weights = False
            run.slow.clear()
        if starts:
            await run.until(lambda: run.state("rollout/1") == state and bool(run.starts["rollout/1"]))
        run.ask("remove", name="rollout/1")
        await run.until(lambda: run.released == ["rollout/1"])
    assert run.starts["rollout/1"] == starts and ("retire", "rollout/1", 1) not in run.asked


def serve(run: FakeServers, names: list[str]) -> bool:
    return run.serving() == names


async def test_a_lower_maximum_lets_servers_leave_and_a_higher_one_lets_them_join(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 4})
    async with run.going_on():
        for number in (4, 2, 1, 3, 1, 4):
            run.ask("max", number=number)
            names = [f"rollout/{index}" for index in range(number)]
            await run.until(partial(serve, run, names))
            await run.looks()
            assert serve(run, names)
    assert run.starts == {"rollout/0": 1, "rollout/1": 3, "rollout/2": 3, "rollout/3": 2}


async def test_a_server_that_joins_while_its_last_life_ends_is_kept_once(open_run: OpenRun) -> None:
    """A removed server may still wait for its next start, or for the buffer's answer about its groups."""
    run = open_run({"min": 1, "max": 2})
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.failures["rollout/1"] = [GONE] * 3
        run.die("rollout/1")
        await run.until(lambda: run.starts["rollout/1"] == 3)
        for _ in range(3):
            run.ask("remove", name="rollout/1", now=True)
            run.ask("max", number=2)
        await run.until(lambda: len(run.serving()) == 2)
        starts = run.starts["rollout/1"]
        await run.looks()
        assert run.starts["rollout/1"] == starts and len(run.serving()) == 2
        run.ask("remove", name="rollout/1", now=True)
        await run.until(lambda: run.serving() == ["rollout/0"])
        await run.looks()
        assert run.serving() == ["rollout/0"] and "rollout/1" not in run.actors


async def test_a_running_server_joins_at_its_url_and_none_is_started(open_run: OpenRun) -> None:
    run = open_run({"min": 1, "max": 3}, urls=URLS)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.ask("max", number=3)
        await run.looks()
        assert len(run.serving()) == 2, "the run starts no server of its own"
        run.ask("add", url=URLS[1])  # it serves already
        await run.until(lambda: run.has_noted(f"url='{URLS[1]}'"))
        run.ask("add", url="http://10.0.0.3:3")
        await run.until(lambda: len(run.serving()) == 3)
        run.ask("add", url="http://10.0.0.4:3")
        await run.until(lambda: run.has_noted("url='http://10.0.0.4:3'"))
        run.ask("remove", name="rollout/0")
        await run.until(lambda: run.released == ["rollout/0"])
        run.ask("add", url="http://10.0.0.4:3")
        await run.until(lambda: len(run.serving()) == 3)
    assert [server.place for server in run.pool.statuses()] == [
        "http://10.0.0.4:3", "http://10.0.0.2:3", "http://10.0.0.3:3",
    ]


async def test_a_rollback_keeps_what_a_person_has_asked_for_and_a_new_start_does_not(open_run: OpenRun) -> None:
    wanted: dict[str, str] = {}
    run = open_run({"min": 1, "max": 4}, urls=URLS, wanted=wanted)
    async with run.going_on():
        run.ask("remove", name="rollout/0")
        run.ask("add", url="http://10.0.0.3:3")
        await run.until(lambda: run.serving() == ["rollout/1", "rollout/2"])
    with locked(run.config.run_dir):
        run.ask("add", url="http://10.0.0.4:3")  # between two lives of the run
    back = open_run({"min": 1, "max": 4}, urls=URLS, wanted=wanted)
    async with back.going_on():
        await back.until(lambda: len(back.serving()) == 3)
        assert back.released == ["rollout/0"], "its resources of the start are for others"
        assert {server.place for server in back.pool.statuses() if server.state == "serving"} == {
            URLS[1], "http://10.0.0.3:3", "http://10.0.0.4:3",
        }
    with locked(run.config.run_dir):
        run.ask("remove", name="rollout/0")
    resumed = open_run({"min": 1, "max": 4}, urls=URLS)
    async with resumed.going_on():
        await resumed.until(lambda: len(resumed.serving()) == 2)
        await resumed.looks()
        assert resumed.serving() == ["rollout/0", "rollout/1"] and not resumed.has_noted("leaves")


@pytest.mark.parametrize("dies", [False, True])
async def test_a_server_whose_host_leaves_drains_and_waits_for_another_host(dies: bool, open_run: OpenRun) -> None:
    run = open_run(2, max_restarts=0)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.groups["rollout/1"], run.left_s["rollout/1"] = 2, 25.0
        await run.until(lambda: run.state("rollout/1") == "draining")
        assert run.has_noted("rollout/1 drains for at most 20 s")  # SPARE_S before its host leaves
        run.without_host = {"rollout/1"}
        if dies:
            run.die("rollout/1", ProcessKilledError("its host has left early"))
        else:
            run.groups["rollout/1"] = 0
        await run.until(lambda: ("abandon", "rollout/1", 1) in run.asked)
        run.left_s.clear()
        await run.until(lambda: run.state("rollout/1") == "starting")
        assert run.starts["rollout/1"] == 1 and run.released == []
        run.without_host.clear()
        await run.until(lambda: len(run.serving()) == 2)
    assert run.starts["rollout/1"] == 2 and run.has_noted("rollout/1 is back, with the weights of version 7")


@pytest.mark.parametrize("now", [False, True])
async def test_a_draining_server_obeys_a_shorter_limit(now: bool, open_run: OpenRun) -> None:
    """A server that drains at a request has less time once its host leaves, and none if a person wants it gone now."""
    run = open_run({"min": 1, "max": 2}, leave_s=600)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.groups["rollout/1"] = 2
        if now:
            run.left_s["rollout/1"] = 600.0
        else:
            run.ask("remove", name="rollout/1")
        await run.until(lambda: run.state("rollout/1") == "draining")
        if now:
            run.without_host = {"rollout/1"}
            run.ask("remove", name="rollout/1", now=True)
        else:
            run.left_s["rollout/1"] = server_pool.SPARE_S + 0.1
        await run.until(lambda: run.released == ["rollout/1"])
    assert run.asked[-1] == ("abandon", "rollout/1", 1) and run.starts["rollout/1"] == 1


async def test_a_server_without_a_process_waits_in_peace_while_its_last_host_leaves(open_run: OpenRun) -> None:
    run = open_run(2)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.without_host = {"rollout/1"}
        run.die("rollout/1")
        await run.until(lambda: ("abandon", "rollout/1", 1) in run.asked)
        run.left_s["rollout/1"] = 20.0
        await run.looks()
        assert run.state("rollout/1") == "starting" and run.asked == [("abandon", "rollout/1", 1)]


async def test_a_late_report_of_a_death_does_not_end_the_next_start(open_run: OpenRun) -> None:
    run = open_run(2, max_restarts=1)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.without_host = {"rollout/1"}
        run.die("rollout/1")
        await run.until(lambda: ("abandon", "rollout/1", 1) in run.asked)
        for _ in range(3):  # by a push that had begun before
            run.pool.note_lost(ServersLost(servers=(("rollout/1", 1),)))
            await run.looks()
        run.without_host.clear()
        await run.until(lambda: len(run.serving()) == 2)
    assert run.asked == [("abandon", "rollout/1", 1)] and run.starts["rollout/1"] == 2


async def test_a_draining_server_that_a_push_drops_is_no_death(open_run: OpenRun) -> None:
    run = open_run(2, max_restarts=0)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2)
        run.groups["rollout/1"], run.left_s["rollout/1"] = 2, 60.0
        await run.until(lambda: run.state("rollout/1") == "draining")
        run.left_s.clear()
        run.pool.note_lost(ServersLost(servers=(("rollout/1", 1),)))
        await run.until(lambda: run.starts["rollout/1"] == 2 and len(run.serving()) == 2)


@pytest.mark.parametrize(("left_s", "name"), [(4.0, "rollout/1"), (60.0, "eval/0")])
async def test_a_server_that_has_no_time_or_no_groups_leaves_its_host_at_once(
    left_s: float, name: str, open_run: OpenRun
) -> None:
    run = open_run(2, evals=1, max_restarts=0)
    async with run.going_on():
        await run.until(lambda: len(run.serving()) == 2 and run.state("eval/0") == "serving")
        run.groups["rollout/1"], run.left_s[name] = 2, left_s
        await run.until(lambda: ("leave", name, 1) in run.learner.calls)
        run.left_s.clear()
        await run.until(lambda: run.starts[name] == 2 and run.state(name) == "serving")
    assert all(asked[0] != "retire" for asked in run.asked)
