"""Which servers get the next push, and whose wait for the weights it ends. Calls to several servers in parallel."""

from __future__ import annotations

import socket
import threading
from functools import partial

import pytest

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.cuda_ipc import CudaIpcTransport
from async_rl.base.weights.members import Member, Members, find_silent, start_together, wait_for_all
from tests.kit.configs import make_config
from tests.kit.learner.fakes import until_someone_waits
from tests.kit.publishers import CONFIG, publisher_for

PUSH = Limit(30.0, "timeouts.push_s")
URLS = {"rollout/0": "http://a", "rollout/1": "http://old"}


def joining(members: Members, results: list[str], url: str = "http://new") -> threading.Thread:
    def join() -> None:
        try:
            members.join("rollout/1", url, Limit(10.0, "timeouts.batch_s"))
            results.append("current")
        except WeightSyncError:
            results.append("died")

    thread = threading.Thread(target=join)
    thread.start()
    until_someone_waits(members)
    return thread


def urls(members: Members) -> dict[str, str]:
    return {member.name: member.url for member in members.current}


def test_a_server_has_joined_when_a_push_has_reached_it() -> None:
    members, results = Members(CONFIG, URLS), list[str]()
    thread = joining(members, results)
    assert urls(members) == URLS, "reports are applied between two pushes"
    members.apply_reports()
    assert urls(members) == {"rollout/0": "http://a", "rollout/1": "http://new"}
    assert not results
    members.note_served()
    thread.join()
    assert results == ["current"]
    assert not members.someone_waits()


def test_a_server_that_dies_in_its_first_push_fails_to_join() -> None:
    members, results = Members(CONFIG, URLS), list[str]()
    thread = joining(members, results)
    members.apply_reports()
    assert members.remove(["rollout/1"]) == (Member("rollout/1", "http://new", 1),)
    thread.join()
    assert results == ["died"]


@pytest.mark.parametrize("url", ["http://new", "http://old"])
def test_a_push_that_lost_a_server_does_not_fail_its_replacement(url: str) -> None:
    """The driver learns of the death first, and the replacement waits before the push that hung has ended."""
    members, results = Members(CONFIG, URLS), list[str]()
    members.leave("rollout/1")
    thread = joining(members, results, url)
    members.remove(["rollout/1"])
    members.note_served()
    assert members.someone_waits() and not results
    members.apply_reports()
    assert urls(members) == {"rollout/0": "http://a", "rollout/1": url}
    members.note_served()
    thread.join()
    assert results == ["current"]


def test_a_server_that_joins_during_a_push_waits_for_the_next() -> None:
    members, results = Members(CONFIG, URLS), list[str]()
    thread = joining(members, results)
    members.note_served()
    assert not results and members.someone_waits()
    members.apply_reports()
    members.note_served()
    thread.join()


def test_a_server_that_left_gets_no_push() -> None:
    members = Members(CONFIG, URLS)
    members.leave("rollout/0")
    members.apply_reports()
    assert urls(members) == {"rollout/1": "http://old"}
    members.leave("rollout/1")
    members.apply_reports()
    assert not members


def test_a_server_that_dies_while_waiting_is_distinguished_from_its_replacement() -> None:
    members, results = Members(CONFIG, {}), list[str]()
    first = joining(members, results, "http://first")
    members.leave("rollout/1")
    first.join()
    second = joining(members, results)
    members.apply_reports()
    members.note_served()
    second.join()
    assert results == ["died", "current"]


def test_joining_without_a_push_times_out_and_names_the_server() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rollout/3 .*timeouts\.batch_s"):
        Members(CONFIG, {}).join("rollout/3", "http://x", Limit(0.01, "timeouts.batch_s"))


@pytest.mark.parametrize("url", ["http://old", "http://new"])
def test_a_server_that_was_started_again_is_another_member_also_at_its_url(url: str) -> None:
    members = Members(CONFIG, URLS)
    before, admin = members.current, members.admin("rollout/1")
    members.leave("rollout/1")
    members.add("rollout/1", url)
    members.apply_reports()
    assert members.current == (before[0], Member("rollout/1", url, 1))
    assert members.admin("rollout/1") is not admin


def test_what_is_known_of_a_server_that_waits_for_its_push_is_kept() -> None:
    """For example, that it has released its memory for a step."""
    members = Members(CONFIG, URLS)
    joined = members.add("rollout/1", "http://new")
    members.apply_reports()
    admin = members.admin("rollout/1")
    members.apply_reports()
    assert members.admin("rollout/1") is admin and members.someone_waits()
    members.note_served()
    assert joined.done()


def test_a_server_that_misses_a_single_probe_is_not_taken_for_dead() -> None:
    answers = {"busy": iter([False, True]), "dead": iter([False, False]), "well": iter([True])}
    assert find_silent({name: partial(next, answer) for name, answer in answers.items()}) == ("dead",)


def test_servers_that_are_busy_for_a_while_are_waited_for() -> None:
    busy = iter([False, False, False, True])
    assert wait_for_all({"busy": partial(next, busy), "well": lambda: True}, 30.0) == ()
    assert wait_for_all({"dead": lambda: False, "well": lambda: True}, 0.1) == ("dead",)


def test_the_first_failure_is_raised_while_another_call_still_runs() -> None:
    def refuse() -> None:
        raise ValueError("no such group")

    with pytest.raises(WeightSyncError, match="http://b"):
        start_together({"learner": threading.Event().wait, "http://b": refuse}, PUSH, "push of version 3")()


def test_a_timeout_names_the_call_that_did_not_return_and_the_key() -> None:
    limit = Limit(0.3, "timeouts.push_s")
    with pytest.raises(WaitTimeoutError, match=r"timeouts\.push_s") as caught:
        start_together({"learner": lambda: 1, "http://b": threading.Event().wait}, limit, "joining")()
    assert caught.value.names == ("http://b",)


def test_results_come_back_by_name() -> None:
    assert start_together({"a": lambda: 1, "b": lambda: 2}, PUSH, "sum")() == {"a": 1, "b": 2}


def test_a_call_that_has_waited_too_long_itself_is_a_timeout_too() -> None:
    def wait_too_long() -> None:
        raise WaitTimeoutError("the learner waited 3 s")

    with pytest.raises(WaitTimeoutError, match="http://b"):
        start_together({"http://b": wait_too_long}, PUSH, "push of version 3")()


def test_a_server_that_never_answers_is_named_with_the_timeouts_key() -> None:
    config = make_config(timeouts={"push_s": 0.3})
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        publisher = publisher_for(config, [url], CudaIpcTransport)
        with pytest.raises(WaitTimeoutError, match=rf"timeouts\.push_s.*{url}"):
            publisher.release_server_memory()
        # The request and the wait for it have one limit, so either may end first.
        with pytest.raises((WaitTimeoutError, WeightSyncError), match=r"(?=.*rollout/0).*timeouts\.push_s"):
            publisher.members.call(lambda admin: admin.end_update(), "end of a weight push")
        publisher.close()
