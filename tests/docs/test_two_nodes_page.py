"""docs/two-nodes.md: the push times that it quotes are the arithmetic that it names."""

from __future__ import annotations

import re

import pytest

from benchmarks.kill_matrix import outcome_table
from tests.kit.documents import DOCUMENTS, results_of


def test_the_quoted_push_times_follow_from_weights_and_links() -> None:
    page = DOCUMENTS["docs/two-nodes.md"]
    (share,) = re.findall(r"with the (0\.\d+) of a plain broadcast", page)
    measured = {(row["transport"], row["megabytes"]): row for row in results_of("weight_push")["rows"]}
    assert share == f"{measured['gloo', 1024]['of_plain']:.2f}"
    weights = [float(number) * 1e9 for number in re.findall(r"([\d.]+) B weights, \d+ GB", page)]
    rows = re.findall(r"^\| (\d+) Gb/s \| ([\d.]+) s \| ([\d.]+) s \|$", page, re.MULTILINE)
    assert len(weights) == 2 and len(rows) == 3
    for link, *told in rows:
        bytes_per_s = float(link) * 1e9 / 8 * float(share)
        for number, seconds in zip(weights, told, strict=True):
            assert float(seconds) == pytest.approx(2 * number / bytes_per_s, rel=0.05)


def test_the_kills_with_other_pushes_ended_as_the_page_says() -> None:
    outcomes = results_of("kill_matrix")["outcomes"]
    others = [outcome for outcome in outcomes if outcome["push"] in ("whole, staged (device)", "adapters", "changes")]
    kinds = {"server", "worker", "silent", "buffer", "learner", "driver"}
    assert {(outcome["push"], outcome["kind"]) for outcome in others} == {
        (push, kind) for push in ("whole, staged (device)", "adapters", "changes") for kind in kinds
    }
    rows = [line for line in outcome_table(others).markdown().splitlines() if "1 of 1" in line]
    assert len(rows) == len(others) == 18
    assert all(each["counts_add_up"] and each["staleness_max"] <= each["bound"] for each in others)
    assert sum(each["orphans"] for each in others) == 0
    assert "18 of 18 as above, no group lost or trained on twice, nothing left" in DOCUMENTS["docs/two-nodes.md"]
