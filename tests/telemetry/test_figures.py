"""Figures of several steps: by hand, and the same number in every place that shows one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.messages.reports import StepDone, WorkerReport
from async_rl.base.run_dir.run_dir import write_config
from async_rl.base.telemetry.metrics import (
    DECLARATIONS,
    EPISODES,
    TIME,
    Declaration,
    DeclarationFile,
    Metric,
    over_steps,
    read_declarations,
    read_metrics,
    seconds_at,
)
from async_rl.base.telemetry.status import NORMAL_END, write_status
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from async_rl.tools.sweeps.results import read_runs
from tests.kit.view.client import Client

pytestmark = pytest.mark.processes  # together they compute for long

STEPS_S = (5.0, 0.4, 9.0, 0.4, 9.0, 0.4, 9.0)
"""The first step includes the warm-up and counts in no figure."""
BUSY_S = 0.3
ANSWERS = (8, 2, 6, 4, 4, 6, 2)
TOKENS = (80, 200, 900, 100, 500, 300, 800)
STALENESS = (0.0, 2.0, 0.5, 1.0, 1.5, 0.0, 1.0)
REWARD = (9.0, 1.0, 0.25, 0.5, 0.75, 0.0, 1.0)
OLDEST = (3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
"""A largest value is that of all steps: no warm-up makes it larger."""

SECONDS = math.fsum(STEPS_S[1:])
LEARNER = len(STEPS_S[1:]) * BUSY_S / SECONDS
ROLLOUT = math.fsum(s - 0.1 for s in STEPS_S[1:]) / SECONDS
TOKENS_PER_S = sum(TOKENS[1:]) / SECONDS


def over_episodes(values: tuple[float, ...]) -> float:
    return math.fsum(v * n for v, n in zip(values[1:], ANSWERS[1:], strict=True)) / sum(ANSWERS[1:])


def run_with_uneven_steps(folder: Path) -> dict[str, Any]:
    """Write the directory of a run of short and long steps by the driver's log; returns the content of summary.json."""
    settings = [
        "model.path=none", "task.name=reasoning_gym/none", f"run.dir={folder.parent}", f"run.name={folder.name}",
        "logging.wandb=disabled", "run.steps=7", "staleness.max=3",
    ]  # fmt: skip
    config = load_config(None, settings)
    log = RunLog(config)
    write_config(config)
    start_s = 1000.0
    for number, step_s in enumerate(STEPS_S):
        end_s = start_s + step_s
        worker = (
            Span("rollout/0", "wait_weights", start_s, start_s + 0.1), Span("rollout/0", "busy", start_s + 0.1, end_s)
        )
        log.add("rollout/0", WorkerReport(spans=worker))
        metrics = (
            Metric("reward/mean", REWARD[number], by="batch/episodes"),
            Metric("staleness/mean", STALENESS[number], by="batch/episodes"),
            Metric("staleness/max", OLDEST[number], "max"), Metric("batch/episodes", ANSWERS[number], "sum"),
            Metric("batch/response_tokens", TOKENS[number], "sum"), Metric("time/train_s", BUSY_S),
        )  # fmt: skip
        busy_s = end_s - BUSY_S
        spans = (Span("learner/0", "wait_data", start_s, busy_s), Span("learner/0", "busy", busy_s, end_s))
        log.add("learner/0", StepDone(version=number + 1, metrics=metrics, spans=spans))
        start_s = end_s
    summary = log.summary({"buffer/trained": 32.0})
    log.close()
    (folder / "summary.json").write_text(json.dumps(summary))
    write_status(folder, [], NORMAL_END)
    return summary


def tiles(folder: Path) -> dict[str, str]:
    page = Client(folder).get("./").text
    found = re.findall(r'<span class="muted">(.*?)</span><span class="value">(?:.*?</span> )?(.*?)</span>', page)
    return {label: value.strip() for label, value in found}


