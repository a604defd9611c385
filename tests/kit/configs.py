"""The configurations of the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.config import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    RolloutConfig,
    RolloutPlacement,
    StalenessConfig,
    TaskConfig,
    TimeoutsConfig,
)


def sglang_config(model: Path, **rollout: Any) -> Config:
    """Prompts and answers together fit the tiny models' positions exactly."""
    return Config(
        model=ModelConfig(path=str(model)),
        task=TaskConfig(name="reasoning_gym/spell_backward", max_prompt_tokens=512),
        rollout=RolloutConfig(engine="sglang", max_response_tokens=512, concurrency=32, **rollout),
        learner=LearnerConfig(prompts_per_step=32),
    )


def with_keys(config: Config, folder: Path) -> Config:
    """The config with new keys in `folder`, as the servers of a run have them."""
    from buffer.protocol.keys import new_keys

    new_keys(folder)
    return replace(config, network=NetworkConfig(keys=str(folder)))


def vllm_config(model: Path, **rollout: Any) -> Config:
    """Prompts and replies together fit the tiny models' positions exactly."""
    return Config(
        model=ModelConfig(path=str(model)),
        task=TaskConfig(name="reasoning_gym/spell_backward", max_prompt_tokens=512),
        rollout=RolloutConfig(engine="vllm", max_response_tokens=512, concurrency=32, **rollout),
        learner=LearnerConfig(prompts_per_step=32),
    )


def config_for(folder: Path, **rollout: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(folder)), task=TaskConfig(name="reasoning_gym/spell_backward"),
        rollout=RolloutConfig(engine="hf", **rollout),
    )


def make_config(
    max_staleness: int = 0, prompts_per_step: int = 4, group_size: int = 2, workers: int = 1, **timeouts: float
) -> Config:
    return Config(
        model=ModelConfig(path="none"),
        task=TaskConfig(name="reasoning_gym/chain_sum", max_prompt_tokens=16),
        rollout=RolloutConfig(group_size=group_size, max_response_tokens=32),
        staleness=StalenessConfig(max=max_staleness),
        algorithm=AlgorithmConfig(filter_zero_variance=False),  # the groups of `make_group` have equal rewards
        buffer=BufferConfig(journal=False),
        learner=LearnerConfig(prompts_per_step=prompts_per_step),
        placement=PlacementConfig(rollout=RolloutPlacement(servers=workers)),
        timeouts=TimeoutsConfig(**{"wire_s": 5.0, "work_s": 20.0, "shutdown_s": 5.0, **timeouts}),
    )


def config_of(path: str = "none", *, staleness: int = 0, steps: int = 100, **changes: Any) -> Config:
    config = Config(
        model=ModelConfig(path=path),
        task=TaskConfig(name="reasoning_gym/spell_backward", size=50, max_prompt_tokens=64, max_failures=5),
        rollout=RolloutConfig(engine="hf", group_size=3, max_response_tokens=8),
        algorithm=AlgorithmConfig(filter_zero_variance=False), buffer=BufferConfig(journal=False),
        learner=LearnerConfig(prompts_per_step=4), eval=EvalConfig(size=6, samples=2),
        timeouts=TimeoutsConfig(generate_s=20, reward_s=5, wire_s=5, work_s=20, shutdown_s=5),
    )
    config = replace(
        config, staleness=replace(config.staleness, max=staleness), run=replace(config.run, steps=steps)
    )
    return replace(config, **changes)
