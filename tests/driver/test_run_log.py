from __future__ import annotations

import gc
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from async_rl.base.config import CheckpointConfig, EvalConfig, TimeoutsConfig
from async_rl.base.messages.reports import HeldOutAnswer, StepDone, TrainingEnded, WorkerReport
from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder, list_checkpoints, write_training_state
from async_rl.base.telemetry.metrics import Figures, Metric, read_metrics, reduce_metrics
from async_rl.base.telemetry.timeline import Sample, Span, State, Usage
from async_rl.run.log import run_log, run_timeline
from async_rl.run.log.run_log import RunLog, RunResults
from async_rl.run.log.run_timeline import RunTimeline
from tests.kit.configs import make_config
from tests.kit.runs import logged


def make_log(
    tmp_path: Path, servers: int = 1, ranks: int = 1, resume: str = "", evals: int = 0, **sections: Any
) -> RunLog:
    placement = {"learner": {"ranks": ranks}, "rollout": {"servers": servers}, "eval": {"servers": evals}}
    run, logging = {"name": "r", "dir": str(tmp_path), "resume": resume}, {"wandb": "disabled"}
    return RunLog(make_config(run=run, logging=logging, placement=placement, **sections))


def learner_step(step: int, start_s: float, end_s: float) -> StepDone:
    span = Span("learner/0", "busy", start_s, end_s)
    return StepDone(version=step, metrics=(Metric("reward/mean", float(step)),), spans=(span,))


def lines(tmp_path: Path) -> list[dict[str, float]]:
    return logged(tmp_path / "r")


def test_a_step_is_logged_once_the_rollout_pool_has_reported_beyond_its_end(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    log.add("learner/0", learner_step(2, 10.0, 20.0))
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 15.0),)))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    assert log.has_open_steps
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "wait_weights", 15.0, 25.0),)))
    assert not log.has_open_steps
    second = lines(tmp_path)[1]
    assert second["utilisation/learner"] == 1.0
    assert second["utilisation/rollout"] == 0.5  # busy for 5 of the 10 seconds
    log.close()


def test_a_step_waits_for_no_evaluation_server_and_counts_skipped_versions(tmp_path: Path) -> None:
    log = make_log(tmp_path, evals=1, eval=EvalConfig(every_steps=1))
    for step in (1, 2):
        log.add("eval/0", WorkerReport(spans=(Span("eval/0", "busy", 0.0, 1.0),)))
        log.add("learner/0", learner_step(step, step * 10.0 - 10, step * 10.0))
        log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", step * 10.0 - 10, step * 10.0 + 1),)))
        log.skipped_eval(step, "the evaluation before it is still running")
    log.lost("eval/0")
    log.add("eval/0", WorkerReport(spans=(Span("eval/0", "busy", 21.0, 22.0),)))
    log.add("learner/0", learner_step(3, 20.0, 30.0))
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 21.0, 31.0),)))
    assert not log.has_open_steps
    assert [line.get("eval/skipped") for line in lines(tmp_path)] == [None, 1.0, 2.0]
    assert log.summary({})["skipped_evaluations"] == 2
    log.close()


