"""Tables, plots and page of a report from runs with known numbers; committed sweeps are recomputed."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.tools.sweeps.cells import Bound
from async_rl.tools.sweeps.efficiency import effective_steps
from async_rl.tools.sweeps.plan import compare
from async_rl.tools.sweeps.report import TRADE_OFF, value_table, write_report
from async_rl.tools.sweeps.results import read_run, read_runs
from async_rl.tools.sweeps.settings import (
    WORTH,
    Setting,
    best_rows,
    bounds_compared,
    efficiency_unknown,
    recommendation,
    settings_of,
)
from async_rl.tools.sweeps.statistics import estimate
from tests.kit.runs import logged
from tests.kit.sweeps import make_sweep

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture(scope="module")
def printed(sweep: Path) -> str:
    return write_report(sweep)


def compared(rows: list[Setting]) -> dict[str, list[str]]:
    """The texts of `bounds_compared` by the row's name."""
    (table,) = bounds_compared(rows)
    return {row[0]: list(row[1:]) for row in table.rows}


def test_bounds_are_compared_by_ratio_with_an_interval_and_by_p_value(sweep: Path, printed: str) -> None:
    rows = settings_of(read_runs(sweep))
    assert recommendation(rows).startswith("Take staleness 1: ")
    assert recommendation(rows) in printed
    lines = compared(rows)
    assert list(lines) == ["staleness 1", "staleness 3", "staleness 0"]
    gain = rows[1].estimate("effective_steps_per_minute").mean / rows[0].estimate("effective_steps_per_minute").mean
    assert re.fullmatch(rf"{gain:.2f} \(\d\.\d\d to \d\.\d\d\)", lines["staleness 1"][1])
    assert lines["staleness 1"][2:4] == ["-", "-"]
    assert float(lines["staleness 3"][2]) < 0.05
    assert float(lines["staleness 0"][3]) == pytest.approx(2 * float(lines["staleness 0"][2]), rel=0.1)  # Holm, of two


def test_what_measured_durations_predict_is_what_the_simulator_measured(sweep: Path) -> None:
    """The runs come from the simulator, so the fitted workload must give their utilisation."""
    for measured in compare(settings_of(read_runs(sweep))):
        assert measured.predicted is not None
        assert measured.predicted.utilisation == pytest.approx(measured.learner, rel=0.1)
        assert measured.predicted.rollout == pytest.approx(measured.rollout, rel=0.1)


def test_every_run_and_every_evaluation_is_in_a_file(sweep: Path, printed: str) -> None:
    def lines(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((sweep / name).read_text().splitlines()))

    runs = lines("runs.csv")
    assert [(line["staleness"], line["seed"]) for line in runs] == [(b, s) for b in "013" for s in "012"]
    at_3, of_3 = settings_of(read_runs(sweep))[2], [line for line in runs if line["staleness"] == "3"]
    assert at_3.estimate("is_variance").mean == pytest.approx(0.3, rel=0.1)
    for key in ("improvement", "is_variance", "steps_per_minute"):
        values = [float(line[key]) for line in of_3]
        assert sum(values) / 3 == pytest.approx(at_3.estimate(key).mean, rel=1e-4)
    (run,) = [run for run in read_runs(sweep) if (run.staleness.max, run.labels["seed"]) == (1, "2")]
    of_run = [line for line in lines("evals.csv") if (line["staleness"], line["seed"]) == ("1", "2")]
    evals = [tuple(float(line[key]) for key in ("version", "seconds", "accuracy")) for line in of_run]
    assert evals == [pytest.approx(each, abs=1e-3) for each in run.evals]


