from __future__ import annotations

import gc
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from async_rl.base.config import CheckpointConfig, EvalConfig, TimeoutsConfig
from async_rl.base.messages.reports import EvaluationDone, StepDone, TrainingEnded, WorkerReport
from async_rl.base.run_dir.checkpoints import checkpoint_folder, lineage_of, list_checkpoints
from async_rl.base.telemetry.metrics import Metric, read_metrics, reduce_metrics
from async_rl.base.telemetry.timeline import Sample, Span, State, Usage
from async_rl.run.log.run_log import RunLog
from tests.kit.configs import make_config, opened_run
from tests.kit.runs import logged, make_checkpoint


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
        make_checkpoint(run_dir, version)
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
    expected = {key: value for key, value in reduce_metrics(whole.metrics()).items() if not key.startswith("pools/")}
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


@pytest.mark.parametrize(("evaluated", "start", "end"), [((0, 2), 0.3, 0.5), ((0, 1), 0.3, None), ((1, 2), None, 0.5)])
def test_accuracies_of_start_and_end_are_of_version_0_and_the_last_version(
    tmp_path: Path, evaluated: tuple[int, int], start: float | None, end: float | None
) -> None:
    log = make_log(tmp_path)
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 30.0),)))
    for version, accuracy in zip(evaluated, (0.3, 0.5), strict=True):
        log.add_eval(EvaluationDone(version=version, metrics=(Metric("eval/accuracy", accuracy),)))
    for step in (1, 2):
        log.add("learner/0", learner_step(step, step * 10.0 - 10, step * 10.0))
    summary = log.summary({})
    log.close()
    assert (summary["accuracy_start"], summary["accuracy_end"]) == (start, end)


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


RESUMED_AT = 40


def resumed_log(tmp_path: Path) -> RunLog:
    """The log of a run whose first RESUMED_AT steps have failed groups and skipped evaluations."""
    run_dir = tmp_path / "r"
    folder = make_checkpoint(run_dir, RESUMED_AT)
    records = [{"step": step, "time/written_at_s": float(step), "rollout/failed": 0.0} for step in range(1, 41)]
    records[9] |= {"rollout/failed": 3.0, "eval/skipped": 1.0}
    records[29] |= {"rollout/failed": 2.0, "eval/skipped": 4.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return make_log(tmp_path, resume=str(folder))


def test_counts_of_the_summary_are_those_of_the_whole_run(tmp_path: Path) -> None:
    log = resumed_log(tmp_path)
    log.add("rollout/0", WorkerReport(metrics=(Metric("rollout/failed", 1.0, "sum"),)))
    log.skipped_eval(RESUMED_AT, "the evaluation before it is still running")
    log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", 0.0, 11.0),)))
    log.add("learner/0", learner_step(RESUMED_AT + 1, 0.0, 10.0))
    summary = log.summary({})
    log.close()
    assert (summary["failed_groups"], summary["skipped_evaluations"]) == (6, 5)
    assert lines(tmp_path)[-1]["eval/skipped"] == 5.0


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_summary_counts_a_resume_unless_that_is_undone(tmp_path: Path, is_stop: bool) -> None:
    resumed_log(tmp_path).close()
    with opened_run(make_config(run={"resume": tmp_path / "r"}, logging={"wandb": "disabled"})) as config:
        log = RunLog(config)
        log.add("learner/0", TrainingEnded(version=RESUMED_AT, reason="the pause ran out", is_stop=is_stop))
        log.close()
        summary = log.summary({})
    assert summary["resumes"] == lineage_of(config.run_dir) == (0 if is_stop else 1)
