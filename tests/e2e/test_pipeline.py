"""Whole runs with a real SGLang server, ZMQ, torch.distributed and Ray."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.telemetry.prometheus import COUNTERS, DURATIONS, GAUGES, STEPS, prometheus_name
from async_rl.pipeline import run
from tests.kit.models import save_tiny_model
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e
DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [r for r in logged(run_dir) if "staleness/max" in r]


def check_dashboard(run_dir: Path) -> None:
    """Every metric on the Grafana dashboard is one of the run's."""
    named = re.findall(r"\b(async_rl_\w+?|rl_\w+?)(?:_total|_seconds_sum|_seconds_count)?\{", DASHBOARD.read_text())
    keys = {key for record in logged(run_dir) for key in record}
    served = {(DURATIONS | COUNTERS | GAUGES).get(key) or prometheus_name(key) for key in keys}
    assert len(named) > 12 and {*named} <= served | {STEPS}


TWO_RANKS = ["placement.learner.ranks=2", "weight_sync.bucket_bytes=65536"]
PPO = ["algorithm.advantage=gae", "critic.lr=1e-3", "algorithm.num_minibatches=2"]
LORA_AND_REFERENCE = ["model.lora.rank=4", "learner.lr=1e-2", "algorithm.kl.kind=k2_loss"]

IN_TURNS = ["placement.colocated=true", "weight_sync.transport=cuda_ipc", "weight_sync.bucket_bytes=65536"]
"""Settings of a run on one GPU. Here host memory takes the place of the GPU's, and none of it is released."""
TWO_PAIRS = ["placement.learner.ranks=2", "placement.rollout.servers=2"]
"""With the above, each of two ranks gives its weights to the server of its own GPU."""


@pytest.mark.parametrize(
    ("name", "overrides", "bound"),
    [
        pytest.param(
            "grpo-two-in-turns", [*IN_TURNS, *TWO_PAIRS, "eval.every_steps=2"], 0, marks=pytest.mark.nightly
        ),
        pytest.param("grpo-async", TWO_RANKS, 2, marks=pytest.mark.nightly),  # in CI two ranks: test_resume.py
        ("ppo-async", ["weight_sync.bucket_bytes=65536", *PPO, *LORA_AND_REFERENCE], 2),
    ],
)
def test_a_run_on_sglang_trains_every_group_once_within_its_bound(
    smoke_yaml: Path, name: str, overrides: list[str], bound: int
) -> None:
    config = load_config(smoke_yaml, [f"run.name={name}", f"staleness.max={bound}", *overrides])
    summary = run(config)
    assert summary["steps"] == 4
    assert summary["staleness_max"] <= bound
    counters = summary["buffer"]
    assert counters["buffer/trained"] == 4 * config.learner.prompts_per_step
    assert counters["buffer/admitted"] == counters["buffer/trained"] + sum(
        value for key, value in counters.items() if key.startswith("buffer/dropped_") and key.count("/") == 1
    )
    logged = steps(config.run_dir)
    assert [record["step"] for record in logged] == [1, 2, 3, 4]
    for record in logged:
        assert record.get("parity/precision/mean_abs", 0.0) < 1e-4  # absent where no token is of the learner's version
        assert record["push/bytes"] > 0
    check_dashboard(config.run_dir)
    pools = summary["pools"]
    assert set(pools) == {*(f"learner/{r}" for r in range(config.placement.learner.ranks)), *config.server_names}
    for shares in pools.values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
        assert shares["busy"] > 0
        assert shares["other"] < 0.2
    assert 0 <= summary.get("occupancy/rollout", 0.0) <= 1
    for file in (
        "config.yaml", "timeline.json", "timeline.png", "summary.json", "learning_curve.png", "model/model.safetensors",
    ):
        assert (config.run_dir / file).stat().st_size > 0, file


@pytest.mark.nightly
def test_a_llama_trains_over_the_disk_transport_with_two_hf_servers(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    save_tiny_model("tiny-llama", tmp_path / "llama", seed=0)
    config = load_config(
        smoke_yaml,
        [
            f"model.path={tmp_path / 'llama'}", f"run.dir={tmp_path / 'runs'}", "rollout.engine=hf",
            "placement.rollout.servers=2", "weight_sync.transport=disk", "staleness.max=1", "weight_sync.every_steps=2",
            "eval.every_steps=2", "eval.pin_version=true",
        ],
    )
    summary = run(config)
    assert summary["staleness_max"] <= 1
    assert summary["buffer"]["buffer/trained"] == 16
    evaluated = {record["step"]: record for record in logged(config.run_dir) if "eval/accuracy" in record}
    assert sorted(evaluated) == [0, 2, 4]
    assert (evaluated[2]["eval/oldest_version"], evaluated[2]["eval/newest_version"]) == (2, 2)
