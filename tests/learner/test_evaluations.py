"""Evaluations beside training as the learner sees them: which versions it pushes, skips, and waits for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from async_rl.base.messages.reports import (
    EvaluationDue,
    EvaluationSkipped,
    LearnerReport,
    ServersFilled,
    ServersLost,
    StepDone,
)
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.base.weights.servers import Member
from learner.loop import pushes as pushes_module
from learner.loop.learner import Learner
from learner.loop.pushes import EvalSchedule
from tests.kit.configs import learner_config
from tests.kit.learner.fakes import FakePublisher, OpenRun

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture
def of_eval(publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch) -> FakePublisher:
    """The publisher for the evaluation servers; `publisher` is that for the rollout servers."""
    other = FakePublisher()
    opened = itertools.cycle([publisher, other])  # each learner opens both
    monkeypatch.setattr(pushes_module, "open_publisher", lambda *_: next(opened))
    return other


@pytest.fixture
def open_beside(open_run: OpenRun, of_eval: FakePublisher) -> OpenRun:
    """Opens the learner of a run with an evaluation server, of which every second version is due."""
    beside = {"eval": {"every_steps": 2, "pin_version": True}, "placement": {"eval": {"servers": 1}}}
    return partial(open_run, **beside)


def evaluate(learner: Learner, ends: Sequence[int]) -> Iterator[LearnerReport]:
    """Yield the learner's reports after the first weights of the rollout servers.

    The evaluations of the versions in `ends` end before the next step.
    """
    reports = learner.run()
    assert isinstance(next(reports), ServersFilled)
    for report in reports:
        yield report
        if isinstance(report, EvaluationDue) and report.version in ends:
            learner.evaluations.schedule.ended()


def test_the_versions_that_are_due_are_pushed_to_the_evaluation_servers_alone(
    open_beside: OpenRun, publisher: FakePublisher, of_eval: FakePublisher
) -> None:
    learner = open_beside(6)
    reports = list(evaluate(learner, ends=[0, 2, 4]))
    due = [report for report in reports if not isinstance(report, StepDone)]
    assert due == [EvaluationDue(version=version, servers=("eval/0",)) for version in (0, 2, 4)]
    assert [version for name, version in publisher.calls if name == "push"] == [1, 2, 3, 4, 5, 6]
    assert [version for name, version in of_eval.calls if name == "push"] == [2, 4], "they have loaded version 0"
    assert len(publisher.verified) == len(of_eval.verified) == 1
    steps = [report for report in reports if isinstance(report, StepDone)]
    times = [{metric.key for metric in step.metrics if metric.key.startswith("time/")} for step in steps]
    assert ["time/eval_push_s" in keys for keys in times] == [False, True, False, True, False, False]
    assert not any("time/held_by_eval_s" in keys for keys in times), "though eval.pin_version is set"
    assert "eval" not in {span.state for step in steps for span in step.spans}


def test_rollout_servers_too_make_one_evaluation_at_a_time(open_run: OpenRun) -> None:
    learner = open_run(10, eval={"every_steps": 2})
    reports = list(evaluate(learner, ends=[2]))
    assert [report for report in reports if not isinstance(report, StepDone)] == [
        EvaluationDue(version=2), EvaluationDue(version=4),
        *(EvaluationSkipped(version=v, reason="the evaluation before it is still running") for v in (6, 8)),
    ]
    assert [report.version for report in reports if isinstance(report, StepDone)] == list(range(1, 11)), "none waited"


@pytest.mark.parametrize("has_servers", [True, False])
def test_no_version_that_is_due_is_skipped_where_its_checkpoint_may_be_the_best(
    open_beside: OpenRun, open_run: OpenRun, monkeypatch: pytest.MonkeyPatch, has_servers: bool
) -> None:
    best = {"checkpoint": {"every_steps": 2, "keep_best": 1}}
    learner = open_beside(7, **best) if has_servers else open_run(7, eval={"every_steps": 2}, **best)
    schedule, held = learner.evaluations.schedule, []

    def wait() -> None:
        if not schedule.is_idle:
            held.append(learner.version)
        schedule.ended()

    monkeypatch.setattr(schedule, "wait", wait)
    reports = [report for report in evaluate(learner, ends=[0]) if not isinstance(report, StepDone)]
    servers = {"servers": ("eval/0",)} if has_servers else {}
    assert reports == [EvaluationDue(version=v, **servers) for v in ((0, 2, 4, 6) if has_servers else (2, 4, 6))]
    assert held == [4, 6], "other pushes do not wait"


def test_a_lost_evaluation_server_costs_no_push_until_another_takes_its_place(
    open_beside: OpenRun, of_eval: FakePublisher
) -> None:
    learner = open_beside(8, weight_sync={"verify_every": 0})
    of_eval.dies_next = "eval/0"
    reports = []
    for report in evaluate(learner, ends=[0, 2, 4, 6]):
        reports.append(report)
        if isinstance(report, EvaluationSkipped) and report.version == 4:
            learner.servers["eval"].join("eval/0", "http://new", 2)
    gone = "no evaluation server is up"
    assert [report for report in reports if not isinstance(report, StepDone)] == [
        EvaluationDue(version=0, servers=("eval/0",)),
        ServersLost(servers=(("eval/0", 1),), cause="eval/0 did not answer"), EvaluationSkipped(version=2, reason=gone),
        EvaluationSkipped(version=4, reason=gone), EvaluationDue(version=6, servers=("eval/0",)),
    ]
    pushes = [version for name, version in of_eval.calls if name == "push"]
    assert pushes == [2, 2, 6], "the push that lost it was repeated without it"
    assert of_eval.members.current == (Member("eval/0", "http://new", 2),)


def test_a_resumed_learner_first_has_the_version_of_its_checkpoint_evaluated(
    open_beside: OpenRun, tmp_path: Path, of_eval: FakePublisher
) -> None:
    kept = {"checkpoint": {"every_steps": 2}}
    list(evaluate(open_beside(4, **kept), ends=[0, 2]))
    of_eval.calls.clear()
    of_eval.verified.clear()
    learner = open_beside(6, run={"resume": checkpoint_folder(tmp_path / "run", 2)}, **kept)
    reports = [report for report in evaluate(learner, ends=[2, 4]) if isinstance(report, EvaluationDue)]
    assert [report.version for report in reports] == [2, 4], "not that of version 0"
    assert [version for name, version in of_eval.calls if name == "push"] == [2, 4]
    assert len(of_eval.verified) == 1, "of the first push after a batch"


@pytest.mark.parametrize(("version", "is_due"), [
    (3, False), (4, False), (5, True), (6, True), (7, False), (10, True), (11, True), (12, True), (13, False),
])
def test_a_resume_evaluates_a_version_that_is_no_multiple_of_eval_every_steps(version: int, is_due: bool) -> None:
    """Every third version was pushed. A resume pushes that of its checkpoint, which is due if none was since 5 or 10.
    """
    schedule = EvalSchedule(
        learner_config(eval={"every_steps": 5}, weight_sync={"every_steps": 3})
    )
    schedule.resume(version)
    assert schedule.served(version) == is_due