def test_steps_that_were_open_at_a_crash_are_in_the_metrics_file(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    log.close()
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == [(1, 1.0)]
    assert (tmp_path / "r" / "timeline.json").exists()


def test_a_push_after_the_last_step_is_logged_on_a_line_of_its_own(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    pushed = (Metric("push/bytes", 7.0, "sum"),)
    log.add("learner/0", TrainingEnded(version=1, metrics=pushed, reason="the task is solved"))
    log.close()
    (record,) = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert (record["reward/mean"], record["late/push/bytes"]) == (1.0, 7.0)
    assert log.summary({})["steps"] == 1


class RecordedRun:
    """Sends the reports of a run with `servers` rollout servers and `ranks` learner ranks; keeps all their spans and
    samples for comparison.
    """

    def __init__(self, log: RunLog, servers: int, ranks: int, step_s: int) -> None:
        self._log = log
        self._servers = [f"rollout/{i}" for i in range(servers)]
        self._ranks = [f"learner/{rank}" for rank in range(ranks)]
        self._step_s = step_s
        self.version = 0
        self.spans: list[Span] = []
        self.samples: list[Sample] = []

    def step(self) -> None:
        """One step: servers are busy except in its last fifth and report twice a second; each rank reports once."""
        start_s = 100.0 + self.version * self._step_s
        self.version += 1
        for half in range(2 * self._step_s):
            at_s = start_s + half / 2
            state: State = "busy" if half < 1.6 * self._step_s else "wait_weights"
            for name in self._servers:
                self._tell(
                    name, [Span(name, state, at_s, at_s + 0.5)], [Sample(name, "occupancy", at_s + 0.4, half % 7 / 7)]
                )
        end_s = start_s + self._step_s - 0.25
        for rank, name in enumerate(self._ranks):
            held_s = start_s - rank / 64  # it tells now what it did at the end of the last step
            spans = [Span(name, "wait_data", held_s, start_s + 2), Span(name, "busy", start_s + 2, end_s - rank / 64)]
            self._tell(name, spans, [Sample(name, "gpu", start_s + i / 2, 0.75) for i in range(2 * self._step_s)])
        for name in self._servers:
            self._tell(name, [Span(name, "wait_weights", start_s + self._step_s, start_s + self._step_s)], [])

    def _tell(self, process: str, spans: list[Span], samples: list[Sample]) -> None:
        measured: dict[str, Any] = {"spans": tuple(spans), "samples": tuple(samples)}
        if process.startswith("learner"):
            metrics = (Metric("staleness/mean", 1.0),) if process == "learner/0" else ()
            self._log.add(process, StepDone(version=self.version, metrics=metrics, **measured))
        else:
            self._log.add(process, WorkerReport(**measured))
        self.spans += spans
        self.samples += samples


def num_kept(log: RunLog) -> int:
    """The number of objects that are reachable from the log."""
    kept = (dict, list, tuple, float, Span, Sample, Metric, StepDone, WorkerReport)
    found: dict[int, object] = {}
    new: list[object] = [vars(log)]
    while new:
        found |= {id(each): each for each in new}
        new = [
            each for each in gc.get_referents(*new)
            if id(each) not in found and isinstance(each, kept)
        ]
    return len(found)


def test_the_memory_of_the_log_does_not_grow_with_the_run(tmp_path: Path) -> None:
    log = make_log(tmp_path, servers=3, ranks=2)
    run = RecordedRun(log, servers=3, ranks=2, step_s=10)
    kept = []
    for _ in range(60):
        run.step()
        kept.append(num_kept(log))
    log.close()
    assert kept[-1] <= kept[9] + 2 * 50  # the time each step ended, and its version
    assert len(read_metrics(tmp_path / "r" / "metrics.jsonl")) == 60


@pytest.mark.parametrize(("best_by", "kept"), [("accuracy", (20, 30, 50, 60)), ("reward", (20, 40, 50, 60))])
def test_a_resume_keeps_the_best_checkpoints(
    tmp_path: Path, best_by: Literal["accuracy", "reward"], kept: tuple[int, ...]
) -> None:
    run_dir = tmp_path / "r"
    for version in (20, 30, 40, 50, 60):
        checkpoint_folder(run_dir, version).mkdir(parents=True)
        saved = TrainingState(
            version=version, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={}
        )
        write_training_state(checkpoint_folder(run_dir, version), saved)
    values = {0: 0.1, 10: 0.5, 20: 0.9, 30: 0.8, 40: 0.4, 50: 0.3, 60: 0.2}
    rewards = {0: 0.1, 10: 0.5, 20: 2.9, 30: 0.8, 40: 1.4, 50: 0.3, 60: 0.2}
    records = [
        json.dumps({"step": version, "eval/accuracy": value, "eval/reward": rewards[version]}) + "\n"
        for version, value in values.items()
    ]
    (run_dir / "metrics.jsonl").write_text("".join(records))
    make_log(
        tmp_path, resume=str(checkpoint_folder(run_dir, 60)), eval=EvalConfig(every_steps=10),
        checkpoint=CheckpointConfig(every_steps=10, keep_last=2, keep_best=2, best_by=best_by),
    ).close()
    assert tuple(list_checkpoints(run_dir)) == kept


def test_an_idle_pool_is_one_slice_of_the_trace(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    for half in range(200):
        span = Span("rollout/0", "wait_weights", half / 2, half / 2 + 0.5)
        log.add("rollout/0", WorkerReport(spans=(span,)))
    log.close()
    events = json.loads((tmp_path / "r" / "timeline.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events if event["ph"] == "X"] == [100e6]


def test_the_time_without_a_lost_rollout_server_is_named_in_the_trace(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 1.0),)))
    for _ in range(2):  # lost once more before it was back
        log.lost("rollout/0")
    log.restarted("rollout/0", 3)
    log.close()
    events = json.loads((tmp_path / "r" / "timeline.json").read_text())["traceEvents"]
    assert [(event["cat"], event["name"]) for event in events if event["ph"] == "X"] == [
        ("busy", "busy"), ("other", "restart"),
    ]  # fmt: skip


def test_a_lost_rollout_server_lowers_the_utilisation_of_every_step_until_it_is_back(tmp_path: Path) -> None:
    log = make_log(tmp_path, servers=2)
    for step in range(1, 6):
        start_s, end_s = step * 10.0 - 10, step * 10.0
        for name in ("rollout/0", "rollout/1")[: 1 if step in (3, 4) else 2]:
            log.add(name, WorkerReport(spans=(Span(name, "busy", start_s, end_s + 1),)))
        if step == 3:
            log.lost("rollout/1")
        log.add("learner/0", learner_step(step, start_s, end_s))
    log.close()
    shares = [(line["utilisation/rollout"], line["utilisation/rollout/other"]) for line in lines(tmp_path)[1:]]
    assert shares == [(1.0, 0.0), pytest.approx((0.55, 0.45)), (0.5, 0.5), (1.0, 0.0)]


def test_a_summary_of_running_totals_is_that_of_all_spans_and_samples(tmp_path: Path) -> None:
    log = make_log(tmp_path, servers=3, ranks=2)
    run = RecordedRun(log, servers=3, ranks=2, step_s=10)
    for _ in range(12):
        run.step()
    summary = log.summary({})
    log.close()
    whole = Usage().add(run.spans, run.samples, log.timeline.step_ends_s[0], log.timeline.step_ends_s[-1])
    for pool, shares in whole.shares().items():
        assert summary["pools"][pool] == pytest.approx(shares, abs=1e-9)
    expected = reduce_metrics(whole.metrics())
    assert expected.keys() <= summary.keys()
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert summary["staleness_mean"] == 1.0
    events = json.loads((tmp_path / "r" / "timeline.json").read_text())["traceEvents"]
    for pool in whole.shares():
        (pid,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == pool)
        slices = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        covered_s = sum(end - start for start, end in slices) / 1e6
        assert covered_s == pytest.approx(sum(s.end_s - s.start_s for s in run.spans if s.pool == pool))
        assert all(before[1] <= after[0] for before, after in pairwise(slices))


def test_a_step_has_the_samples_of_every_pool_however_many_come_in_one_report(tmp_path: Path) -> None:
    log = make_log(tmp_path, servers=16, ranks=8)
    run = RecordedRun(log, servers=16, ranks=8, step_s=60)
    for _ in range(3):
        run.step()
    log.close()
    ends_s = log.timeline.step_ends_s
    for line, (start_s, end_s) in zip(lines(tmp_path)[1:], pairwise(ends_s), strict=True):
        expected = reduce_metrics(Usage().add(run.spans, run.samples, start_s, end_s).metrics())
        assert (line["occupancy/rollout"], line["gpu/learner"]) == pytest.approx(
            (expected["occupancy/rollout"], expected["gpu/learner"])
        )


def test_a_step_waits_for_the_report_of_every_learner_rank(tmp_path: Path) -> None:
    log = make_log(tmp_path, ranks=2)
    beyond = WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 30.0),))
    log.add("rollout/0", beyond)
    for step, start_s in ((1, 0.0), (2, 10.0)):
        log.add("learner/0", learner_step(step, start_s, start_s + 10.0))
        assert log.has_open_steps
        log.add("learner/1", StepDone(version=step, spans=(Span("learner/1", "busy", start_s, start_s + 10.0),)))
        assert not log.has_open_steps
    assert lines(tmp_path)[1]["utilisation/learner"] == 1.0
    log.close()


