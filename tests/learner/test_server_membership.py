from __future__ import annotations

import threading

import pytest

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.members import ServerMembership
from tests.kit.learner.fakes import until_someone_waits


def joining(servers: ServerMembership, results: list[object], url: str = "http://new") -> threading.Thread:
    def join() -> None:
        try:
            servers.join("rollout/1", url, Limit(10.0, "timeouts.work_s"))
            results.append("current")
        except WeightSyncError:
            results.append("died")

    thread = threading.Thread(target=join)
    thread.start()
    until_someone_waits(servers)
    return thread


def test_a_server_has_joined_when_a_push_has_reached_it() -> None:
    servers, results, live = ServerMembership(), list[object](), {"rollout/0": "http://a", "rollout/1": "http://old"}
    thread = joining(servers, results)
    servers.apply(live)
    assert live == {"rollout/0": "http://a", "rollout/1": "http://new"}
    assert not results
    servers.pushed(live, {})
    thread.join()
    assert results == ["current"]
    assert not servers.someone_waits()


def test_a_server_that_dies_in_its_first_push_fails_to_join() -> None:
    servers, results, live = ServerMembership(), list[object](), {"rollout/1": "http://old"}
    thread = joining(servers, results)
    servers.apply(live)
    del live["rollout/1"]
    servers.pushed(live, {"rollout/1": "http://new"})
    thread.join()
    assert results == ["died"]


def test_a_push_that_lost_a_server_does_not_fail_its_replacement() -> None:
    """The driver learns of the death first, and the replacement waits before the push that hung has ended."""
    servers, results, live = ServerMembership(), list[object](), {"rollout/0": "http://a", "rollout/1": "http://old"}
    servers.apply(live)
    servers.leave("rollout/1")
    thread = joining(servers, results)
    servers.pushed({}, {"rollout/1": "http://old"})
    assert servers.someone_waits() and not results
    servers.apply(live)
    assert live == {"rollout/0": "http://a", "rollout/1": "http://new"}
    servers.pushed(live, {})
    thread.join()
    assert results == ["current"]


def test_a_server_that_joins_during_a_push_waits_for_the_next() -> None:
    servers, results, live = ServerMembership(), list[object](), {"rollout/1": "http://old"}
    servers.apply(live)
    thread = joining(servers, results)
    servers.pushed(live, {})
    assert not results
    assert servers.someone_waits()
    servers.apply(live)
    servers.pushed(live, {})
    thread.join()


def test_a_server_that_left_gets_no_push() -> None:
    servers, live = ServerMembership(), {"rollout/0": "http://a", "rollout/1": "http://b"}
    servers.leave("rollout/0")
    servers.apply(live)
    assert live == {"rollout/1": "http://b"}


def test_a_server_that_dies_while_waiting_is_told_apart_from_its_replacement() -> None:
    servers, results, live = ServerMembership(), list[object](), dict[str, str]()
    first = joining(servers, results, "http://first")
    servers.leave("rollout/1")
    first.join()
    second = joining(servers, results)
    servers.apply(live)
    servers.pushed(live, {})
    second.join()
    assert results == ["died", "current"]


def test_joining_without_a_push_times_out_and_names_the_server() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rollout/3 .*timeouts\.work_s"):
        ServerMembership().join("rollout/3", "http://x", Limit(0.01, "timeouts.work_s"))


def test_servers_that_left_or_came_back_are_named_also_at_the_same_url() -> None:
    servers, live = ServerMembership(), {"rollout/0": "http://a", "rollout/1": "http://b"}
    assert servers.apply(live) == ()
    servers.leave("rollout/1")
    servers.add("rollout/1", "http://b")
    assert servers.apply(live) == ("rollout/1",)
    assert live == {"rollout/0": "http://a", "rollout/1": "http://b"}


def test_a_server_that_waits_for_its_push_is_named_once() -> None:
    """Being named has all that is known of it forgotten, also that it has released its memory for a step."""
    servers, live = ServerMembership(), {"rollout/0": "http://a", "rollout/1": "http://old"}
    joined = servers.add("rollout/1", "http://new")
    assert servers.apply(live) == ("rollout/1",)
    assert servers.apply(live) == () and servers.someone_waits()
    servers.pushed(live, {})
    assert joined.done() and live == {"rollout/0": "http://a", "rollout/1": "http://new"}
