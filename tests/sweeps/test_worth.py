"""The worth of a step and the reward of policies in a report: one number in every place; committed sweeps."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from async_rl.tools.sweeps.report import TRADE_OFF, value_table, write_report
from async_rl.tools.sweeps.results import read_results, read_runs
from async_rl.tools.sweeps.settings import (
    WORTH,
    WORTH_BY_REWARD,
    Setting,
    best_rows,
    bounds_compared,
    efficiency_unknown,
    recommendation,
    settings_of,
)
from async_rl.tools.sweeps.tables import tables_in
from tests.kit.sweeps import make_sweep

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


@pytest.fixture(scope="module")
def printed(sweep: Path) -> str:
    return write_report(sweep)


def test_a_report_shows_what_a_step_is_worth_wherever_it_shows_it(sweep: Path, printed: str) -> None:
    """The runs gain .01 a step at 0, and .0095 and .0055 at 1 and 3: their steps are worth 0.95 and 0.55."""
    rows = settings_of(read_runs(sweep))
    assert [row.estimate("efficiency").mean for row in rows] == pytest.approx([1.0, 0.95, 0.55], abs=0.02)
    table = [line.replace("*", "") for line in (sweep / "table.md").read_text().splitlines() if line.startswith("|")]
    titles = [text.strip() for text in table[0].split("|")]
    with (sweep / "table.csv").open() as file:
        means = list(csv.DictReader(file))
    page = (sweep / "report.html").read_text()
    for key, (title, form) in WORTH_COLUMNS.items():
        for number, row in enumerate(rows):
            found = row.estimate(key)
            text = [part.strip() for part in table[2 + number].split("|")][titles.index(title)]
            assert text == found.text(form) and f"<td>{text}</td>" in page
            assert float(means[number][key]) == pytest.approx(found.mean, rel=1e-5)
            assert float(means[number][f"{key}_error"]) == pytest.approx(found.error, rel=1e-5)
    speeds = [row.estimate("effective_steps_per_minute") for row in rows]
    assert speeds[1].mean == pytest.approx(
        rows[1].estimate("efficiency").mean * rows[1].estimate("steps_per_minute").mean
    )
    assert f"the most effective steps per minute, {speeds[1].text('{:.1f}')}, " in printed
    assert "improvement" not in "".join(titles)


def test_without_synchronous_training_a_report_says_so_and_shows_the_improvement(sweep: Path, tmp_path: Path) -> None:
    """So it does where rewards by staleness are missing too."""
    copy = without_synchronous_runs(sweep, tmp_path)
    for file in copy.glob("cells/*/metrics.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if "by_staleness" not in key} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    printed = write_report(copy)
    assert "| improvement |" in printed and "a step is worth, synchronous steps" not in printed
    assert recommendation(settings_of(read_runs(copy))).startswith("Take staleness 1: ")


def test_without_synchronous_training_sampled_rewards_tell_the_worth_of_a_step(sweep: Path, tmp_path: Path) -> None:
    """The runs at 1 gain .0095 a step, those at 3 .0055: 0.58 of it."""
    copy = without_synchronous_runs(sweep, tmp_path)
    printed = write_report(copy)
    one, three = settings_of(read_runs(copy))
    found = three.estimate("efficiency_sampled")
    assert (one.estimate("efficiency_sampled").mean, found.mean) == (1.0, pytest.approx(0.55 / 0.95, abs=0.03))
    assert 0 < found.error < 0.05
    (trade_off, *_) = tables_in(printed)
    shown = dict(zip(trade_off.header, trade_off.rows[1], strict=True))
    assert shown["a step is worth by sampled reward, steps at the lowest staleness"] == found.text("{:.2f}")
    speed = three.estimate("effective_steps_sampled")
    assert shown["effective steps per minute by sampled reward"] == speed.text("{:.1f}")
    assert speed.mean == pytest.approx(found.mean * three.estimate("steps_per_minute").mean, rel=0.02)
    assert "improvement" not in "".join(trade_off.header)


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


def test_settings_whose_effective_steps_cannot_be_told_lose_to_none_of_another_unit(sweep: Path) -> None:
    """At the second learning rate synchronous training failed, so that only the rows at the first are ranked."""
    rows = of_two_rates(sweep)
    kept = settings_of(run for row in rows if row.name != "staleness 0 (learner.lr 3e-4)" for run in row.runs)
    assert [row.has("efficiency") for row in kept] == [True, True, False]
    assert recommendation(kept).startswith("Take staleness 1 (learner.lr 1e-4): ")
    assert "with another learner.lr" in recommendation(kept)


def test_improvement_per_minute_is_compared_over_all_axes(sweep: Path) -> None:
    rows = [row for row in of_two_rates(sweep) if row.staleness.max == 1]
    for row in rows:
        row.values.update(dict.fromkeys((*WORTH, *WORTH_BY_REWARD), [math.nan] * 3))
    (table,) = bounds_compared(rows)
    assert len(table.rows) == 2 and table.header[1] == "improvement per minute"
    assert "with another learner.lr" not in recommendation(rows)


def test_one_synchronous_run_tells_no_efficiency_of_several_seeds(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (0, 1), seeds=3)
    for seed in (1, 2):
        shutil.rmtree(folder / "cells" / f"staleness-0.seed-{seed}")
    assert "staleness-0.seed-0" in write_report(folder)
    (synchronous, row) = settings_of(read_results(folder))
    assert synchronous.has("efficiency") and not row.has("efficiency")


@pytest.mark.parametrize(("change", "improves"), [(0.0, False), (-0.5, False), (0.5, True)])
def test_a_best_row_that_has_learned_nothing_is_not_named_as_such(sweep: Path, change: float, improves: bool) -> None:
    rows = [row for row in of_two_rates(sweep) if row.staleness.max == 1]
    for number, row in enumerate(rows):
        row.values.update(dict.fromkeys((*WORTH, *WORTH_BY_REWARD), [math.nan] * 3))
        row.values["per_minute"] = [change - 0.1 * number * abs(change) + noise for noise in (-0.01, 0.0, 0.01)]
    (table,) = bounds_compared(rows)
    assert table.best == ((0,) if improves else ()) and bool(best_rows(rows)) == improves


def test_a_report_can_be_made_again_from_its_own_csv_files(sweep: Path, printed: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep, copy)
    shutil.rmtree(copy / "cells")
    for plot in ("trade_off", "off_policy"):
        (copy / "plots" / f"{plot}.png").unlink()
    kept = (copy / "plots" / "utilisation.png").read_bytes()
    write_report(copy)
    for name, digits in (("runs.csv", 1e-4), ("table.csv", 1e-3)):  # errors are small differences of rounded numbers
        header, *lines = csv.reader((copy / name).read_text().splitlines())
        before, *others = csv.reader((sweep / name).read_text().splitlines())
        assert header == before
        for line, other in zip(lines, others, strict=True):
            assert list(map(float, line)) == pytest.approx(list(map(float, other)), rel=digits, abs=1e-6, nan_ok=True)
    assert (copy / "evals.csv").read_text() == (sweep / "evals.csv").read_text()
    tables, before_tables = (
        {table.title: table for table in tables_in((folder / "table.md").read_text())} for folder in (copy, sweep)
    )
    assert tables.keys() == before_tables.keys()
    title = "Utilisation: measured, predicted, possible"
    assert tables[title] == before_tables[title]
    assert tables["The trade-off"].header == before_tables["The trade-off"].header
    assert tables["The trade-off"].best == before_tables["The trade-off"].best == (1,)
    assert sorted(path.name for path in (copy / "plots").iterdir()) == sorted(
        path.name for path in (sweep / "plots").iterdir()
    )
    assert (copy / "plots" / "utilisation.png").read_bytes() == kept
    assert (copy / "report.html").read_text().count("<figure>") == len(list((copy / "plots").iterdir()))
    assert "reasoning_gym/chain_sum" in (copy / "report.html").read_text()  # the config of the first run


@pytest.mark.parametrize("name", FITTED)
def test_committed_sweeps_have_the_efficiency_that_another_method_finds(name: str) -> None:
    rows = settings_of(read_results(RESULTS / name))
    found = {(dict(row.series).get("correction", ""), row.staleness.max): row.estimate("efficiency") for row in rows}
    for correction, expected in FITTED[name].items():
        assert (found[correction, 0].mean, found[correction, 0].error) == (1.0, 0.0)
        for staleness, e, error in expected:
            assert found[correction, staleness].mean == pytest.approx(e, abs=error)
            assert 0.3 * error < found[correction, staleness].error < 2.0 * error


@pytest.mark.parametrize(
    "name", ["exact", "sweep_agent_cpu", "sweep_agent_grid", "sweep_agent_sglang", "sweep_cpu", "sweep_cpu_grid"]
)
def test_the_tables_of_committed_sweeps_are_those_of_their_runs(name: str) -> None:
    rows = settings_of(read_results(RESULTS / name))
    text = (RESULTS / name / "table.md").read_text()
    with (RESULTS / name / "table.csv").open() as file:
        means = list(csv.DictReader(file))
    assert all(sentence in text for sentence in efficiency_unknown(rows))
    for row, line in zip(rows, means, strict=True):
        for key in WORTH:
            assert float(line[key]) == pytest.approx(row.estimate(key).mean, rel=1e-5, nan_ok=True)
