"""A learner rank takes as much memory as the dry run says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from benchmarks.random_model import SIZES
from benchmarks.step_memory import CASES, GPU_CASES, case_config, compare, said, save_models
from tests.kit.documents import ROOT
from tests.kit.model_headers import save_headers

ON_AN_H100 = json.loads((ROOT / "benchmarks/results/gpu/first_contact.json").read_text())["memory"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, on_gpu=False)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("measured", ON_AN_H100, ids=lambda measured: measured["case"])
def test_an_h100_took_what_is_said_within_3_percent(measured: dict[str, Any], tmp_path: Path) -> None:
    save_headers(Qwen2Config(**SIZES["1b"], max_position_embeddings=4096, tie_word_embeddings=True), tmp_path / "1b")
    case = measured["case"].replace("all weights", "1b").replace("offload: moments", "moments offloaded")
    assert case in GPU_CASES
    found = round(said(case_config(case, tmp_path), "cuda").peak / 2**20)
    assert found == pytest.approx(measured["measured_mib"], rel=0.03)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_15_percent_of_the_measured_peak(case: str, root: Path) -> None:
    said_now, measured = compare(case, root)
    assert said_now.peak == pytest.approx(measured, rel=0.15)
