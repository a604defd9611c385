"""Weight pushes in turn and out of turn, with a publisher that only records what it was given."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.messages.reports import EvaluationDue, LearnerReport, ServersFilled, ServersLost, StepDone
from async_rl.base.telemetry.metrics import reduce_metrics
from learner.loop.learner import Learner
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun

pytestmark = pytest.mark.processes  # together they compute for long


def join(learner: Learner, name: str = "rollout/1", start: int = 1) -> None:
    """Report a server that has started, as the driver does."""
    learner.servers["rollout"].join(name, f"http://{name}", start)


def values_of(report: LearnerReport) -> dict[str, float]:
    assert isinstance(report, StepDone)
    return reduce_metrics(report.metrics)


def test_a_learner_whose_batches_are_always_ready_fills_a_joiner_after_its_next_push(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    """The others do not wait for it: groups may start with the version before."""
    learner = open_run(3, weight_sync={"verify_every": 0})
    fake_buffer.calls, fake_buffer.is_ready = publisher.calls, True
    reports = []
    for report in learner.run():
        reports.append(report)
        if report.version == 1:
            join(learner)
    assert ServersFilled(servers=(("rollout/1", 1),), version=2) in reports
    calls = [(name, version) for name, version in publisher.calls if name in ("fill", "push", "served", "take")]
    assert calls == [
        ("fill", 0), ("served", 0), ("take", 0), ("push", 1), ("served", 1), ("take", 1),
        ("push", 2), ("served", 2), ("fill", 2), ("take", 2), ("push", 3),
    ]  # fmt: skip
    assert publisher.members.names == ("rollout/0", "rollout/1")


def test_a_paused_learner_fills_a_joiner(open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient) -> None:
    learner = open_run(1, weight_sync={"verify_every": 0})
    fake_buffer.calls = publisher.calls
    reports = learner.run()
    next(reports)
    learner.requests.pause()
    join(learner)
    assert next(reports) == ServersFilled(servers=(("rollout/1", 1),), version=0)
    assert publisher.calls == [("fill", 0), ("served", 0), ("fill", 0)]
    learner.requests.go_on()
    assert [report.version for report in reports] == [1]


def test_a_joiner_with_a_version_of_its_own_is_reported_once_all_serve_it(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    """The joiner's tokens would else be newer than any slot may expect."""
    learner = open_run(3, weight_sync={"every_steps": 2, "verify_every": 0})
    fake_buffer.calls = publisher.calls
    for report in learner.run():
        publisher.calls.append((type(report).__name__, report.version))
        if isinstance(report, StepDone) and report.version == 1:
            join(learner)
    at = publisher.calls.index(("StepDone", 1))
    assert publisher.calls[at + 1 : at + 6] == [
        ("fill", 1), ("push", 1), ("served", 1), ("ServersFilled", 1), ("take", 1)
    ]  # fmt: skip