def test_a_step_waits_for_a_silent_server_for_a_limited_time_and_then_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log(tmp_path, servers=2, timeouts=TimeoutsConfig(silent_s=1e-9))
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 40.0),)))
    log.add("rollout/1", WorkerReport(spans=(Span("rollout/1", "busy", 0.0, 4.0),)))
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    assert log.has_open_steps
    log.close_overdue()
    assert not log.has_open_steps
    assert "rollout/1 (6 s behind)" in capsys.readouterr().out
    log.add("learner/0", learner_step(2, 10.0, 20.0))
    assert not log.has_open_steps  # rollout/1 is not waited for while it is behind
    log.add("rollout/1", WorkerReport(spans=(Span("rollout/1", "busy", 4.0, 25.0),)))
    log.add("learner/0", learner_step(3, 20.0, 30.0))
    assert log.has_open_steps  # it has caught up
    log.close()


def test_times_of_another_host_are_put_on_the_clock_of_the_driver(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    start_s, other_s = time.monotonic(), 7.0  # what the clock of rollout/0's host shows now
    for step in (1, 2):
        log.add("learner/0", learner_step(step, start_s + 10.0 * (step - 1), start_s + 10.0 * step))
    log.add("rollout/0", WorkerReport(
        spans=(Span("rollout/0", "busy", other_s, other_s + 15.0), Span("rollout/0", "sync", other_s + 15.0, 100.0)),
        samples=(Sample("rollout/0", "occupancy", other_s + 12.0, 0.25),), clock="another host", sent_s=other_s,
    ))
    log.close()
    second = lines(tmp_path)[1]
    assert second["utilisation/rollout"] == pytest.approx(0.5, abs=0.05)
    assert second["occupancy/rollout"] == 0.25


def test_a_clock_set_back_between_two_steps_costs_metrics_but_not_the_run(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 50.0),)))
    for step, end_s in ((1, 10.0), (2, 4.0), (3, 14.0)):
        log.add("learner/0", learner_step(step, end_s - 2.0, end_s))
    log.close()
    assert ["utilisation/learner" in line for line in lines(tmp_path)] == [False, False, True]


