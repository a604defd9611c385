"""Runs side by side: what they have in common with their files, the settings that differ, and runs that go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.sweeps.comparison import tokens_by_step, write_comparison
from async_rl.sweeps.results import Run, read_run
from async_rl.sweeps.tables import tables_in
from async_rl.telemetry.metrics import read_metrics
from async_rl.telemetry.status import RUNNING, STALE_S, write_status
from tests.kit.sweeps import make_sweep


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two finished runs and one that goes on, in folders of which two have the same name."""
    folders = []
    for place, bounds in (("a", (0, 2)), ("b", (0,))):
        (tmp_path / place).mkdir()
        for folder in sorted((make_sweep(tmp_path / place, bounds, seeds=1, steps=12) / "cells").iterdir()):
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            lines = [line | {"batch/response_tokens": 900.0 + line["step"]} for line in lines]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            folders.append(folder)
    (folders[2] / "summary.json").unlink()
    lines = (folders[2] / "metrics.jsonl").read_text().splitlines()
    (folders[2] / "metrics.jsonl").write_text("\n".join(lines[:8]) + "\n")
    write_status(folders[2], [], RUNNING)
    return folders


def test_runs_stand_side_by_side_with_the_settings_that_differ(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    values, settings = tables_in(capsys.readouterr().out)
    first, second, third = (f"{place}/sweep/cells/staleness-{bound}.seed-0" for place, bound in ("a0", "a2", "b0"))
    assert list(values.header) == ["", first, second, third]
    of = {row[0]: row[1:] for row in values.rows}
    assert of["state"] == ["ended", "ended", "running"]
    trained = [read_run(run).steps for run in runs]
    assert of["steps"] == [str(len(steps)) for steps in trained] and 0 < len(trained[2]) < 12
    tokens = [sum(step["batch/response_tokens"] or 0 for step in steps) for steps in trained]
    assert of["tokens trained on"] == [f"{count:,.0f}" for count in tokens]
    evals = [[line["eval/accuracy"] for line in read_metrics(run / "metrics.jsonl") if "eval/accuracy" in line]
             for run in runs]  # fmt: skip
    assert of["held-out accuracy, end"] == [*(f"{accuracies[-1]:.3f}" for accuracies in evals[:2]), "-"]
    assert "-" not in of["staleness, mean"], "a run that goes on has it from its steps"
    assert ["staleness.max", "0", "2", "0"] in [list(row) for row in settings.rows]
    assert not [row for row in settings.rows if row[0].startswith("run.")]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page


def test_the_seconds_of_the_compared_rewards_are_named_with_the_run_that_sets_them(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has just begun cuts the mean of the other to the seconds that are known of it."""
    assert main(["report", str(runs[0]), str(runs[2]), "--out", str(tmp_path / "out")]) == 0
    longer_s, shorter_s = (read_run(run).policy_curve.end_s for run in (runs[0], runs[2]))
    assert shorter_s < longer_s
    told = (
        f"Rewards of policies are means over the first {shorter_s:.1f} s after the first step: of "
        "b/sweep/cells/staleness-0.seed-0 no more is known.\n"
    )
    assert told in capsys.readouterr().out and told in (tmp_path / "out" / "table.md").read_text()
    assert told.strip() in (tmp_path / "out" / "report.html").read_text()


def test_a_run_without_a_summary_goes_on_was_ended_early_was_killed_or_has_no_status(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs[2] / "status.json"

    def state() -> str:
        assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
        values, _ = tables_in(capsys.readouterr().out)
        return list(next(row for row in values.rows if row[0] == "state"))[3]

    assert state() == "running"
    write_status(runs[2], [], "paused by its guard")
    assert state() == "paused"
    write_status(runs[2], [], "ended: Ctrl-C")
    assert state() == "ended early"
    saved = {"note": RUNNING, "time_s": time.time() - STALE_S - 1}
    for text, name in ((json.dumps(saved), "stopped writing"), ("{}", "unknown"), ("[", "unknown"), ("[]", "unknown")):
        file.write_text(text)
        assert state() == name
    file.unlink()
    assert state() == "unknown"


def test_one_run_that_goes_on_has_a_report_of_its_steps_so_far(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[2]
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    count = len(read_run(run).steps)
    assert 0 < count < 12 and f"The run has not ended: this is of its first {count} steps." in told
    assert (run / "report.html").is_file() and (run / "plots" / "policy_reward_by_version.png").is_file()
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines((runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)[-2:])
    assert main(["report", str(run)]) == 0, "its own runs.csv of before does not stand for the run"
    assert f"of its first {len(read_run(run).steps)} steps" in capsys.readouterr().out
    assert len(read_run(run).steps) > count


def test_runs_that_went_on_from_a_checkpoint_are_named_with_what_their_times_are(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        assert main(["report", *map(str, runs[:2]), "--out", str(tmp_path / "out")]) == 0
        printed, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
        assert ("went on from a checkpoint" in printed) == ("went on from a checkpoint" in page)
        return printed

    assert "went on from a checkpoint" not in told()
    lines = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    began_s = next(line["time/since_first_step_s"] for line in lines if line["step"] == 6 and "reward/mean" in line)
    for line in lines:
        if line["step"] >= 6 and "time/since_first_step_s" in line:
            line["time/since_first_step_s"] -= began_s
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        "These runs went on from a checkpoint, so their times are those of their parts added up, without each part's "
        "start and first step: staleness-2.seed-0.\n"
    ) in told()
    assert tables_in((tmp_path / "out" / "table.md").read_text())[0].header[2] == "staleness-2.seed-0"


def test_tokens_add_up_over_the_steps_without_those_that_were_not_trained_on(runs: list[Path]) -> None:
    run = read_run(runs[0])
    tokens = [step["batch/response_tokens"] or 0.0 for step in run.steps]
    run.steps[1]["staleness/masked_fraction"] = 0.25
    run.steps[2]["policy/skipped_batches"] = 1.0
    run.steps[3]["policy/skipped_batches"] = 0.0
    tokens[1:3] = [0.75 * tokens[1], 0.0]
    assert tokens_by_step(run) == {step["step"]: sum(tokens[: i + 1]) for i, step in enumerate(run.steps)}


def test_the_tokens_of_a_run_are_added_up_as_often_whatever_the_number_of_its_steps(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Path] = []

    def counted(run: Run) -> dict[float, float]:
        added.append(run.folder)
        return tokens_by_step(run)

    monkeypatch.setattr("async_rl.sweeps.comparison.tokens_by_step", counted)
    write_comparison(runs[:2], tmp_path / "out")
    assert sorted(added) == sorted(2 * runs[:2])  # for the table and for the picture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: [runs[0], runs[0].parents[1]], "is no run directory: .* it is a sweep, name its cells"),
        (lambda runs: [runs[0], runs[0]], "each run must be named once, got .* twice"),
        (lambda runs: [runs[0], runs[0] / "nowhere"], "is no run directory: it has no config.yaml"),
    ],
)
def test_what_is_no_run_is_refused(
    runs: list[Path], change: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert callable(change)
    assert main(["report", *map(str, change(runs))]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_run_without_a_step_is_refused(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[2] / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/accuracy": 0.1}) + "\n")
    for named in ([runs[0], runs[2]], [runs[2]]):
        assert main(["report", *map(str, named)]) == 2
        assert "the run has not trained a step yet" in capsys.readouterr().err


def test_the_report_of_one_folder_has_no_other_place(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(sweep), "--out", "elsewhere"]) == 2
    assert "--out must be left out for one folder, in which its report is written" in capsys.readouterr().err


def test_reports_that_can_not_be_written_say_what_to_do(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file stands where a folder is needed: root, who runs some tests, may write into all folders."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert f"a report in {out} can't be written: {out}: Not a directory. Set --out to a folder where you" in told
    (runs[0] / "plots").write_text("")
    assert main(["report", str(runs[0])]) == 2
    told = capsys.readouterr().err
    assert f"a report in {runs[0]} can't be written: {runs[0]}/plots: File exists. Copy the folder to where" in told