def test_cells_that_are_not_finished_or_of_another_sweep_are_left_out(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    (copy / "cells" / "staleness-1.seed-0" / "cell.json").unlink()  # ended early: it has a summary all the same
    other = copy / "cells" / "staleness-1.seed-1" / "cell.json"
    record = json.loads(other.read_text())
    other.write_text(json.dumps(record | {"labels": record["labels"] | {"correction": "none"}}))
    (copy / "sweep.json").write_text(json.dumps({"axes": {"staleness": ["0", "1", "3"], "seed": ["0", "1", "2"]}}))
    runs = read_runs(copy)
    assert [run.labels["seed"] for run in runs if run.staleness.max == 1] == ["2"]
    assert len(runs) == 7


@pytest.mark.parametrize(("key", "other"), [("run.steps", "7"), ("rollout.group_size", "3")])
def test_cells_that_differ_in_more_than_the_axes_are_not_compared(
    sweep: Path, tmp_path: Path, key: str, other: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    file = copy / "cells" / "staleness-1.seed-0" / "cell.json"
    record, name = json.loads(file.read_text()), key.partition(".")[2]
    file.write_text(json.dumps(
        record | {"config": re.sub(rf"(?m)^  {name}: .*", f"  {name}: {other}", record["config"], count=1)}
    ))
    with pytest.raises(ConfigError, match=re.escape(key)):
        read_runs(copy)
    for cell in (copy / "cells").iterdir():  # an axis of the sweep now
        other_record = json.loads((cell / "cell.json").read_text())
        varied = [*other_record["varied"], key]
        (cell / "cell.json").write_text(json.dumps(other_record | {"varied": varied}))
    assert len(read_runs(copy)) == 9


def test_an_evaluation_beside_training_counts_for_the_mean_version_that_answered(sweep: Path, tmp_path: Path) -> None:
    """Version 11.25: a quarter of the time between the ends of steps 11 and 12. It was due at 10."""
    run = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run)
    lines = logged(run)
    for line in lines:
        if line["step"] == 10 and "eval/accuracy" in line:
            line |= {"eval/newest_version": 13.0, "eval/mean_version": 11.25}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (read,) = read_runs(run)
    at_11, at_12 = (line["time/since_first_step_s"] for line in lines if line["step"] in (11, 12))
    version, seconds, _ = read.evals[1]
    assert (version, seconds) == (11.25, pytest.approx(at_11 + (at_12 - at_11) / 4))


def test_a_report_claims_no_lead_that_its_seeds_do_not_show(sweep: Path) -> None:
    """Two seeds whose values lie far apart, and a best bound by a hair."""
    rows = [dataclasses.replace(row, values=dict(row.values)) for row in settings_of(read_runs(sweep))]
    for row, values in zip(rows, ([90.0, 100.0, 110.0], [91.0, 101.0, 111.0], [95.0, 97.0, 99.0]), strict=True):
        row.values["effective_steps_per_minute"] = values
    assert "can't tell" in recommendation(rows)
    rows[2].values["effective_steps_per_minute"] = [10.0, 11.0, 12.0]  # the others are both ahead of it
    assert recommendation(rows).startswith("Take staleness 0: ")

ROOT = Path(__file__).parents[2]

RESULTS = ROOT / "benchmarks" / "results"

WORTH_COLUMNS = {key: TRADE_OFF[key] for key in WORTH}

FITTED = {
    "sweep_cpu": {
        "": ((1, 0.81, 0.03), (2, 0.78, 0.03), (3, 0.73, 0.08), (5, 0.59, 0.12), (8, 0.70, 0.09), (10, 0.58, 0.10)),
    },
    "exact": {
        "coupled": ((1, 0.87, 0.05), (2, 0.74, 0.03), (4, 0.61, 0.03), (8, 0.56, 0.03), (10, 0.54, 0.02)),
        "decoupled_tis": ((1, 0.88, 0.04), (2, 0.84, 0.04), (4, 0.65, 0.07), (8, 0.64, 0.06), (10, 0.73, 0.05)),
        "none": ((1, 0.92, 0.05), (2, 0.65, 0.04), (4, 0.47, 0.02), (8, 0.35, 0.05), (10, 0.33, 0.07)),
    },
}  # fmt: skip
"""(staleness, e, error) by sweep and correction, found in another way: run by run, acc0 a - b (1 + v / tau)^-p."""


def test_without_synchronous_training_or_rewards_by_staleness_nothing_is_recommended(
    sweep: Path, tmp_path: Path
) -> None:
    copy = without_synchronous_runs(sweep, tmp_path)
    for file in copy.glob("cells/*/metrics.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if "by_staleness" not in key} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    printed = write_report(copy)
    assert "a step is worth, synchronous steps" not in printed
    assert recommendation(settings_of(read_runs(copy))).startswith("No setting is recommended")


def test_without_synchronous_training_sampled_rewards_tell_the_worth_of_a_step(sweep: Path, tmp_path: Path) -> None:
    """The runs at 1 gain .0095 a step, those at 3 .0055: 0.58 of it."""
    copy = without_synchronous_runs(sweep, tmp_path)
    printed = write_report(copy)
    one, three = settings_of(read_runs(copy))
    found = three.estimate("efficiency_sampled")
    assert (one.estimate("efficiency_sampled").mean, found.mean) == (1.0, pytest.approx(0.55 / 0.95, abs=0.03))
    assert 0 < found.error < 0.05
    speed = three.estimate("effective_steps_sampled")
    lines = [line.replace("**", "") for line in printed.splitlines() if line.startswith("|")]
    header, shown = (line.strip("| ").split(" | ") for line in (lines[0], lines[3]))
    titles = (
        "a step is worth by sampled reward, steps at the lowest staleness",
        "effective steps per minute by sampled reward",
    )
    assert [shown[header.index(title)] for title in titles] == [found.text("{:.2f}"), speed.text("{:.1f}")]
    assert speed.mean == pytest.approx(found.mean * three.estimate("steps_per_minute").mean, rel=0.02)


def without_synchronous_runs(sweep: Path, folder: Path) -> Path:
    copy = folder / "copy"
    shutil.copytree(sweep, copy)
    for cell in copy.glob("cells/staleness-0.*"):
        shutil.rmtree(cell)
    return copy


def test_only_axes_beside_staleness_have_synchronous_runs_of_their_own(sweep: Path) -> None:
    def labelled(axis: str, label_of: dict[int, str]) -> list[Setting]:
        return settings_of(
            dataclasses.replace(run, labels={**run.labels, axis: label_of[run.staleness.max]})
            for run in read_runs(sweep)
        )

    plain = [row.values["efficiency"] for row in settings_of(read_runs(sweep))]
    late = labelled("staleness.on_late", {0: "wait", 1: "drop", 3: "mask"})
    assert {row.staleness.max: row.values["efficiency"] for row in late} == dict(zip((0, 1, 3), plain, strict=True))
    rates = labelled("learner.lr", {0: "1e-4", 1: "1e-4", 3: "3e-4"})
    (unknown,) = efficiency_unknown(rates)
    assert "staleness 3 (learner.lr 3e-4)" in unknown
    assert [row.has("efficiency") for row in rates] == [True, True, False]


def of_two_rates(sweep: Path) -> list[Setting]:
    """The runs of `sweep` at staleness 0 and 1 twice: as they are, and as of a learning rate with slower steps."""
    runs = []
    for run in read_runs(sweep):
        for rate, longer in (("1e-4", 1.0), ("3e-4", 1.2)):
            steps = [{**step, "time/step_s": longer * (step["time/step_s"] or 0.0)} for step in run.steps]
            labels = {"staleness": run.labels["staleness"], "learner.lr": rate, "seed": run.labels["seed"]}
            if run.staleness.max < 3:
                runs.append(dataclasses.replace(run, labels=labels, steps=steps))
    return settings_of(runs)


def test_effective_steps_are_compared_only_where_they_have_one_unit(sweep: Path) -> None:
    """The faster learning rate is no better for it: a step at the other may teach five times as much."""
    rows = of_two_rates(sweep)
    tables = bounds_compared(rows)
    names = [[f"staleness {bound} (learner.lr {rate})" for bound in (1, 0)] for rate in ("1e-4", "3e-4")]
    assert [[line[0] for line in table.rows] for table in tables] == names
    assert [table.header[2] for table in tables] == [f"times that of {base} (95% interval)" for _, base in names]
    marked = value_table(rows, WORTH_COLUMNS, "")
    assert marked is not None
    assert [marked.rows[number][:2] for number in marked.best] == [["1", "1e-4"], ["1", "3e-4"]]
    told = recommendation(rows)
    assert all(f"{best} has the most effective steps per minute, " in told for best, _ in names)
    assert "with another learner.lr" in told
    synchronous = [row for row in rows if row.staleness.max == 0]
    assert told.endswith(recommendation(synchronous)) and bounds_compared(synchronous) == []
    failed = settings_of(run for row in rows if row.name != "staleness 0 (learner.lr 3e-4)" for run in row.runs)
    assert [row.has("efficiency") for row in failed] == [True, True, False], "no synchronous run at the second rate"
    assert recommendation(failed).startswith("Take staleness 1 (learner.lr 1e-4): ")


def test_one_synchronous_seed_tells_no_efficiency_of_several_seeds(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (0, 1), seeds=3)
    for seed in (1, 2):
        shutil.rmtree(folder / "cells" / f"staleness-0.seed-{seed}")
    assert "only the seed 0" in write_report(folder)
    runs = read_runs(folder)
    (synchronous, row) = settings_of(runs)
    assert synchronous.has("efficiency") and not row.has("efficiency")
    twice = [
        dataclasses.replace(run, labels={**run.labels, "staleness.on_late": late})
        for run in runs for late in ("wait", "drop") if run.staleness.max == 0 or late == "wait"
    ]
    assert [row.has("efficiency") for row in settings_of(twice)] == [True, True, False]


@pytest.mark.parametrize(("change", "improves"), [(0.0, False), (-0.5, False), (0.5, True)])
def test_a_best_row_that_has_learned_nothing_is_not_named_as_such(sweep: Path, change: float, improves: bool) -> None:
    rows = of_two_rates(sweep)
    rows = [row for row in rows if row.series == rows[0].series]
    for number, row in enumerate(rows):
        speed = change - 0.1 * number * abs(change)
        row.values["effective_steps_per_minute"] = [speed + noise for noise in (-0.01, 0.0, 0.01)]
    (table,) = bounds_compared(rows)
    assert table.best == ((0,) if improves else ()) and bool(best_rows(rows)) == improves


@pytest.mark.parametrize("name", FITTED)
def test_committed_sweeps_have_the_efficiency_that_another_method_finds(name: str) -> None:
    evals: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = {}
    with (RESULTS / name / "evals.csv").open() as file:
        for line in csv.DictReader(file):
            setting = (line.get("correction", ""), Bound.parse(line["staleness"]).max)
            of_run = evals.setdefault(setting, {}).setdefault(line["seed"], [])
            of_run.append((float(line["version"]), float(line["accuracy"])))
    for correction, expected in FITTED[name].items():
        synchronous = list(evals[correction, 0].items())
        for staleness, e, error in expected:
            runs = evals[correction, staleness]
            found = estimate(list(effective_steps(runs, dict.fromkeys(runs, 1.0), synchronous)[:, 0]))
            assert found.mean == pytest.approx(e, abs=error)
            assert 0.3 * error < found.error < 2.0 * error


def test_without_an_evaluation_of_the_end_a_run_has_no_improvement(sweep: Path) -> None:
    """Nor is its gain in reward one in held-out accuracy."""
    run = read_run(sweep / "cells" / "staleness-1.seed-0")
    assert run.improvement == pytest.approx(run.evals[-1][2] - 0.3)
    run.summary["accuracy_end"] = None
    values = run.values()
    assert values["accuracy_start"] == 0.3 and math.isnan(values["accuracy_end"]) and math.isnan(values["improvement"])


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", ""), ("cell.json", ""), ("summary.json", "{"), ("metrics.jsonl", None)],
)
def test_a_damaged_cell_is_named_with_what_to_do(sweep: Path, tmp_path: Path, name: str, text: str | None) -> None:
    copy = tmp_path / "sweep"
    shutil.copytree(sweep, copy)
    file = copy / "cells" / "staleness-1.seed-0" / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"staleness-1\.seed-0"):
        read_runs(copy)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        write_report(tmp_path)


def test_a_run_that_goes_on_after_its_end_has_no_report(sweep: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run_dir)
    (run_dir / "config.lineage_0.yaml").touch()
    file = run_dir / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resumes": 0}))
    with pytest.raises(ConfigError, match=str(run_dir)):
        read_run(run_dir)
