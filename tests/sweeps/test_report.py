"""Tables, plots and page of a report from run directories with known numbers."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from async_rl.base.config.loading import dump_config
from async_rl.base.errors import ConfigError
from async_rl.tools.sweeps.cells import all_cells, cell_config, key_axis, make_record, seed_axis, write_record
from async_rl.tools.sweeps.plan import compare
from async_rl.tools.sweeps.plots import learning, trade_off
from async_rl.tools.sweeps.report import write_report
from async_rl.tools.sweeps.results import Run, read_results, read_runs
from async_rl.tools.sweeps.settings import Setting, bounds_compared, corrections_compared, recommendation, settings_of
from tests.kit.runs import logged
from tests.kit.sweeps import base_yaml, make_sweep, write_cell


@pytest.fixture(scope="module")
def printed(sweep: Path) -> str:
    return write_report(sweep)


def test_the_table_has_a_row_for_each_bound_and_marks_the_best(sweep: Path, printed: str) -> None:
    text = (sweep / "table.md").read_text().partition("## The trade-off\n\n")[2]
    lines = text.partition("\n\n")[0].splitlines()
    assert lines[0].startswith("| staleness | effective steps per minute | a step is worth")
    assert [line.replace("*", "").split("|")[1].strip() for line in lines[2:]] == ["0", "1", "3"]
    (best,) = [line for line in lines if line.endswith("best")]
    assert best.startswith("| **1** |")  # at 1 the learner is nearly always busy, at 3 a step teaches 45 % less
    assert all("±" in line for line in lines[2:])


def test_the_csv_holds_the_numbers(sweep: Path, printed: str) -> None:
    with (sweep / "table.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["staleness"] for record in records] == ["0", "1", "3"]
    assert float(records[2]["is_variance"]) == pytest.approx(0.3, rel=0.1)
    assert float(records[2]["is_variance_error"]) > 0
    assert records[0]["seeds"] == "3"


def test_the_page_is_one_file_with_every_picture_in_it(sweep: Path, printed: str) -> None:
    page = (sweep / "report.html").read_text()
    pictures = sorted(path.name for path in (sweep / "plots").glob("*.png"))
    assert pictures == sorted(
        f"{name}.png"
        for name in (
            "trade_off", "learning", "utilisation", "off_policy",
        )
    )
    assert page.count("data:image/png;base64,") == len(pictures)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # nothing is loaded from elsewhere
    assert 'class="best"' in page
    first = [page.index(part) for part in ('class="lead"', "<figure>", "<table>")]
    assert first == sorted(first)


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
        assert measured.learner + measured.rollout <= measured.bound * 1.05


def test_exact_mode_is_in_the_table_but_neither_recommended_nor_predicted(sweep: Path, tmp_path: Path) -> None:
    exact = tmp_path / "exact"
    shutil.copytree(sweep, exact)
    shutil.rmtree(exact / "plots", ignore_errors=True)
    for file in exact.glob("cells/*/config.yaml"):
        file.write_text(file.read_text().replace("mode: bounded", "mode: exact"))
    text = write_report(exact)
    assert "Take staleness" not in text and "predicted" not in text
    header = next(line for line in text.splitlines() if line.startswith("|"))
    assert "ESS" in header
    assert not any(word in header for word in ("utilisation", "minute", "wall"))
    assert {path.stem for path in (exact / "plots").iterdir()} == {"trade_off", "learning", "off_policy"}


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        write_report(tmp_path)


def test_a_single_run_makes_a_report_that_declares_it_not_the_best(sweep: Path, printed: str) -> None:
    run = sorted((sweep / "cells").iterdir())[0]
    text = write_report(run)
    html = (run / "report.html").read_text()
    assert text.splitlines()[4].startswith("| 0 | ") and "<table" in html
    assert "best" not in text and 'class="best"' not in html


def test_every_run_stands_in_a_file_of_its_own(sweep: Path, printed: str) -> None:
    with (sweep / "runs.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [(record["staleness"], record["seed"]) for record in records] == [(b, s) for b in "013" for s in "012"]
    of_one = [float(record["per_minute"]) for record in records if record["staleness"] == "1"]
    assert sum(of_one) / 3 == pytest.approx(settings_of(read_runs(sweep))[1].estimate("per_minute").mean, rel=1e-4)


def test_every_evaluation_stands_in_a_file_of_its_own(sweep: Path, printed: str) -> None:
    with (sweep / "evals.csv").open() as file:
        records = [record for record in csv.DictReader(file) if (record["staleness"], record["seed"]) == ("1", "2")]
    (run,) = [run for run in read_runs(sweep) if (run.staleness.max, run.labels["seed"]) == (1, "2")]
    evals = [tuple(float(record[key]) for key in ("version", "seconds", "accuracy")) for record in records]
    assert evals == pytest.approx([pytest.approx(each, abs=1e-3) for each in run.evals])


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


def test_an_axis_may_vary_a_whole_section(tmp_path: Path) -> None:
    axis = key_axis("task.params={min_terms: 2},{min_terms: 3}")
    for cell in all_cells([axis, seed_axis(1, 0)], tmp_path / "sections"):
        write_cell(dataclasses.replace(cell, labels=cell.labels | {"staleness": "0"}), 4)
        resolved = cell_config(str(base_yaml(tmp_path)), [], cell)
        (cell.folder / "config.yaml").write_text(dump_config(resolved))
        write_record(cell, make_record(cell, resolved, 60.0))
    assert len(read_runs(tmp_path / "sections")) == 2


def test_presets_may_differ_in_all_that_a_preset_sets(tmp_path: Path) -> None:
    config = str(base_yaml(tmp_path))
    for cell in all_cells([key_axis("algorithm.preset=grpo,ppo,rloo"), seed_axis(1, 0)], tmp_path / "presets"):
        write_cell(dataclasses.replace(cell, labels=cell.labels | {"staleness": "0"}), 4)
        resolved = cell_config(config, [], cell)
        (cell.folder / "config.yaml").write_text(dump_config(resolved))
        write_record(cell, make_record(cell, resolved, 60.0))
    assert len(read_runs(tmp_path / "presets")) == 3


def test_an_evaluation_beside_training_counts_from_the_newest_version_that_answered(
    sweep: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sweep / "cells" / "staleness-1.seed-0", run)
    lines = logged(run)
    for line in lines:
        if line["step"] == 10 and "eval/accuracy" in line:
            line["eval/newest_version"] = 13.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (read,) = read_runs(run)
    (at_13,) = [line["time/since_first_step_s"] for line in lines if line["step"] == 13]
    assert [(version, seconds) for version, seconds, _ in read.evals][1] == (13.0, at_13)


def exact_row(bound: int, correction: str, gains: list[float]) -> Setting:
    labels = {"staleness": str(bound), "correction": correction, "seed": "0"}
    runs = tuple(Run(labels, {}, [], [], Path(), exact=True) for _ in gains)
    return Setting(runs, {"improvement": gains, "reward_mean": gains})


def differences(rows: list[Setting]) -> dict[tuple[str, str], tuple[str, str]]:
    """(difference, corrected p-value) of the improvement by correction and staleness."""
    table = corrections_compared(rows)[0]
    return {(row[0], row[1]): (row[2], row[4]) for row in table.rows}


def test_corrections_are_compared_with_none_at_each_exact_staleness() -> None:
    rows = [
        exact_row(4, "none", [0.40, 0.41, 0.42]), exact_row(4, "coupled", [0.41, 0.40, 0.42]),
        exact_row(8, "none", [0.10, 0.11, 0.12]), exact_row(8, "coupled", [0.40, 0.41, 0.42]),
    ]
    found = differences(rows)
    assert {key: difference for key, (difference, _) in found.items()} == {
        ("coupled", "average"): "+0.150", ("coupled", "4"): "+0.000", ("coupled", "8"): "+0.300",
    }  # fmt: skip
    assert float(found["coupled", "8"][1]) < 0.05 < float(found["coupled", "4"][1])
    at_0 = [exact_row(0, "none", [0.1, 0.2]), exact_row(0, "coupled", [0.4, 0.5])]
    assert differences([*rows, *at_0]) == found, "at 0 there is nothing to correct"
    two = differences([*rows, exact_row(8, "decoupled_tis", [0.10, 0.11, 0.12])])
    assert two["decoupled_tis", "average"][0] == two["decoupled_tis", "8"][0] == "+0.000"
    assert corrections_compared(rows[:1]) == []


def test_corrections_with_one_seed_have_no_p_value() -> None:
    found = differences([exact_row(4, "none", [0.1]), exact_row(4, "coupled", [0.4])])
    assert found["coupled", "4"] == ("+0.300", "-")


def test_a_correction_with_a_seed_that_has_no_improvement_has_no_difference() -> None:
    found = differences([exact_row(4, "none", [0.1, 0.2]), exact_row(4, "coupled", [0.4, math.nan])])
    assert found == {("coupled", "average"): ("-", "-"), ("coupled", "4"): ("-", "-")}


def test_what_clipping_held_back_and_the_gradient_stand_beside_every_run(sweep: Path) -> None:
    run = read_runs(sweep)[0]
    names = ("clipped_positive", "clipped_negative", "grad_norm")
    assert all(math.isnan(run.values()[name]) for name in names)
    measured = [(9.0, 9.0, 9.0), (0.1, 0.02, 1.0), (0.3, 0.04, 2.0)]  # the first step is left out
    keys = ("offpolicy/clip_fraction_positive", "offpolicy/clip_fraction_negative", "policy/grad_norm")
    steps = [{**step, **dict(zip(keys, of, strict=True))} for step, of in zip(run.steps, measured, strict=False)]
    values = dataclasses.replace(run, steps=steps).values()
    assert [values[name] for name in names] == pytest.approx([0.2, 0.03, 1.5])


def test_depths_stand_between_the_bounds_in_tables_and_prediction(tmp_path: Path) -> None:
    """Learning slows with the depth, and the simulator's durations are those of the same depth."""
    sweep = make_sweep(tmp_path, bounds=(0, 1, "1.5/3", 3), seeds=2)
    rows = settings_of(read_runs(sweep))
    assert [str(row.staleness) for row in rows] == ["0", "1", "1.5/3", "3"]
    assert [row.name for row in rows][2] == "staleness 1.5/3"
    worth = [row.estimate("efficiency").mean for row in rows]
    assert worth == sorted(worth, reverse=True) and worth[0] == 1.0
    measured = {str(each.staleness): each for each in compare(rows)}
    found = measured["1.5/3"]
    assert found.predicted is not None
    assert found.predicted.utilisation == pytest.approx(found.learner, rel=0.1)
    assert measured["1"].staleness_mean < found.staleness_mean < measured["3"].staleness_mean
    write_report(sweep)
    assert (sweep / "plots" / "depths.png").is_file()
    assert "| 1.5/3 |" in (sweep / "table.md").read_text()
    with (sweep / "runs.csv").open() as file:
        assert [line["staleness"] for line in csv.DictReader(file)] == ["0", "0", "1", "1", "1.5/3", "1.5/3", "3", "3"]
    shutil.rmtree(sweep / "cells")
    assert [str(row.staleness) for row in settings_of(read_results(sweep))] == ["0", "1", "1.5/3", "3"]


