from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.sweeps.report import write_report
from async_rl.sweeps.results import TAIL, read_run, read_runs
from async_rl.sweeps.tables import tables_in
from tests.kit.runs import logged


def test_the_worst_steps_and_the_mean_over_time_are_told_of_every_run(sweep: Path) -> None:
    run = read_runs(sweep)[0]
    assert all(math.isnan(run.values()[name]) for name in ("is_weight_largest", "waited_for_late"))
    steps: list[dict[str, float | None]] = [
        {
            "step": float(number), "time/since_first_step_s": float(number**2), "reward/mean": number / 10,
            "offpolicy/kl_behaviour_proximal_k3": kl, "offpolicy/is_weight_var": 2 * kl,
            "offpolicy/is_weight_max": 9 * kl, "buffer/waited_for_late_s": 0.5, "time/step_s": 2.0,
        }
        for number, kl in enumerate((9.0, 0.1, 0.2, 0.3, 0.7, 0.4))
    ]  # fmt: skip
    values = dataclasses.replace(run, steps=steps).values()
    assert [values[f"kl_{name}"] for name in TAIL] == pytest.approx([0.3, 0.64, 0.7])  # the first step is left out
    assert [values[f"is_variance_{name}"] for name in TAIL] == pytest.approx([0.6, 1.28, 1.4])
    assert values["is_weight_largest"] == pytest.approx(6.3) and values["waited_for_late"] == pytest.approx(0.25)
    seconds, rewards = (1, 3, 5, 7, 9), (0.1, 0.2, 0.3, 0.4, 0.5)
    assert values["reward_over_time"] == pytest.approx(sum(s * r for s, r in zip(seconds, rewards, strict=True)) / 25)
    lag = {"staleness_mean": 2.0, "steps_per_minute": 30.0, "accuracy_start": 0.3, "accuracy_end": 0.8}
    told = dataclasses.replace(
        run, steps=[], stored=lag | {"reward_over_time": 0.5}, evals=[(0, 0, 0.3), (9, 20.0, 0.8)]
    )
    assert told.values()["reward_less_lag"] == pytest.approx(0.5 + 4 / 20 * 0.5)  # 2 steps of 2 s in 20 s
    assert "reward of the policy, mean over the time" in write_report(sweep)


def test_an_evaluation_of_a_resumed_run_counts_from_the_time_of_its_whole_training(
    sweep: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run)
    whole = read_run(run)
    lines = logged(run)
    first_s = next(line["time/since_first_step_s"] for line in lines if line["step"] == 15)
    for line in lines:
        if line["step"] >= 15 and "time/since_first_step_s" in line:
            line["time/since_first_step_s"] -= first_s
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = read_run(run)
    lost_s = whole.seconds[14] - whole.seconds[13]
    assert [seconds for _, seconds, _ in resumed.evals] == pytest.approx(
        [seconds - (lost_s if version >= 15 else 0.0) for version, seconds, _ in whole.evals]
    )
    assert len(whole.evals) > 2 and resumed.seconds[-1] == pytest.approx(whole.seconds[-1] - lost_s)


def test_an_evaluation_of_an_earlier_version_is_not_that_of_the_end(sweep: Path, tmp_path: Path) -> None:
    """As where no server could evaluate the trained model. One beside training began before its newest version."""
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    run_dir = copy / "cells" / "staleness-1.seed-0"
    whole = read_run(run_dir).values()
    assert whole["improvement"] == pytest.approx(whole["accuracy_end"] - 0.3)
    lines = [line for line in logged(run_dir) if "eval/accuracy" not in line or line["step"] < 40]
    lines = [line | {"eval/newest_version": 40.0} if line["step"] == 30 else line for line in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = read_run(run_dir).values()
    assert values["accuracy_start"] == 0.3 and math.isnan(values["accuracy_end"]) and math.isnan(values["improvement"])
    run = read_run(run_dir)
    run.evals[1:] = []
    assert math.isnan(run.improvement), "its gain in reward is none in held-out accuracy"
    run.evals.clear()
    assert run.improvement > 0
    printed = write_report(copy)
    learned = next(table for table in tables_in(printed) if table.title == "What was learned")
    ends = [row[learned.header.index("held-out accuracy, end")] for row in learned.rows]
    assert [end == "-" for end in ends] == [False, True, False]
    assert "their last version, " in printed and "comparison by either: staleness-1.seed-0." in printed
    assert "their last version, " not in write_report(sweep)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_goes_on_is_no_row_among_others(sweep: Path, tmp_path: Path) -> None:
    """Its last version was not evaluated, so that it has no improvement yet."""
    run_dir = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run_dir)
    (run_dir / "summary.json").unlink()
    lines = [line for line in logged(run_dir) if line["step"] <= 13]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = write_report(run_dir)
    assert math.isnan(read_run(run_dir).improvement) and len(read_run(run_dir).evals) == 2
    assert "this is of its first 13 steps" in printed and "No row" not in printed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", ""), ("config.yaml", "run: ["), ("config.yaml", None), ("cell.json", ""),
        ("summary.json", "{"), ("summary.json", "[]"), ("metrics.jsonl", None),
    ],
)  # fmt: skip
def test_a_damaged_cell_is_named_with_what_to_do(sweep: Path, tmp_path: Path, name: str, text: str | None) -> None:
    copy = tmp_path / "sweep"
    shutil.copytree(sweep, copy)
    file = copy / "cells" / "staleness-1.seed-0" / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)staleness-1\.seed-0.*damaged.*Move its folder away"):
        read_runs(copy)


def test_a_run_that_goes_on_after_its_end_has_the_summary_of_its_steps_so_far(sweep: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run_dir)
    file = run_dir / "summary.json"
    summary = json.loads(file.read_text())
    run = read_run(run_dir)
    assert run.has_ended and run.summary == summary
    file.write_text(json.dumps(summary | {"steps": summary["steps"] - 1}))
    run = read_run(run_dir)
    assert not run.has_ended and run.summary["steps"] == len(run.steps) == summary["steps"]
    file.write_text(json.dumps(summary | {"resumes": 0, "rolled_back": 3}))
    assert read_run(run_dir).has_ended
    (run_dir / "config.lineage_0.yaml").touch()
    assert not read_run(run_dir).has_ended, "it goes on from an earlier step"
