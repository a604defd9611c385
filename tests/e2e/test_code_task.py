"""A tiny model learns short programs, which a sandbox runs."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.documents import run
from tests.kit.runs import logged
from tests.kit.sandbox import needs_bubblewrap

CONFIG = Path(__file__).parents[2] / "configs" / "code_cpu.yaml"


def trained(folder: Path, sft: str, train: str, timeout_s: float) -> list[dict[str, float]]:
    """Make the model of the config, train it, and return the lines of metrics.jsonl."""
    run(f"async-rl sft {CONFIG} {sft}", folder, timeout_s)
    run(f"async-rl train {CONFIG} rollout.engine=hf weight_sync.transport=disk logging.wandb=disabled {train}",
        folder, timeout_s)  # fmt: skip
    return logged(folder / "runs" / "code")


@pytest.mark.nightly
@pytest.mark.e2e
@needs_bubblewrap
def test_a_run_scores_programs_in_the_sandbox_and_names_the_reward(tmp_path: Path) -> None:
    lines = trained(tmp_path, "sft.batch_size=32", "run.steps=6 eval.num_prompts=32", timeout_s=140)
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 6 and all(line["reward/code"] == line["reward/mean"] for line in steps)
    assert all(line["reward/code/passed"] == line["reward/mean"] for line in steps)
    assert sum(line["reward/mean"] for line in steps) > 0.2
    assert any(key.startswith("by_staleness/") and key.endswith("/reward/code") for line in steps for key in line)
    assert lines[0]["eval/reward/code"] == lines[0]["eval/reward"]
    assert all(sum(line.get(f"scoring/code/{key}", 0) for line in lines) > 0 for key in ("calls", "cached"))
    run_dir = tmp_path / "runs" / "code"
    with closing(sqlite3.connect(run_dir / "rewards.sqlite")) as database:
        kept = dict(database.execute("SELECT answer, score FROM verdicts WHERE score > 0").fetchall())
    assert kept and all(answer.strip().startswith("x") for answer in kept)
    with closing(sqlite3.connect(run_dir / "trajectories.sqlite")) as database:
        rows = database.execute("SELECT reward, rewards FROM rows").fetchall()
    assert all(json.loads(rewards)["code"] == reward for reward, rewards in rows)