def test_a_report_claims_no_lead_that_its_seeds_do_not_show(sweep: Path) -> None:
    """Two seeds whose values lie far apart, and a best bound by a hair."""
    rows = [dataclasses.replace(row, values=dict(row.values)) for row in settings_of(read_runs(sweep))]
    for row, values in zip(rows, ([90.0, 100.0, 110.0], [91.0, 101.0, 111.0], [95.0, 97.0, 99.0]), strict=True):
        row.values["effective_steps_per_minute"] = values
    assert "can't tell" in recommendation(rows)
    rows[2].values["effective_steps_per_minute"] = [10.0, 11.0, 12.0]  # the others are both ahead of it
    assert recommendation(rows).startswith("Take staleness 0: ")


def test_a_plot_has_a_dot_for_each_seed_and_joins_bounds_alone(tmp_path: Path) -> None:
    rows = settings_of(read_runs(make_sweep(tmp_path, bounds=(0, 1, "1.5/3", "2/3", 3, 4), seeds=2, steps=12)))

    def lines(rows: list[Setting]) -> list[int]:
        """The numbers of points of the lines of the first panel that have a line."""
        found = [line for line in trade_off(rows).axes[0].lines if line.get_linestyle() == "-"]
        return [len(line.get_xdata()) for line in found if len(line.get_xdata()) > 1]

    axes = trade_off(rows).axes[0]
    assert axes.get_ylabel() and len([line for line in axes.lines if line.get_marker() == "."]) == len(rows)
    assert lines(rows) == [] and lines([row for row in rows if row.staleness.is_full]) == [4]
    curves = learning(rows).axes[0]
    assert len({line.get_label() for line in curves.lines if not line.get_label().startswith("_")}) == 5
