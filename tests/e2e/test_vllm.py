"""Runs whose answers come from vLLM: bound, kills, resume, sweep, and a server of another engine beside it."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest
import yaml

from async_rl.base.config.loading import load_config
from async_rl.pipeline import run
from benchmarks.kill_matrix import kill_once
from tests.kit.assembled import run_assembled
from tests.kit.engines.vllm import needs_vllm
from tests.kit.episode_policies import check, configure
from tests.kit.models import save_tiny_model
from tests.kit.runs import logged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


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


@pytest.mark.nightly
def test_the_bound_and_the_logprobs_hold_for_100_steps_with_updates_in_mid_answer(vllm_yaml: Path) -> None:
    config = load_config(vllm_yaml, ["run.steps=100", "staleness.max=2"])
    summary = run(config)
    assert summary["steps"] == 100
    assert summary["buffer"]["buffer/trained"] == 100 * config.learner.prompts_per_step
    assert summary["buffer"]["buffer/unaccounted"] == 0
    steps = [record for record in logged(config.run_dir) if "staleness/max" in record]
    assert len(steps) == 100
    assert 1 <= max(step["staleness/max"] for step in steps) <= 2
    assert max(step.get("parity/precision/mean_abs", 0.0) for step in steps) < 1e-4
    assert any("parity/old_kv/mean_abs" in step for step in steps)  # answers ran over updates


@pytest.mark.nightly
def test_episodes_of_several_turns_keep_the_bound(vllm_yaml: Path, tmp_path: Path) -> None:
    case = ("bounded", "wait", "in_place")
    config = configure(vllm_yaml, tmp_path, case)
    run = run_assembled(config)
    check(run, config, case)
    assert any("parity/precision/mean_abs" in step for step in run.steps)


@pytest.mark.nightly
def test_a_killed_server_comes_back_and_every_group_is_accounted_for(vllm_yaml: Path, tmp_path: Path) -> None:
    options = ["staleness.max=2", "eval.num_prompts=0"]
    outcome = kill_once(str(vllm_yaml), "server", options, random.Random(0), tmp_path)
    log = (tmp_path / "server.log").read_text()
    assert outcome.exit_code == 130, log[-3000:]
    assert outcome.error == ""
    assert outcome.counts_add_up
    assert outcome.staleness_max <= 2
    assert outcome.orphans == 0


@pytest.mark.nightly
def test_two_engines_serve_one_run(vllm_yaml: Path) -> None:
    config = load_config(vllm_yaml, [
        "placement.rollout={servers: 2, engines: [sglang, vllm]}", "staleness.max=2", "run.steps=20",
    ])
    summary = run(config)
    assert summary["steps"] == 20
    assert summary["staleness_max"] <= 2
    assert summary["buffer"]["buffer/unaccounted"] == 0
    assert max(record.get("parity/precision/mean_abs", 0.0) for record in logged(config.run_dir)) < 1e-4
    with sqlite3.connect(config.run_dir / "trajectories.sqlite") as journal:
        workers = [worker for (worker,) in journal.execute("SELECT DISTINCT worker FROM groups ORDER BY worker")]
    assert workers == ["rollout/0", "rollout/1"]
    assert {file.name for file in (config.run_dir / "logs").glob("*-rollout-*.log")} >= {
        "sglang-rollout-0.log", "vllm-rollout-1.log",
    }
