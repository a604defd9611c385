"""The requests of the driver to the learner: an early end, also in the wait for a push, and a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.base.errors import NothingToLearnError
from async_rl.base.messages.reports import StepDone, TrainingEnded
from async_rl.base.run_dir.checkpoints import list_checkpoints
from learner.loop.batches import NoBatch
from learner.loop.ranks import DriverRequests
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun

pytestmark = pytest.mark.processes  # together they compute for long


def test_the_most_urgent_request_comes_first_and_the_first_reason_stays() -> None:
    requests = DriverRequests()
    assert requests.why_no_batch() is None
    requests.save()
    assert requests.why_no_batch() == NoBatch("checkpoint wanted")
    requests.end("good enough")
    requests.end("another reason")
    assert requests.why_no_batch() == NoBatch("ended", "good enough")
    requests.stop()
    assert requests.why_no_batch() == NoBatch("stopped")


@pytest.mark.parametrize(("end", "reason", "pushes"), [
    ("buffer", "the task is solved", [("push", 1), ("push", 2)]),
    ("program", "the reward is above 0.9", [("push", 1), ("push", 2)]),
    ("user", "stopped", [("push", 1)]),
])
def test_a_run_that_ends_while_a_push_waits_reports_its_step_and_saves(
    end: str, reason: str, pushes: list[tuple[str, int]], open_run: OpenRun, tmp_path: Path, publisher: FakePublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = open_run(
        50, checkpoint={"every_steps": 10}, staleness={"max": 1, "mode": "exact"}, weight_sync={"on_update": "drain"}
    )

    def await_push(client: FakeClient, version: int, interrupted: Callable[[], bool]) -> None:
        assert not interrupted()
        if version < 2:
            return
        if end == "buffer":
            raise NothingToLearnError(reason)
        if end == "program":
            learner.requests.end(reason)
        else:
            learner.stop()
        assert interrupted()

    monkeypatch.setattr(FakeClient, "await_push", await_push)
    _, *steps, ended = learner.run()
    assert [(type(report), report.version) for report in steps] == [(StepDone, 1), (StepDone, 2)]
    assert isinstance(ended, TrainingEnded) and ended.version == 2 and ended.reason.startswith(reason)
    assert ended.is_stop == (end == "user")
    assert [call for call in publisher.calls if call[0] == "push"] == pushes
    assert list(list_checkpoints(tmp_path / "run")) == [2]


def test_a_checkpoint_that_is_asked_for_is_written_once_and_training_goes_on(open_run: OpenRun, tmp_path: Path) -> None:
    learner = open_run(4, checkpoint={"every_steps": 0})
    learner.requests.save()  # of version 0, which needs none
    versions = []
    for report in learner.run():
        if not isinstance(report, StepDone):
            continue
        versions.append(report.version)
        if report.version == 2:
            learner.requests.save()
            learner.requests.save()
    assert versions == [1, 2, 3, 4]
    assert list(list_checkpoints(tmp_path / "run")) == [2]


def test_a_pause_lasts_until_it_is_ended_and_a_stop_comes_first() -> None:
    requests = DriverRequests()
    requests.pause()
    assert requests.why_no_batch() == NoBatch("paused")
    requests.save()
    assert requests.why_no_batch() == NoBatch("checkpoint wanted")
    requests.saved()
    requests.go_on()
    requests.wait_paused()  # returns at once
    assert requests.why_no_batch() is None
    requests.pause()
    requests.stop()
    requests.wait_paused()
    assert requests.why_no_batch() == NoBatch("stopped")


def test_a_learner_that_two_have_paused_waits_until_both_let_it_go_on() -> None:
    requests = DriverRequests()
    requests.pause()
    requests.pause("servers")
    requests.go_on()
    assert (requests.why_no_batch(), requests.waits_on) == (NoBatch("paused"), "servers")
    waiting = threading.Thread(target=requests.wait_paused)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it would ask again and again"
    requests.go_on("servers")
    waiting.join(30)
    assert requests.why_no_batch() is None
