"""A learner rank takes as much memory as the dry run says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.step_memory import CASES, case_config, compare, page, said, save_models
from tests.kit.documents import DOCUMENTS, ROOT

RESULTS = ROOT / "benchmarks" / "results" / "step_memory.json"


def test_the_plan_was_within_15_percent_of_each_measured_peak() -> None:
    found = json.loads(RESULTS.read_text())
    assert RESULTS.with_suffix(".md").read_text() == page(found["cases"], found["machine"], on_gpu=False)
    assert [each["case"] for each in found["cases"]] == list(CASES)
    for each in found["cases"]:
        assert each["said"] == pytest.approx(each["measured"], rel=0.15)
    largest = max(abs(each["said"] / each["measured"] - 1) for each in found["cases"])
    for page_of in ("docs/gpu.md", "docs/gpu-audit.md"):
        assert f"within {math.ceil(100 * largest)} %" in DOCUMENTS[page_of]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, on_gpu=False)
    return folder


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_15_percent_of_the_measured_peak(case: str, root: Path) -> None:
    said_now, measured = compare(case, root)
    assert said_now.peak == pytest.approx(measured, rel=0.15)


@pytest.mark.nightly
def test_the_results_say_what_the_plan_says_now(root: Path) -> None:
    for each in json.loads(RESULTS.read_text())["cases"]:
        assert said(case_config(each["case"], root)).peak == each["said"]
