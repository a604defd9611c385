"""Weight pushes in turn and out of turn, with a publisher that only records what it was given."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from async_rl.base.messages.reports import EvaluationDue, ServersLost, StepDone
from async_rl.base.seams import TransportEntry
from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.base.weights.members import Member
from learner.loop.learner import Learner
from learner.loop.updater import Updater
from tests.kit.learner.fakes import FakeClient, FakePublisher, OpenRun, pushed_bytes, until_someone_waits

pytestmark = pytest.mark.processes  # together they compute for long


def joining(learner: Learner) -> threading.Thread:
    """Start a thread in which a server that has come back waits for weights."""
    limit = learner.config.timeouts.limit("batch_s")
    thread = threading.Thread(target=learner.servers["rollout"].join, args=("rollout/1", "http://new", limit))
    thread.start()
    until_someone_waits(learner.servers["rollout"])
    return thread


def test_the_push_for_a_returning_server_is_in_the_next_steps_metrics(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(3, weight_sync={"every_steps": 2, "verify_every": 0})
    back = joining(learner)
    reports = list(learner.run())
    back.join()
    assert [number for name, number in publisher.calls if name == "push"] == [0, 2, 3]
    assert [pushed_bytes(report) for report in reports] == [[7.0], [7.0], [7.0]]
    assert [[span.pool for span in report.spans].count("rollout/0") for report in reports] == [1, 1, 1]
    assert "version/rollout/1" in {metric.key for metric in reports[0].metrics}


def test_servers_lost_in_a_push_are_reported_before_the_next_batch(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    learner = open_run(2, weight_sync={"verify_every": 0})
    back = joining(learner)
    publisher.dies_next = "rollout/0"
    reports = learner.run()
    early = next(reports)
    back.join()
    assert early == ServersLost(servers=(("rollout/0", "http://x"),))
    assert not [op for op, _ in fake_buffer.calls if op == "take"]
    publisher.dies_next = "rollout/1"
    publisher.members.add("rollout/2", "http://y")
    lost, first, second = reports
    assert lost == ServersLost(servers=(("rollout/1", "http://new"),))
    assert [report.version for report in (first, second)] == [1, 2]


def test_servers_lost_in_a_push_are_reported_before_groups_start_with_its_version(
    open_run: OpenRun, publisher: FakePublisher, fake_buffer: FakeClient
) -> None:
    """A server that the push dropped may live on. It would sample those groups from older weights."""
    learner = open_run(2, weight_sync={"verify_every": 0}, checkpoint={"every_steps": 1})
    fake_buffer.calls = publisher.calls
    publisher.members.replace([*publisher.members.current, Member("rollout/1", "http://y", 0)])
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
    publisher.members.replace([*publisher.members.current, Member("rollout/1", "http://y", 0)])
    publisher.dies_at_start = "rollout/1"
    lost, *steps = learner.run()
    assert lost == ServersLost(servers=(("rollout/1", "http://y"),), cause="rollout/1 did not answer")
    assert [step.version for step in steps] == [*range(version + 1, 3)]
    assert [name for name, _ in publisher.calls][:2] == ["connect", "connect"], "and those that live are prepared"


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
        if len(reports) == 4:  # the evaluation of version 2 still runs
            back = joining(learner)
            threading.Timer(0.3, end_the_evaluation).start()
        if len(reports) == 5:  # that of version 3
            end_the_evaluation()
    back.join()
    kinds = [(type(report), report.version) for report in reports]
    assert kinds == [(StepDone, 1), (StepDone, 2), (EvaluationDue, 2), (StepDone, 3), (EvaluationDue, 3), (StepDone, 4)]
    at = calls.index(("trained", 3))
    held, *rest = calls[at + 1 : at + 5]
    assert (held, rest) == (("evaluated", -1), [("await_push", 3), ("push", 3), ("served", 3)])
    values = reduce_metrics(reports[-1].metrics)
    assert {"time/held_by_eval_s", "time/drain_s"} <= values.keys()


def test_a_first_push_without_servers_leaves_verification_to_the_next(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(2)
    publisher.dies_next = "rollout/0"
    reports = learner.run()
    next(reports)
    assert not publisher.verified
    back = joining(learner)
    list(reports)
    back.join()
    assert len(publisher.verified) == 1


def test_servers_that_died_before_a_push_was_verified_leave_that_to_the_next(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(3)
    publisher.dies_before_verification = True
    verified = [len(publisher.verified) for report in learner.run() if isinstance(report, StepDone)]
    assert verified == [0, 1, 1]


def test_the_first_push_and_every_so_many_are_verified(open_run: OpenRun, publisher: FakePublisher) -> None:
    list(open_run(6, weight_sync={"verify_every": 2}).run())
    assert publisher.checked == [(1, True, True), (3, False, True), (5, False, True)]
    assert len(publisher.verified) == 3


def test_a_server_whose_logprobs_differ_later_is_reported_and_gets_no_more_weights(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(3, weight_sync={"verify_every": 1})
    publisher.members.replace([*publisher.members.current, Member("rollout/1", "http://y", 0)])
    reports = learner.run()
    next(reports)
    publisher.differs_next = "rollout/1"
    lost, second, third = reports
    assert lost == ServersLost(servers=(("rollout/1", "http://y"),), cause="rollout/1 differs")
    assert isinstance(second, StepDone) and isinstance(third, StepDone)
    assert reduce_metrics(second.metrics)["parity/weights/unequal"] == 1.0
    assert "parity/weights/unequal" not in reduce_metrics(third.metrics)
    assert publisher.members.names == ("rollout/0",)


CONNECTS_LATE = TransportEntry(open="no_module:publisher", delivers="folder", devices=("cpu",), connects_late=True)


def test_a_transport_that_connects_late_brings_version_0_before_the_first_batch(
    open_run: OpenRun, publisher: FakePublisher
) -> None:
    learner = open_run(1, weight_sync={"transport": f"{__name__}:CONNECTS_LATE"})
    list(learner.run())
    assert [number for name, number in publisher.calls if name == "push"] == [0, 1]
    assert len(publisher.verified) == 1


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
    publisher.device = torch.device("meta")
    learner = open_run(2, run={"seconds": 1000.0}, weight_sync={})
    steps = [report for report in learner.run() if isinstance(report, StepDone)]
    assert [step.version for step in steps] == [1, 2] and publisher.verified


def test_the_learner_scores_the_probe_before_the_push_and_keeps_nothing_gathered(
    open_run: OpenRun, publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the push servers that take turns with the learner have the memory that a forward pass needs."""
    learner = open_run(2)
    updaters, calls = list[Updater](), list[tuple[str, bool]]()

    def note_calls(holder: Any, name: str) -> None:
        function = getattr(holder, name)

        def noted(*arguments: Any, **settings: Any) -> Any:
            updaters.extend(each for each in arguments if isinstance(each, Updater))
            is_sharded = all(isinstance(parameter, DTensor) for parameter in updaters[0].policy.parameters())
            calls.append((name, is_sharded))
            return function(*arguments, **settings)

        monkeypatch.setattr(holder, name, noted)

    note_calls(Updater, "probe_logprobs")
    note_calls(publisher, "push")
    note_calls(publisher, "verify")
    list(learner.run())
    assert [name for name, _ in calls] == ["probe_logprobs", "push", "verify", "push"]
    assert all(is_sharded for name, is_sharded in calls if name != "probe_logprobs")
