"""The cost of evaluations: its figures by hand, from the lines of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from benchmarks.evaluation_cost import KINDS, EvaluationRun, costs, main, measured, table_of

ROOT = Path(__file__).parents[2]


def test_a_run_took_the_time_between_its_first_and_its_last_step(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": 0.1, "time/since_first_step_s": 0.0},
        {"step": 2, "reward/mean": 0.1, "time/since_first_step_s": 4.0}, {"step": 2, "eval/accuracy": 0.2},
        {"step": 4, "reward/mean": 0.2, "time/since_first_step_s": 12.5}, {"step": 4, "eval/accuracy": 0.3},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured("beside training", 3, tmp_path) == EvaluationRun("beside training", 3, 12.5, 1)


def test_a_cost_is_a_share_of_the_time_against_the_run_of_the_same_seed() -> None:
    runs = [EvaluationRun("none", 0, 9.0, 0), EvaluationRun("none", 1, 12.0, 0)]
    runs += [EvaluationRun(kind, seed, 10.0 + 5 * seed, 2) for kind in KINDS if kind != "none" for seed in range(2)]
    assert costs(runs, "beside training") == pytest.approx([0.1, 0.2])
    rows = {row[0]: row[1:] for row in table_of(runs).rows}
    assert rows["none"] == ["10.5", "0.0", "-"]
    assert rows["on a server of its own"] == ["12.5", "2.0", "15.0% ± 5.0%"]


def test_the_guide_quotes_the_costs_of_the_committed_runs() -> None:
    def cost(name: str, kind: str) -> str:
        file = ROOT / "benchmarks" / "results" / f"{name}.json"
        rows = table_of([EvaluationRun(**run) for run in json.loads(file.read_text())]).rows
        return next(row[3] for row in rows if row[0] == kind).replace("% ±", " ±").replace("%", " %")

    guide = " ".join((ROOT / "docs" / "guide.md").read_text().split())
    beside, pinned, own = (cost("evaluation_cost_room", kind) for kind in KINDS if kind != "none")
    text = f"every eight steps {beside} of the time, pinned {pinned}, and on a server of its own {own} (two runs each"
    assert text in guide
    full = [cost("evaluation_cost", kind) for kind in ("beside training", "beside training, pinned")]
    rounded = [" ± ".join(f"{float(part):.0f}" for part in each.removesuffix(" %").split(" ± ")) for each in full]
    assert "it takes {} % of the time, and {} % where it is pinned".format(*rounded) in guide


def test_a_kind_that_this_host_refuses_is_left_out_and_the_page_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def train(kind: str, seed: int, *_: object) -> EvaluationRun | str:
        tried.append(kind)
        return "2 cores for 3 processes" if "server" in kind else EvaluationRun(kind, seed, 10.0, 1)

    monkeypatch.setattr("benchmarks.evaluation_cost.train", train)
    monkeypatch.setattr("sys.argv", ["evaluation_cost", "a.yaml", "--rounds", "2", "--out", str(tmp_path / "cost")])
    main()
    page = (tmp_path / "cost.md").read_text()
    assert "Not measured: on a server of its own. 2 cores for 3 processes" in page
    assert "| on a server" not in page and "| beside training | 10.0 | 1.0 | 0.0% ± 0.0% |" in page
    assert tried.count("on a server of its own") == 1 and tried.count("none") == 2


def test_a_configuration_that_is_refused_replaces_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.evaluation_cost.train", lambda *_: "config file a.yaml can't be read")
    (tmp_path / "cost.md").write_text("kept")
    monkeypatch.setattr("sys.argv", ["evaluation_cost", "a.yaml", "--out", str(tmp_path / "cost")])
    with pytest.raises(SystemExit, match=r"nothing is measured: config file a\.yaml can't be read"):
        main()
    assert (tmp_path / "cost.md").read_text() == "kept" and not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_each_kind_are_valid(kind: str) -> None:
    config = load_config(ROOT / "configs" / "sweep_agent_cpu.yaml", ["eval.every_steps=6", *KINDS[kind]])
    assert (config.eval.every_steps > 0) == (kind != "none")
