"""The three stages of configs/rlhf: the result of each feeds the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.kit.documents import run
from tests.kit.runs import logged

CONFIGS = Path(__file__).parents[2] / "configs" / "rlhf"
TRAIN = f"async-rl train {CONFIGS}/ppo.yaml rollout.engine=hf weight_sync.transport=disk logging.wandb=disabled"


def stages(
    folder: Path, sft: str, people: str, reward_model: str, train: str, timeout_s: float
) -> list[dict[str, float]]:
    """Run the stages, and return the lines of the last one's metrics.jsonl."""
    run(f"async-rl sft {CONFIGS}/sft.yaml {sft}", folder, timeout_s)
    run(f"python {CONFIGS}/people.py {people}", folder, timeout_s)
    run(f"async-rl reward-model {CONFIGS}/reward_model.yaml {reward_model}", folder, timeout_s)
    run(f"{TRAIN} {train}", folder, timeout_s)
    return logged(folder / "runs" / "rlhf-ppo")


@pytest.mark.nightly
@pytest.mark.e2e
def test_each_stage_feeds_the_next(tmp_path: Path) -> None:
    lines = stages(
        tmp_path, "sft.steps=30", "--pairs 64 --held-out 32 --texts 100", "reward_training.epochs=2",
        "run.steps=3 eval.num_prompts=16 critic.warmup_steps=0", timeout_s=140,
    )  # fmt: skip
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 3
    assert all({"reward/rule_mean", "kl/reference", "ptx/loss", "critic/explained_variance"} <= set(s) for s in steps)
    assert all(1.0 < step["ptx/loss"] < 4.6 and step["reward/mean"] != step["reward/rule_mean"] for step in steps)
    first, second = ((tmp_path / "runs/rlhf" / name) for name in ("comparisons.jsonl", "held_out.jsonl"))
    assert [len(file.read_text().splitlines()) for file in (first, second)] == [64, 32]
    assert {json.loads(line)["prompt"] for line in first.read_text().splitlines()} == {"A", "B"}
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "runs/rlhf/reward-model").reward_offset, float)
