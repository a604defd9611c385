"""The share of old tokens in the steps with the largest KL, by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kl_spikes import KL, spike_table, spikes_of


def write_run(folder: Path, depth: float, steps: list[dict[int, tuple[float, float]]]) -> Path:
    """A run at `depth` below 8; each step has {staleness: (tokens, KL)}."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"staleness: {{max: 8, depth: {depth}}}")
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "eval/accuracy": 0.5}) + "\n")
        for number, cells in enumerate(steps, 1):
            record: dict[str, float] = {"step": number, "staleness/mean": 1.0}
            for age, (tokens, kl) in cells.items():
                record |= {f"by_staleness/{age}/tokens": tokens, f"by_staleness/{age}/{KL}": kl}
            file.write(json.dumps(record) + "\n")
    return folder


def test_the_share_of_old_tokens_in_a_spike_is_told(tmp_path: Path) -> None:
    """Depth 1.25: tokens of 3 versions and more are old. Step 2 is calm."""
    steps = [{1: (80.0, 0.1), 2: (10.0, 0.2), 5: (10.0, 3.0)}, {1: (100.0, 0.01)}, {2: (100.0, 0.5)}]
    first, second = spikes_of(write_run(tmp_path / "one", 1.25, steps), count=2)
    assert (first.step, second.step) == (3, 1)
    table = spike_table([first, second])
    assert table.rows[0] == ["one", "1.25/8", "3", "1.00", "0.500", "0.0%", "0.0%", "0.500"]
    assert table.rows[1] == ["one", "1.25/8", "1", "1.00", "0.400", "75.0%", "10.0%", "0.111"]
    assert table.rows[2] == ["all 1", "1.25/8", "", "1.00", "0.450", "33.3%", "5.0%", "0.316"]


def test_runs_with_the_same_bound_are_added_up(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, depth, [{4: (10.0, 1.0)}]) for name, depth in (("a", 2), ("b", 2), ("c", 8))]
    rows = spike_table([spike for run in runs for spike in spikes_of(run)]).rows
    assert [row[:2] for row in rows[3:]] == [["all 2", "2/8"], ["all 1", "8"]]
    assert rows[3][4:7] == ["1.000", "100.0%", "100.0%"] and rows[4][5] == "0.0%"  # nan is no share of what is left
