"""Which servers get the next push, which wait for their first weights, and calls to several servers in parallel."""

from __future__ import annotations

import socket
import threading
from functools import partial

import pytest

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.cuda_ipc import CudaIpcTransport
from async_rl.base.weights.servers import Member, Members, find_silent, start_together, wait_for_all
from tests.kit.configs import make_config
from tests.kit.publishers import CONFIG, publisher_for

PUSH = Limit(30.0, "timeouts.push_s")


def first_two() -> Members:
    return Members(CONFIG, {"rollout/0": "http://a", "rollout/1": "http://b"})


def test_a_server_that_joins_waits_for_its_first_weights_and_then_gets_the_next_push() -> None:
    members = first_two()
    before = members.current
    members.join("rollout/2", "http://c", 1)
    members.apply_reports()
    assert members.current == before and members.someone_waits()
    joined = members.take_joining()
    assert joined == (Member("rollout/2", "http://c", 1),)
    assert members.current == before and not members.someone_waits() and members.take_joining() == ()
    members.admit(joined)
    assert members.current == (*before, *joined)


def test_a_server_that_left_gets_no_push() -> None:
    members = first_two()
    members.leave("rollout/0", 1)
    assert members.names == ("rollout/0", "rollout/1"), "reports are applied between two pushes"
    members.apply_reports()
    assert members.names == ("rollout/1",)
    members.leave("rollout/1", 1)
    members.apply_reports()
    assert not members


@pytest.mark.parametrize("url", ["http://b", "http://new"])
def test_the_loss_of_an_earlier_start_removes_no_successor(url: str) -> None:
    """The driver reports the loss late or twice, or a push has lost the server before. The URL may be the same."""
    members = first_two()
    members.remove(["rollout/1"])
    members.leave("rollout/1", 1)
    members.join("rollout/1", url, 2)
    members.leave("rollout/1", 1)
    assert members.someone_waits()
    members.apply_reports()
    joined = members.take_joining()
    members.leave("rollout/1", 1)
    members.admit(joined)
    members.leave("rollout/1", 1)
    members.apply_reports()
    assert joined == (Member("rollout/1", url, 2),) == members.current[1:]


def test_what_is_known_of_a_member_is_kept_while_others_join_and_leave() -> None:
    """For example, that it has released its memory for a step."""
    members = first_two()
    admin = members.admin("rollout/1")
    members.admit([Member("rollout/2", "http://c", 1)])
    members.leave("rollout/0", 1)
    members.apply_reports()
    assert members.remove(["rollout/2"]) == (Member("rollout/2", "http://c", 1),)
    assert members.current == (Member("rollout/1", "http://b", 1),)
    assert members.admin("rollout/1") is admin


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
