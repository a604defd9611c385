"""The configuration tree: one frozen dataclass per component. Loading and overrides are in configfile.py.

States intent; everything derivable is a property and printed by `async-rl train CONFIG --dry-run`.
Importing this package imports neither torch, ray nor sglang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.config.algorithm import (
    GROUP_ADVANTAGES,
    AlgorithmConfig,
    ClipConfig,
    CorrectionConfig,
    CorrectionKind,
    KlConfig,
    MasksConfig,
)
from async_rl.config.check import check_finite
from async_rl.config.cross_section import check_cross_section
from async_rl.config.data import (
    BufferConfig,
    EvalConfig,
    RolloutConfig,
    StalenessConfig,
    TaskConfig,
)
from async_rl.config.learning import (
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    SftConfig,
)
from async_rl.config.system import (
    CheckpointConfig,
    LearnerPlacement,
    Limit,
    LoggingConfig,
    NetworkConfig,
    PlacementConfig,
    RolloutPlacement,
    RunConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "ClipConfig",
    "Config",
    "CorrectionConfig",
    "CorrectionKind",
    "CriticConfig",
    "EvalConfig",
    "KlConfig",
    "LearnerConfig",
    "LearnerPlacement",
    "Limit",
    "LoggingConfig",
    "LoraConfig",
    "MasksConfig",
    "ModelConfig",
    "NetworkConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RewardModelConfig",
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
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)

    def __post_init__(self) -> None:
        check_finite(self)
        check_cross_section(self)

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
    def fresh_per_step(self) -> int:
        """Rollout groups of a batch, at least, that no batch held before: F of buffer/staleness.py."""
        return math.ceil(self.buffer.fresh_fraction * self.learner.prompts_per_step)

    @property
    def max_slots(self) -> int:
        """Rollout groups admitted and not yet superseded by served weights: (M + 1) F of buffer/staleness.py."""
        return (self.staleness.max + 1) * self.fresh_per_step

    @property
    def journal_kept_steps(self) -> int:
        """Steps for which the journal keeps the tokens of trained and dropped groups; -1: for ever.

        A resume goes on with groups that were trained on after its checkpoint. The checkpoint after it may be written
        until the second next is due, and has to be resumed from if that write is cut short.
        """
        kept = self.buffer.journal_keep_steps
        return kept if kept == -1 else max(kept, 2 * self.checkpoint.every_steps)

    @property
    def takes_turns(self) -> bool:
        """Learner and SGLang share GPUs and never work at once: each has the memory in its turn."""
        return self.placement.colocated and self.staleness.max == 0 and self.rollout.engine == "sglang"

    @property
    def drops_zero_variance(self) -> bool:
        """Only where a group's advantages are its rewards against its own mean: equal ones are all zero. A reward model
        gives other rewards than those the buffer sees."""
        algorithm = self.algorithm
        return algorithm.filter_zero_variance and not self.reward_model.path and algorithm.advantage in GROUP_ADVANTAGES

    @property
    def correction_kind(self) -> CorrectionKind:
        """What `algorithm.correction.kind: auto` comes to."""
        algorithm = self.algorithm
        if algorithm.correction.kind != "auto":
            return algorithm.correction.kind
        is_corrected_elsewhere = algorithm.proximal == "behaviour" or algorithm.advantage == "vtrace"
        return "none" if self.staleness.max == 0 or is_corrected_elsewhere else "token_tis"