def test_servers_lost_in_a_push_are_reported_before_the_next_batch(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    learner = open_run(2, weight_sync={"verify_every": 0})
    assert publisher.filler is not None
    publisher.filler.dies_next = "rollout/0"
    join(learner)
    reports = learner.run()
    assert next(reports) == ServersFilled(servers=(("rollout/1", 1),), version=0)
    assert next(reports) == ServersLost(servers=(("rollout/0", 1),), cause="rollout/0 did not answer")
    assert not [op for op, _ in fake_buffer.calls if op == "take"]
    publisher.dies_next = "rollout/1"
    join(learner, "rollout/2")
    filled, lost, first, second = reports
    assert filled == ServersFilled(servers=(("rollout/2", 1),), version=0)
    assert lost == ServersLost(servers=(("rollout/1", 1),), cause="rollout/1 did not answer")
    assert [report.version for report in (first, second)] == [1, 2]


def test_servers_lost_in_a_push_are_reported_before_groups_start_with_its_version(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    """A server that the push dropped may live on. It would sample those groups from older weights."""
    learner = open_run(2, weight_sync={"verify_every": 0}, checkpoint={"every_steps": 1})
    fake_buffer.calls = publisher.calls
    join(learner)
    publisher.dies_next = "rollout/1"
    for report in learner.run():
        publisher.calls.append((type(report).__name__, getattr(report, "version", -1)))
    names = [name for name, *_ in publisher.calls]
    after = names[names.index("trained") + 1 : names.index("StepDone") + 1]
    assert after == ["push", "push", "ServersLost", "served", "buffer_checkpoint", "StepDone"]


@pytest.mark.parametrize("version", [0, 1])
def test_a_server_that_dies_while_the_learner_starts_is_reported_and_not_an_error(
    version: int, open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(2, weight_sync={"verify_every": 0})
    learner.version = version
    join(learner)
    assert publisher.filler is not None
    publisher.filler.dies_next = "rollout/1"
    filled, lost, *steps = learner.run()
    assert lost == ServersLost(servers=(("rollout/1", 1),), cause="rollout/1 did not answer")
    assert filled == ServersFilled(servers=(("rollout/0", 1),), version=version)
    assert [step.version for step in steps] == [*range(version + 1, 3)]


def test_a_push_out_of_turn_waits_like_any_other_and_opens_admission(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    learner = open_run(
        4, eval={"every_steps": 1, "pin_version": True},
        weight_sync={"every_steps": 2, "on_update": "drain", "verify_every": 0},
    )
    calls = fake_buffer.calls = publisher.calls

    def end_the_evaluation() -> None:
        calls.append(("evaluated", -1))
        learner.evaluations.schedule.ended()

    reports = []
    for report in learner.run():
        reports.append(report)
        if isinstance(report, StepDone) and report.version == 3:  # the evaluation of version 2 still runs
            join(learner)
            threading.Timer(0.3, end_the_evaluation).start()
        if isinstance(report, EvaluationDue) and report.version == 3:
            end_the_evaluation()
    kinds = [(type(report), report.version) for report in reports]
    assert kinds == [
        (ServersFilled, 0), (StepDone, 1), (StepDone, 2), (EvaluationDue, 2), (StepDone, 3), (EvaluationDue, 3),
        (ServersFilled, 3), (StepDone, 4),
    ]  # fmt: skip
    at = calls.index(("trained", 3))
    assert calls[at + 1 : at + 6] == [
        ("fill", 3), ("evaluated", -1), ("await_push", 3), ("push", 3), ("served", 3)
    ]  # fmt: skip
    values = reduce_metrics(reports[-1].metrics)
    assert {"time/held_by_eval_s", "time/drain_s"} <= values.keys()


def test_a_first_push_without_servers_leaves_verification_to_the_next(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(2)
    publisher.dies_next = "rollout/0"
    reports = learner.run()
    filled, lost = next(reports), next(reports)
    assert isinstance(filled, ServersFilled) and isinstance(lost, ServersLost)
    assert not publisher.verified
    join(learner, "rollout/0", start=2)
    assert [report for report in reports if isinstance(report, ServersFilled)] == [
        ServersFilled(servers=(("rollout/0", 2),), version=1)
    ]  # fmt: skip
    assert len(publisher.verified) == 1


def test_the_first_push_and_every_so_many_are_verified(open_run: OpenRun, publisher: FakePublisher) -> None:
    """A fill is verified too, but for logprobs: its weights are erased before it, and compared after it."""
    list(open_run(6, weight_sync={"verify_every": 2}).run())
    assert publisher.filler is not None
    assert publisher.filler.checked == [(0, True, True)]
    assert publisher.checked == [(1, False, True), (3, False, True), (5, False, True)]
    assert (len(publisher.filler.verified), len(publisher.verified)) == (0, 3)


def test_a_server_whose_logprobs_differ_later_is_reported_and_gets_no_more_weights(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(3, weight_sync={"verify_every": 1})
    join(learner)
    reports = learner.run()
    filled, first = next(reports), next(reports)
    assert isinstance(filled, ServersFilled) and isinstance(first, StepDone)
    publisher.differs_next = "rollout/1"
    lost, second, third = reports
    assert lost == ServersLost(servers=(("rollout/1", 1),), cause="rollout/1 differs")
    assert values_of(second)["parity/weights/unequal"] == 1.0
    assert "parity/weights/unequal" not in values_of(third)
    assert publisher.members.names == ("rollout/0",)


def test_verification_compares_the_logprobs_of_the_pushed_weights(
    open_run: OpenRun, tmp_path: Path, publisher: FakePublisher
) -> None:
    list(open_run(1).run())
    ((tokens, logprobs),) = publisher.verified
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    expected = lm(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_ranks_that_wait_for_rank_0_use_no_device(open_run: OpenRun, publisher: FakePublisher) -> None:
    """With NCCL their GPUs would be busy meanwhile. gloo refuses the tensors of another device than the CPU."""
    publisher.transport.device = torch.device("meta")
    learner = open_run(2, run={"seconds": 1000.0}, weight_sync={})
    steps = [report for report in learner.run() if isinstance(report, StepDone)]
    assert [step.version for step in steps] == [1, 2] and publisher.verified
