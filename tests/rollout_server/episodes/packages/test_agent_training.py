"""Agents that know nothing of training are trained for twenty steps: with SDKs and frameworks, in each of the APIs."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest
import yaml

from async_rl.base.config.loading import load_config
from tests.kit.assembled import Run, run_assembled
from tests.kit.models import save_tiny_model
from tests.kit.virtual_environments import new_environment

HERE = Path(__file__).parent
REQUIREMENTS = {
    "pydantic_ai": "pydantic-ai-slim[openai]==2.68.0",
    "pydantic_ai_claude": "pydantic-ai-slim[anthropic]==2.68.0",
}
"""What the frameworks install, each in an environment of its own."""
STEPS = 20


def trained(folder: Path, agent: str, python: str) -> Run:
    """Train an untrained tiny model with an agent."""
    save_tiny_model("tiny-qwen3", folder / "model", seed=0)
    rows = [
        {"data_source": "numbers", "prompt": [{"role": "user", "content": f"a number of {n}?"}],
         "reward_model": {"style": "rule", "ground_truth": ""}}
        for n in range(50)
    ]  # fmt: skip
    (folder / "numbers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = {
        "run": {"name": "agent", "dir": str(folder / "runs"), "steps": STEPS},
        "model": {"path": str(folder / "model")},
        "task": {
            "path": str(folder / "numbers.jsonl"), "agent": agent, "agent_python": python, "max_prompt_tokens": 40,
        },
        "rollout": {
            "engine": "hf", "group_size": 6, "max_response_tokens": 4, "max_episode_tokens": 80, "max_turns": 4,
        },
        "learner": {"prompts_per_step": 4, "lr": 5e-3, "max_tokens_per_microbatch": 4096},
        "staleness": {"max": 1},
        "eval": {"num_prompts": 0},
        "logging": {"wandb": "disabled"},
    }  # fmt: skip
    tree["weight_sync"] = {"transport": "disk"}  # learner and engine are in one process
    (folder / "agent.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(folder / "agent.yaml")
    (config.run_dir / "logs").mkdir(parents=True)
    return run_assembled(config)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", ["sdk", "responses", *REQUIREMENTS])
def test_an_unmodified_agent_learns_in_twenty_steps(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, python = f"tests.rollout_server.episodes.packages.{framework}_agent:solve", ""
    if framework in REQUIREMENTS:
        monkeypatch.setenv("PYTHONPATH", str(HERE))
        agent = f"{framework}_agent:solve"
        python = str(new_environment(tmp_path / "venv", (REQUIREMENTS[framework],), sees_ours=False))
    run = trained(tmp_path, agent, python)
    rewards = [step["reward/mean"] for step in run.steps]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4]) + 0.15, rewards
    for group in (group for batch in run.batches for group in batch.groups):
        rows = iter(group.rows)
        for episode in group.episodes:  # an agent that asks again where a reply is empty forks its conversation
            trained_tokens = sum(row.mask.sum() for row in itertools.islice(rows, episode.rows))
            assert trained_tokens >= episode.turns >= (2 if episode.end == "done" else 1)
