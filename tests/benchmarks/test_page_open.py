"""The benchmark of training speed beside the open page: its client, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.marked_command import wait_until
from benchmarks.page_open import Follower, Speed, read_pairs, report
from tests.kit.view.run_dirs import append_step, make_run
from tests.kit.view.server import ViewServer


@pytest.mark.processes
def test_the_client_asks_for_the_page_again_after_each_step(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", note="running")
    server = ViewServer(run_dir)
    follower = Follower(server.url)
    for step in (13, 14):
        before = follower.refreshes
        append_step(run_dir, step)
        wait_until(lambda before=before: follower.refreshes > before, 30, "the page to be asked for")  # type: ignore[misc]
    follower.close()
    server.close()
    assert follower.error == ""


def test_the_table_has_the_ratio_of_each_pair_and_of_all() -> None:
    pairs = [(Speed(2.0, 0, 0.0), Speed(2.2, 30, 0.05)), (Speed(4.0, 0, 0.0), Speed(3.6, 40, 0.06))]
    text = report("the command", pairs)
    assert "| 1 | 2.000 | 2.200 | 1.100 | 30 | 5.0% |" in text
    assert "| 2 | 4.000 | 3.600 | 0.900 | 40 | 6.0% |" in text
    assert "0.967 times" in text


def test_the_same_command_goes_on_after_the_pairs_it_has_measured(tmp_path: Path) -> None:
    speed = {"steps_per_s": 2.0, "refreshes": 3, "page_cpu": 0.1}
    saved = {"command": "this", "pairs": [{"without": speed, "with_page": speed}]}
    (tmp_path / "out.json").write_text(json.dumps(saved))
    assert read_pairs(tmp_path / "out.json", "this") == [(Speed(2.0, 3, 0.1), Speed(2.0, 3, 0.1))]
    assert read_pairs(tmp_path / "out.json", "another") == read_pairs(tmp_path / "none.json", "this") == []
