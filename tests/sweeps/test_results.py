from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.tools.sweeps.report import write_report
from async_rl.tools.sweeps.results import TAIL, read_run, read_runs
from async_rl.tools.sweeps.tables import tables_in
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
    assert ": staleness-1.seed-0." in printed and ": staleness-1.seed-0." not in write_report(sweep)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", ""), ("config.yaml", None), ("cell.json", ""),
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
    with pytest.raises(ConfigError, match=r"staleness-1\.seed-0"):
        read_runs(copy)


def test_a_run_that_goes_on_after_its_end_has_no_report(sweep: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run_dir)
    (run_dir / "config.lineage_0.yaml").touch()
    file = run_dir / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resumes": 0}))
    with pytest.raises(ConfigError, match=str(run_dir)):
        read_run(run_dir)