def test_notes_of_workers_are_shown_and_groups_whose_reward_failed_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log(tmp_path)
    log.add("rollout/0", WorkerReport(metrics=(Metric("rollout/failed", 2, "sum"),), notes=("rollout/0: it failed",)))
    log.add("rollout/0", WorkerReport(metrics=(Metric("rollout/failed", 1, "sum"),)))
    assert "rollout/0: it failed" in capsys.readouterr().out
    assert log.summary({})["failed_groups"] == 3


@pytest.mark.parametrize(
    ("left_out", "tokens"),
    [({"staleness/masked_fraction": 0.75}, 150.0), ({"policy/skipped_batches": 1.0}, 0.0)],
)
def test_tokens_that_are_masked_for_their_age_or_in_a_skipped_batch_are_not_trained(
    left_out: dict[str, float], tokens: float, tmp_path: Path
) -> None:
    log = make_log(tmp_path)
    for step in (1, 2):
        metrics = (Metric("batch/response_tokens", 600.0), *(Metric(key, value) for key, value in left_out.items()))
        span = Span("learner/0", "busy", step * 10.0 - 10, step * 10.0)
        log.add("learner/0", StepDone(version=step, metrics=metrics, spans=(span,)))
        log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", step * 10.0 - 10, step * 10.0 + 1),)))
    log.close()
    assert lines(tmp_path)[-1]["throughput/trained_tokens_per_s"] == pytest.approx(tokens / 10)


MOST, REPORTS = 1000, 6000


