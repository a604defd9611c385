"""Sweeps: cells as they arrive, points with error bars, and sweeps without their runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from async_rl.telemetry.status import write_status
from async_rl.view.library import Library
from async_rl.view.sweep_files import SweepFiles
from tests.kit.sweeps import make_sweep
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import append_step, make_run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED = RESULTS / "sweep_cpu"


@pytest.fixture
def sweep_dir(tmp_path: Path) -> Path:
    return make_sweep(tmp_path, bounds=(0, 1), seeds=2)


def test_a_point_is_the_mean_over_seeds_with_its_error(sweep_dir: Path) -> None:
    sweep = SweepFiles(sweep_dir)
    (line,) = sweep.points("learner", "staleness")
    cells = {cell.name: cell.values["learner"] for cell in sweep.cells()}
    at_zero = [value for name, value in cells.items() if "staleness-0" in name]
    assert (line["labels"], line["seeds"]) == (["0", "1"], [2, 2])
    assert line["mean"][0] == pytest.approx(sum(at_zero) / 2)
    assert line["error"][0] == pytest.approx(abs(at_zero[0] - at_zero[1]) / 2)


def test_a_setting_with_a_seed_that_has_no_value_is_no_point(sweep_dir: Path) -> None:
    """The other seeds alone would flatter it, if the run was stopped because it learned nothing."""
    file = sweep_dir / "cells" / "staleness-1.seed-1" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))  # the evaluation of the last version
    sweep = SweepFiles(sweep_dir)
    (line,) = sweep.points("accuracy_end", "staleness")
    assert (line["labels"], line["seeds"]) == (["0"], [2])
    assert [math.isnan(row.estimate("accuracy_end").mean) for row in sweep.rows()] == [False, True]
    assert "in no comparison by either: staleness-1.seed-1." in Client(sweep_dir).get("/sweep").text


def test_a_point_of_the_largest_staleness_is_the_largest_of_all_seeds(sweep_dir: Path) -> None:
    file = sweep_dir / "cells" / "staleness-1.seed-1" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"staleness_max": 0}))
    sweep = SweepFiles(sweep_dir)
    (line,) = sweep.points("staleness_max", "staleness")
    assert (line["mean"], line["error"]) == ([0, 1], [0.0, 0.0])
    assert line["mean"] == [row.estimate("staleness_max").mean for row in sweep.rows()]


def test_any_metric_of_the_steps_can_be_plotted(sweep_dir: Path) -> None:
    sweep = SweepFiles(sweep_dir)
    assert "time/train_s" in sweep.metric_keys()
    assert sweep.points("time/train_s", "staleness")[0]["mean"][0] > 0
    assert sweep.points("no/such/metric", "staleness") == []
    assert sweep.points("learner", "no axis") == []


def test_metrics_that_the_last_step_did_not_measure_can_be_chosen(sweep_dir: Path) -> None:
    file = next((sweep_dir / "cells").glob("*/metrics.jsonl"))
    file.write_text('{"step": 1, "staleness/max": 0, "push/lost_servers": 1.0}\n' + file.read_text())
    assert "push/lost_servers" in SweepFiles(sweep_dir).metric_keys()


def test_a_cell_that_runs_is_listed_and_has_pages(sweep_dir: Path) -> None:
    make_run(sweep_dir / "cells" / "staleness-9.seed-0", note="running")
    sweep = SweepFiles(sweep_dir)
    (running,) = [cell for cell in sweep.cells() if cell.state == "running"]
    assert (running.name, running.progress, running.has_run) == ("staleness-9.seed-0", "step 12 of 20", True)
    client = Client(sweep_dir)
    assert "step 12 of 20" in client.get("/sweep").text
    assert client.get("/cells/staleness-9.seed-0/groups").status_code == 200
    assert client.get("/cells/staleness-9.seed-0/data/answers/1/0").json()["text"] == "right answer"


@pytest.mark.parametrize(
    ("note", "state"),
    [("paused by its guard", "paused"), ("ended: Ctrl-C", "stopped"), ("ended normally", "stopped")],
)
def test_a_cell_that_its_guard_has_paused_has_not_stopped(sweep_dir: Path, note: str, state: str) -> None:
    make_run(sweep_dir / "cells" / "staleness-9.seed-0", note=note)
    (cell,) = [cell for cell in SweepFiles(sweep_dir).cells() if cell.name == "staleness-9.seed-0"]
    assert cell.state == state
    assert f'<span class="pill {state}">{state}</span>' in Client(sweep_dir).get("/sweep").text


def test_a_cell_that_finishes_changes_the_revision(sweep_dir: Path) -> None:
    sweep = SweepFiles(sweep_dir)
    before = sweep.revision()
    make_run(sweep_dir / "cells" / "staleness-9.seed-0")
    assert sweep.revision() != before


def test_a_cell_that_its_guard_pauses_changes_the_revision_and_its_progress_does_not(sweep_dir: Path) -> None:
    run_dir, sweep = make_run(sweep_dir / "cells" / "staleness-9.seed-0", note="running"), SweepFiles(sweep_dir)
    before = sweep.revision()
    write_status(run_dir, [], "running")
    append_step(run_dir, 13)
    assert sweep.revision() == before
    write_status(run_dir, [], "paused by its guard")
    assert sweep.revision() != before


def test_the_table_of_cells_says_when_an_open_page_lacks_charts(sweep_dir: Path) -> None:
    def offered(client: Client, path: str) -> str:
        found = re.search(r'data-offered="(.*?)"', client.get(path).text)
        assert found
        return found[1]

    records = list((sweep_dir / "cells").glob("*/cell.json"))
    kept = [(record, record.read_text()) for record in records]
    for record in records:
        record.unlink()
    client = Client(sweep_dir)
    at_load = offered(client, "/sweep")
    assert offered(client, "/sweep/cells") == at_load and 'data-metric="learner"' not in client.get("/sweep").text
    for record, text in kept:
        record.write_text(text)
    assert offered(client, "/sweep/cells") == offered(client, "/sweep") != at_load
    assert 'data-metric="learner"' in client.get("/sweep").text


def test_a_half_written_cell_is_one_sentence(sweep_dir: Path) -> None:
    next((sweep_dir / "cells").glob("*/cell.json")).write_text("{")
    response = Client(sweep_dir).get("/sweep")
    assert response.status_code == 200
    assert "The finished cells can&#39;t be compared" in response.text


def test_a_sweep_without_its_runs_is_shown_from_its_tables() -> None:
    sweep = SweepFiles(COMMITTED)
    plan = json.loads((COMMITTED / "sweep.json").read_text())
    assert len(sweep.cells()) == len(plan["axes"]["staleness"]) * len(plan["axes"]["seed"])
    assert sweep.axes(sweep.cells()) == ["staleness", "seed"]
    (line,) = sweep.points("learner", "staleness")
    assert line["labels"] == plan["axes"]["staleness"]
    assert Client(COMMITTED).get("/sweep").status_code == 200


def test_a_sweep_in_exact_mode_shows_what_was_measured_and_no_constant_axis() -> None:
    sweep = SweepFiles(RESULTS / "exact")
    assert sweep.axes(sweep.cells()) == ["staleness", "correction", "seed"]
    names = [line["name"] for line in sweep.points("ess", "staleness")]
    assert names == ["correction coupled", "correction decoupled_tis", "correction none"]
    page = Client(RESULTS / "exact").get("/sweep").text
    assert [metric in page for metric in ('data-metric="ess"', 'data-metric="kl"', 'data-metric="learner"')] == [
        True, True, False,
    ]  # fmt: skip


def test_a_sweep_is_its_own_first_page(sweep_dir: Path) -> None:
    assert Client(sweep_dir).get("/").headers["location"] == "/sweep"
    assert Library(sweep_dir).sweep is not None
