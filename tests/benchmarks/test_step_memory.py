"""A learner rank takes as much memory as the dry run says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.step_memory import CASES, GPU_CASES, case_config, compare, page, said, save_models
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


def test_a_case_on_a_gpu_differs_from_the_plain_one_in_what_its_name_says(tmp_path: Path) -> None:
    plain, *others = (case_config(case, tmp_path) for case in GPU_CASES)
    assert plain.learner.offload == "none" and plain.learner.gradient_checkpointing is False
    for case, config in zip(list(GPU_CASES)[1:], others, strict=True):
        assert config.model.path == str(tmp_path / "1b") and config.longest_tokens == 1024
        assert config.learner.gradient_checkpointing is ("checkpointed" in case)
        offloaded = [name for name in ("moments", "all") if f"{name} offloaded" in case]
        assert config.learner.offload == (offloaded or ["none"])[0]
        assert (config.model.lora.rank > 0) == ("adapters" in case)
        assert (config.algorithm.advantage == "gae") == ("critic" in case)
    found = [{"case": "1b", "ranks": 1, "said": 103 * 2**20, "moment": "logits", "measured": 100 * 2**20}]
    text = page(found, "here", on_gpu=True)
    assert "benchmarks.step_memory --gpu" in text and "| 1b | 1 | 103 | logits | 100 | +3.0% |" in text


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
        assert said(case_config(each["case"], root), "cpu").peak == each["said"]
