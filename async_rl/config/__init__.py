"""The configuration tree: one frozen dataclass per component. Loading and overrides are in configfile.py.

States intent; everything derivable is a property and printed by `async-rl train CONFIG --dry-run`.
Importing this package imports neither torch, ray nor sglang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from async_rl.config.check import check
from async_rl.config.data import (
    EvalConfig,
    RolloutConfig,
    StalenessConfig,
    TaskConfig,
)
from async_rl.config.learning import (
    AlgorithmConfig,
    ClipConfig,
    CorrectionConfig,
    CriticConfig,
    LearnerConfig,
    ModelConfig,
    SftConfig,
)
from async_rl.config.system import (
    LearnerPlacement,
    LoggingConfig,
    PlacementConfig,
    RolloutPlacement,
    RunConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ClipConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "EvalConfig",
    "LearnerConfig",
    "LearnerPlacement",
    "LoggingConfig",
    "ModelConfig",
    "PlacementConfig",
    "RolloutConfig",
    "RolloutPlacement",
    "RunConfig",
    "SftConfig",
    "StalenessConfig",
    "TaskConfig",
    "TimeoutsConfig",
    "WeightSyncConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    task: TaskConfig
    run: RunConfig = field(default_factory=RunConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)

    def __post_init__(self) -> None:
        needed = self.weight_sync.every_steps * self.learner.prompts_per_step
        check(
            self.max_slots >= needed, "(staleness.max + 1) * learner.prompts_per_step", self.max_slots,
            f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
            f"Otherwise the learner waits for ever. Set staleness.max >= {self.weight_sync.every_steps - 1} "
            f"or weight_sync.every_steps <= {self.staleness.max + 1}.",
        )
        ranks, parts = self.placement.learner.ranks, self.algorithm.minibatches
        check(
            self.rollouts_per_step >= parts * ranks, "algorithm.minibatches", parts,
            f"at most {self.rollouts_per_step} rollouts per step / {ranks} learner ranks",
        )
        check(
            self.algorithm.advantage != "grpo" or self.rollout.group_size >= 2, "rollout.group_size",
            self.rollout.group_size, "at least 2 with algorithm.advantage grpo", "Or set algorithm.advantage: gae.",
        )
        check(
            self.learner.max_tokens_per_microbatch >= self.longest_tokens, "learner.max_tokens_per_microbatch",
            self.learner.max_tokens_per_microbatch,
            f"at least task.max_prompt_tokens + rollout.max_response_tokens = {self.longest_tokens}",
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def rollouts_per_step(self) -> int:
        return self.learner.prompts_per_step * self.rollout.group_size

    @property
    def longest_tokens(self) -> int:
        """Of a prompt with its answer."""
        return self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_slots(self) -> int:
        """Rollout groups admitted and not yet superseded by served weights (design.md section 5)."""
        return (self.staleness.max + 1) * self.learner.prompts_per_step

    @property
    def correction_kind(self) -> Literal["none", "token_tis"]:
        if self.algorithm.correction.kind == "auto":
            return "token_tis" if self.staleness.max > 0 else "none"
        return self.algorithm.correction.kind
