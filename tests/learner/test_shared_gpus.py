"""Steps of the learner and starts of servers on its GPUs never overlap."""

from __future__ import annotations

import threading
import time

import pytest

from async_rl.base.config import (
    Limit,
)
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.messages.reports import ServersFilled
from async_rl.run.processes.actors import LearnerActor
from learner.loop.learner import Learner
from learner.loop.ranks import SharedGpus
from tests.kit.learner.fakes import FakePublisher, OpenRun

pytestmark = pytest.mark.processes  # together they compute for long

SOON, LATE = Limit(0.02, "timeouts.batch_s"), Limit(10.0, "timeouts.batch_s")


def started(work: threading.Thread) -> threading.Thread:
    work.start()
    return work


def test_a_start_waits_for_the_end_of_the_step_and_holds_back_the_next_one() -> None:
    turns = SharedGpus()
    turns.begin_step(SOON)
    with pytest.raises(WaitTimeoutError, match=r"rollout/0 .*timeouts\.batch_s"):
        turns.begin_start("rollout/0", SOON)
    waiting = started(threading.Thread(target=turns.begin_start, args=("rollout/1", LATE)))
    turns.end_step()
    waiting.join(10)
    turns.begin_start("rollout/2", SOON)  # several may start at once
    turns.end_start("rollout/2")
    with pytest.raises(WaitTimeoutError, match=r"rollout/1"):
        turns.begin_step(SOON)
    stepping = started(threading.Thread(target=turns.begin_step, args=(LATE,)))
    turns.end_start("rollout/1")
    stepping.join(10)
    with pytest.raises(WaitTimeoutError):
        turns.begin_start("rollout/0", SOON)


def test_the_end_of_a_start_that_never_began_changes_nothing() -> None:
    turns = SharedGpus()
    turns.end_start("rollout/0")
    turns.begin_step(SOON)
    turns.end_step()
    turns.begin_start("rollout/0", SOON)


@pytest.fixture
def learner(open_run: OpenRun) -> Learner:
    """A learner that makes two steps in turns with its server."""
    return open_run(
        2, weight_sync={"verify_every": 0}, rollout={"engine": "sglang"}, placement={"colocated": True},
        staleness={"max": 0}, timeouts={"batch_s": 20},
    )


def test_no_step_and_no_fill_begins_on_a_shared_gpu_while_a_server_starts_there(
    learner: Learner, publisher: FakePublisher
) -> None:
    soon = learner.config.timeouts.limit("buffer_s")

    def start_for_a_while(name: str) -> None:
        def end() -> None:
            publisher.calls.append((name, -1))
            learner.shared_gpus.end_start(name)

        learner.shared_gpus.begin_start(name, soon)
        threading.Timer(0.3, end).start()

    start_for_a_while("first")
    reports = learner.run()
    assert isinstance(next(reports), ServersFilled)
    start_for_a_while("second")
    assert next(reports).version == 1
    start_for_a_while("third")  # the step has ended with its push
    learner.servers["rollout"].join("rollout/1", "http://rollout/1", 1)
    assert isinstance(next(reports), ServersFilled)
    learner.shared_gpus.begin_start("fourth", soon)  # the fill has ended
    learner.shared_gpus.end_start("fourth")
    list(reports)
    step = ["release_server_memory", "push"]
    assert [call for call, _ in publisher.calls] == ["first", "push", "second", *step, "third", "push", *step]


def test_a_server_that_joins_while_a_step_waits_for_it_releases_its_memory_too(
    learner: Learner, publisher: FakePublisher
) -> None:
    """Its start must not be taken for ended before that, and it gets its first weights after the step."""
    actor = LearnerActor.__new__(LearnerActor)
    actor._config, actor._learner = learner.config, learner
    running = learner.run()
    first_fill = next(running)
    actor.begin_start("rollout/1")

    def join() -> None:
        while learner.status().doing != "waits for a server to start on its GPU":
            time.sleep(0.01)
        actor.add_server("rollout/1", "http://rollout/1", 1)

    joining = started(threading.Thread(target=join, daemon=True))
    reports = [first_fill, *running]
    joining.join(10)
    assert not joining.is_alive() and publisher.released == ["http://rollout/0", "http://rollout/1"] * 2
    assert [name for name, _ in publisher.calls] == ["push", *["release_server_memory", "push"] * 2]
    assert [report for report in reports if isinstance(report, ServersFilled)] == [
        ServersFilled(servers=(("rollout/0", 1),), version=0), ServersFilled(servers=(("rollout/1", 1),), version=1)
    ]  # fmt: skip


@pytest.mark.parametrize("leaves", [False, True])
def test_a_server_that_joins_in_the_wait_for_a_batch_gets_a_push_with_all_others(
    leaves: bool, learner: Learner, publisher: FakePublisher
) -> None:
    """A server that leaves before this push is not reported."""
    reports = learner.run()
    next(reports)
    learner.servers["rollout"].join("rollout/1", "http://rollout/1", 1)
    if leaves:
        learner.servers["rollout"].leave("rollout/1", 1)
    filled = [report for report in reports if isinstance(report, ServersFilled)]
    assert filled == ([] if leaves else [ServersFilled(servers=(("rollout/1", 1),), version=0)])
    pushes = ["push"] if leaves else ["push", "push"]
    assert [name for name, _ in publisher.calls] == [*pushes, *["release_server_memory", "push"] * 2]
    assert publisher.members.names == ("rollout/0", "rollout/1")[: 1 + (not leaves)]
