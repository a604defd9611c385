"""Runs whose answers come from vLLM: updates in mid-answer for 300 steps, and a server that is killed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from async_rl.config.loading import load_config
from async_rl.pipeline import run
from benchmarks import kill_matrix
from benchmarks.kill_matrix import kill_once
from tests.rollout_server.engines.vllm_cases import needs_vllm
from tests.tiny_folder import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def vllm_yaml(smoke_yaml: Path, tmp_path: Path) -> Path:
    """The smoke run with a model that vLLM's kernels for CPUs take."""
    needs_vllm()
    tree = yaml.safe_load(smoke_yaml.read_text())
    save_tiny_model("tiny-qwen3", tmp_path / "model", seed=0)
    tree["model"]["path"] = str(tmp_path / "model")
    tree["run"]["dir"] = str(tmp_path)
    tree["rollout"] |= {"engine": "vllm", "max_response_tokens": 64}
    path = tmp_path / "vllm.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_bound_and_the_logprobs_hold_for_300_steps_with_updates_in_mid_answer(vllm_yaml: Path) -> None:
    config = load_config(vllm_yaml, ["run.steps=300", "staleness.max=2"])
    summary = run(config)
    assert summary["steps"] == 300
    assert summary["buffer"]["buffer/trained"] == 300 * config.learner.prompts_per_step
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "staleness/max" in step]
    assert len(steps) == 300
    assert 1 <= max(step["staleness/max"] for step in steps) <= 2
    assert max(step.get("mismatch/mean_abs", 0.0) for step in steps) < 1e-4
    assert any("mismatch/old_kv_mean_abs" in step for step in steps)  # answers ran over updates


def test_a_killed_server_comes_back_and_every_group_is_accounted_for(
    vllm_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kill_matrix.VICTIMS, "server", "VLLM::EngineCore")
    options = ["staleness.max=2", "eval.size=0"]
    outcome = kill_once(str(vllm_yaml), "server", options, random.Random(0), tmp_path)
    log = (tmp_path / "server.log").read_text()
    assert outcome.exit_code == 130, log[-3000:]
    assert outcome.error == ""
    assert outcome.counts_add_up
    assert outcome.staleness_max <= 2
    assert outcome.orphans == 0