def report(number: int) -> WorkerReport:
    """One of a worker's reports, which come twice a second; groups arrived before every tenth."""
    start_s, has_groups = number / 2, number % 10 == 0
    metrics = [
        Metric("rollout/groups", float(has_groups), "sum"), Metric("rollout/seconds", 0.1, "sum"),
        Metric("rollout/most", number % 977 / 7, "max"), Metric("rollout/least", number % 977 / 7, "min"),
        Metric("rollout/newest", number / 7, "last"), Metric("rollout/in_flight", 0.1 * (number % 7)),
        *([Metric("group/reward", 0.3 * number, weight=number % 97)] if has_groups else []),
        Metric("group/none", 1.0, weight=0.0),
    ]
    samples = (
        Sample("rollout/0", "occupancy", start_s, number / REPORTS), Sample("rollout/0", "gpu", start_s, 0.25),
    )
    spans = (Span("rollout/0", "wait_weights", start_s, start_s + 0.5),)
    return WorkerReport(metrics=tuple(metrics), spans=spans, samples=samples)


def test_a_step_of_days_needs_no_more_memory_and_has_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MOST_METRICS", MOST)
    monkeypatch.setattr(run_timeline, "MOST_SAMPLES", MOST)
    log = make_log(tmp_path)
    log.add("learner/0", StepDone(version=1))  # the first step has no utilisation
    reports = [report(number) for number in range(REPORTS)]
    kept = []
    for number, each in enumerate(reports):
        log.add("rollout/0", each)
        if number % 500 == 499:
            kept.append(num_kept(log))
    assert max(kept[3:]) < 2 * max(kept[:3])
    log.add("learner/0", StepDone(version=2, spans=(Span("learner/0", "busy", 0.0, REPORTS / 2),)))
    log.close()
    _, step = lines(tmp_path)
    expected = reduce_metrics(metric for each in reports for metric in each.metrics)
    assert {key: step[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert "group/none" not in step and step["rollout/groups"] == REPORTS / 10
    assert step["occupancy/rollout"] == pytest.approx(0.5, abs=0.01) and step["gpu/rollout"] == 0.25


def summary(folder: Path, *evaluations: tuple[int, float]) -> dict[str, Any]:
    results = RunResults()
    for version, accuracy in evaluations:
        results.add(version, {"eval/accuracy": accuracy})
    return results.summary(20, Figures({}), RunTimeline(folder))


def test_an_evaluation_on_the_way_stands_for_neither_start_nor_end(tmp_path: Path) -> None:
    whole = summary(tmp_path, (0, 0.25), (10, 0.5), (20, 0.75))
    assert (whole["accuracy_start"], whole["accuracy_end"]) == (0.25, 0.75)
    without_start = summary(tmp_path, (10, 0.5), (20, 0.75))
    assert (without_start["accuracy_start"], without_start["accuracy_end"]) == (None, 0.75)
    without_end = summary(tmp_path, (0, 0.25), (10, 0.5))
    assert (without_end["accuracy_start"], without_end["accuracy_end"]) == (0.25, None)


def test_the_example_of_a_run_is_the_question_whose_reward_rose_most(tmp_path: Path) -> None:
    def answers(text: str, *rewards: float) -> list[HeldOutAnswer]:
        return [HeldOutAnswer(question=str(n), answer=text, reward=reward) for n, reward in enumerate(rewards)]

    def example(*evaluations: tuple[int, list[HeldOutAnswer]]) -> Any:
        results = RunResults()
        for version, found in evaluations:
            results.add(version, {"eval/accuracy": 0.5})
            results.add_answers(version, found)
        return results.summary(20, Figures({}), RunTimeline(tmp_path)).get("example")

    start, middle, end = (0, answers("a", 0, 0, 1)), (10, answers("b", 1, 1, 1)), (20, answers("c", 0, 1, 1))
    assert example(start, middle, end) == {
        "question": "1", "before": "a", "after": "c", "reward_before": 0, "reward_after": 1, "chosen_from": 3,
    }  # fmt: skip
    assert example(middle, end) is None and example(start, middle) is None and example((0, []), end) is None