def test_summary_page_and_report_show_the_same_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "uneven"
    summary = run_with_uneven_steps(folder)
    assert (round(LEARNER, 3), round(TOKENS_PER_S, 1)) == (0.064, 99.3)  # 39 % and 356 tokens/s as plain means
    expected = {
        "utilisation/learner": LEARNER, "utilisation/rollout": ROLLOUT, "tokens_per_s": TOKENS_PER_S,
        "staleness_mean": over_episodes(STALENESS), "reward_mean": over_episodes(REWARD), "seconds": SECONDS,
        "episodes_per_s": sum(ANSWERS[1:]) / SECONDS, "staleness_max": max(OLDEST),
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    shown = tiles(folder)
    assert shown["learner"] == f"{LEARNER:.0%}" and shown["rollout"] == f"{ROLLOUT:.0%}"
    assert shown["staleness"] == f"{over_episodes(STALENESS):.2f}" and shown["reward"] == f"{over_episodes(REWARD):.3f}"

    (run,) = read_runs(folder)
    values = run.values()
    assert (values["learner"], values["rollout"], values["tokens_per_s"]) == pytest.approx(
        (LEARNER, ROLLOUT, TOKENS_PER_S)
    )
    assert (values["staleness_mean"], values["reward_mean"]) == pytest.approx(
        (over_episodes(STALENESS), over_episodes(REWARD))
    )
    assert values["steps_per_minute"] == pytest.approx(60 * 6 / SECONDS)


def test_a_resumed_run_counts_all_its_steps_and_the_warm_up_of_none(tmp_path: Path) -> None:
    run_with_uneven_steps(tmp_path / "uneven")
    records = read_metrics(tmp_path / "uneven" / "metrics.jsonl")
    declared = read_declarations(tmp_path / "uneven")
    twice = over_steps([*records, *records], declared)
    assert twice.get("utilisation/learner") == pytest.approx(LEARNER)
    assert twice.get("batch/episodes") == 2 * sum(ANSWERS[1:])
    assert over_steps(records[:1], declared).get("reward/mean") == 9.0  # there is no other step yet


def test_the_time_of_a_resumed_run_goes_on_without_the_first_steps_of_its_parts(tmp_path: Path) -> None:
    run_with_uneven_steps(tmp_path / "uneven")
    records = read_metrics(tmp_path / "uneven" / "metrics.jsonl")
    spans_s = [float(record["time/step_s"] or 0.0) for record in records[1:]]
    once_s = [math.fsum(spans_s[:number]) for number in range(len(records))]
    whole_s = json.loads((tmp_path / "uneven" / "summary.json").read_text())["seconds"]
    assert seconds_at(records) == pytest.approx(once_s) and once_s[-1] == pytest.approx(whole_s)
    assert seconds_at([*records, *records]) == pytest.approx([*once_s, *(whole_s + each for each in once_s)])
    assert seconds_at([]) == []


def test_steps_that_were_restored_from_a_checkpoint_take_their_time() -> None:
    """Two steps of 10 s, two restored ones, the first one after a resume, whose warm-up counts for nothing, and one."""
    since_s = (0.0, 10.0, 20.0, None, None, 0.0, 10.0)
    steps_s = (None, 10.0, 10.0, 10.0, 10.0, None, 10.0)
    records = [
        {"time/step_s": step_s} | ({} if since is None else {"time/since_first_step_s": since})
        for since, step_s in zip(since_s, steps_s, strict=True)
    ]
    assert seconds_at(records) == [0.0, 10.0, 20.0, 30.0, 40.0, 40.0, 50.0]
    assert over_steps(records, {}).total("time/step_s") == 50.0


def test_each_declaration_makes_one_number_of_several_steps() -> None:
    declared = {
        "gpu/learner": Declaration(by=TIME), "reward/mean": Declaration(by=EPISODES), EPISODES: Declaration("sum"),
        "eval/x": Declaration("last"), "staleness/max": Declaration("max"), "low": Declaration("min"),
        "variance": Declaration("median"),
    }  # fmt: skip
    records: list[dict[str, float | None]] = [
        {"step": 1, TIME: 1.0, "gpu/learner": 0.5, EPISODES: 1.0, "reward/mean": 4.0, "eval/x": 1.0, "low": 2.0},
        {"step": 2, TIME: 3.0, "gpu/learner": 0.1, EPISODES: 3.0, "reward/mean": 0.0, "eval/x": 2.0, "low": 1.0},
        {"step": 3, TIME: 4.0, "gpu/learner": None, EPISODES: 0.0, "staleness/max": 7.0, "my/x": 3.0, "variance": 9.0},
        {"step": 4, "staleness/max": 5.0, "my/x": 5.0, "variance": 1.0},
        {"step": 5, "variance": 2.0},
    ]
    assert over_steps(records, declared).all() == pytest.approx({
        TIME: 8 / 3, "gpu/learner": 0.2, EPISODES: 4.0, "reward/mean": 1.0, "eval/x": 2.0, "staleness/max": 7.0,
        "low": 1.0, "my/x": 4.0, "variance": 2.0,
    })  # fmt: skip


def test_declarations_are_kept_with_the_run_once_each_and_a_resume_goes_on(tmp_path: Path) -> None:
    file = DeclarationFile(tmp_path, resumes=False)
    file.add([Metric("a", 1.0, by=TIME), Metric("b", 1.0, "sum", over_steps="mean", unit="s")])
    file.add([Metric("a", 2.0, by=TIME)])
    with (tmp_path / DECLARATIONS).open("a") as half:
        half.write('{"key": "c", "over')
    expected = {"a": Declaration("mean", TIME), "b": Declaration("mean", unit="s")}
    assert read_declarations(tmp_path) == expected
    resumed = DeclarationFile(tmp_path, resumes=True)
    resumed.add([Metric("a", 1.0, "max"), Metric("b", 1.0, "sum", over_steps="mean", unit="s"), Metric("c", 1.0)])
    assert read_declarations(tmp_path) == expected | {"a": Declaration("max"), "c": Declaration()}
    assert DeclarationFile(tmp_path, resumes=False).known == {}
