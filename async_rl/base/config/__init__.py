"""The configuration of a run: one frozen section for each component. loading.py reads it from YAML and overrides.

The keys state intent; derived values are properties, and `async-rl train CONFIG --dry-run` prints them.
Importing this package imports neither torch, ray nor sglang.
"""

from __future__ import annotations

import math
from dataclasses import field
from pathlib import Path

from async_rl.base.config.algorithm import AlgorithmConfig, ClipConfig, CorrectionConfig, KlConfig, MasksConfig
from async_rl.base.config.cross_section import SlotLimits, check_cross_section
from async_rl.base.config.data import (
    BufferConfig,
    EvalConfig,
    RolloutConfig,
    Sampling,
    StalenessConfig,
    TaskConfig,
)
from async_rl.base.config.learning import (
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardTrainingConfig,
    SftConfig,
)
from async_rl.base.config.section import Section, section
from async_rl.base.config.system import (
    CheckpointConfig,
    EvalPlacement,
    JudgePlacement,
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
from async_rl.base.config.task_parts import ColumnsConfig, DataConfig, JudgeConfig, RewardConfig
from async_rl.base.config.watch import WatchConfig
from async_rl.base.seams import CORRECTIONS, ENGINES, Correction, EngineEntry, find_entry


@section("")
class Config:
    """The whole configuration of a run: a field for each section."""

    model: Section[ModelConfig]
    task: Section[TaskConfig]
    run: Section[RunConfig] = field(default_factory=RunConfig)
    rollout: Section[RolloutConfig] = field(default_factory=RolloutConfig)
    staleness: Section[StalenessConfig] = field(default_factory=StalenessConfig)
    buffer: Section[BufferConfig] = field(default_factory=BufferConfig)
    algorithm: Section[AlgorithmConfig] = field(default_factory=AlgorithmConfig)
    critic: Section[CriticConfig] = field(default_factory=CriticConfig)
    reference: Section[ReferenceConfig] = field(default_factory=ReferenceConfig)
    reward_model: Section[RewardModelConfig] = field(default_factory=RewardModelConfig)
    judge: Section[JudgeConfig] = field(default_factory=JudgeConfig)
    learner: Section[LearnerConfig] = field(default_factory=LearnerConfig)
    weight_sync: Section[WeightSyncConfig] = field(default_factory=WeightSyncConfig)
    placement: Section[PlacementConfig] = field(default_factory=PlacementConfig)
    eval: Section[EvalConfig] = field(default_factory=EvalConfig)
    watch: Section[WatchConfig] = field(default_factory=WatchConfig)
    checkpoint: Section[CheckpointConfig] = field(default_factory=CheckpointConfig)
    sft: Section[SftConfig] = field(default_factory=SftConfig)
    reward_training: Section[RewardTrainingConfig] = field(default_factory=RewardTrainingConfig)
    logging: Section[LoggingConfig] = field(default_factory=LoggingConfig)
    network: Section[NetworkConfig] = field(default_factory=NetworkConfig)
    timeouts: Section[TimeoutsConfig] = field(default_factory=TimeoutsConfig)

    def __post_init__(self) -> None:
        check_cross_section(self)

    @property
    def run_dir(self) -> Path:
        """The folder that holds all files of the run: run.dir/run.name."""
        return Path(self.run.dir) / self.run.name

    @property
    def episodes_per_step(self) -> int:
        """The number of episodes in a batch, each with one row unless its conversation is forked or rewritten."""
        return self.learner.prompts_per_step * self.rollout.group_size

    @property
    def batch_shares(self) -> int:
        """The number of shares into which the learner divides a batch: one for each group of ranks that split rows."""
        return self.placement.learner.ranks // self.learner.sequence_parallel

    @property
    def longest_tokens(self) -> int:
        """The length in tokens of the longest row: the longest prompt with the longest answer, or an episode of
        rollout.max_episode_tokens, where that is set.
        """
        return self.rollout.max_episode_tokens or self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_response_tokens(self) -> int:
        """The most tokens that a row has after the prompt of its group.

        With episodes of several turns that may be the whole row, because a group's prompt is what its rows share.
        """
        return self.longest_tokens if self.task.has_turns else self.rollout.max_response_tokens

    @property
    def fewest_episodes(self) -> int:
        """The fewest episodes of a group that can be trained.

        Episodes of several turns that fail are left out, and answers without a verdict of a reward.
        """
        return 2 if self.algorithm.advantage_entry.compares_group else 1

    @property
    def records_support(self) -> bool:
        """Whether each sampled token is recorded with the ids that it was drawn from."""
        return self.algorithm.support == "replay" and self.rollout.sampling.narrows

    @property
    def max_rows_per_group(self) -> int:
        """The most rows that a group has: one for each episode of one turn, else rollout.max_rows for each."""
        return self.rollout.group_size * (self.rollout.max_rows if self.task.has_turns else 1)

    @property
    def fresh_per_step(self) -> int:
        """The least number of a batch's groups that were in no earlier batch: F in buffer/staleness.py."""
        return math.ceil(self.buffer.fresh_fraction * self.learner.prompts_per_step)

    @property
    def slots(self) -> int:
        """The number of groups that may have a slot at a time: (staleness.depth + 1) * fresh_per_step, rounded up."""
        return self.slot_limits.at(self.staleness.batches_ahead)

    @property
    def slot_limits(self) -> SlotLimits:
        """How many slots a depth has, and how few the run may have."""
        return SlotLimits(
            prompts_per_step=self.learner.prompts_per_step, fresh_per_step=self.fresh_per_step,
            every_steps=self.weight_sync.every_steps, max_uses=self.buffer.max_uses,
        )

    @property
    def max_running_replies(self) -> int:
        """The largest number of replies that one server can be asked for at a time, evaluations included."""
        groups = min(self.rollout.max_groups_in_flight, self.slots)
        return groups * self.rollout.group_size + self.eval.num_prompts * self.eval.samples_per_prompt

    @property
    def journal_kept_steps(self) -> int:
        """The number of steps for which the journal keeps the tokens of trained and dropped groups; -1: for ever.

        At least 2 * checkpoint.every_steps: a resume needs the groups trained on after its checkpoint, which is the
        last but one if a crash cuts short the writing of the last.
        """
        kept = self.buffer.journal_keep_steps
        return kept if kept == -1 else max(kept, 2 * self.checkpoint.every_steps)

    @property
    def server_names(self) -> tuple[str, ...]:
        """The names of the servers that serve the policy, and of their pools: rollout/0, rollout/1, ..., eval/0, ..."""
        counts = {"rollout": self.placement.rollout.servers, "eval": self.placement.eval.servers}
        return tuple(f"{pool}/{number}" for pool, count in counts.items() for number in range(count))

    @property
    def judge_names(self) -> tuple[str, ...]:
        """The names of the servers of the judge, to which no weights are pushed: judge/0, judge/1, ..."""
        return tuple(f"judge/{number}" for number in range(self.placement.judge.servers))

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines of `server_names`, one for each, in the same order."""
        placement, engine = self.placement, self.rollout.engine
        of_rollout = placement.rollout.engines or (engine,) * placement.rollout.servers
        return of_rollout + (engine,) * placement.eval.servers

    @property
    def engine_entries(self) -> dict[str, EngineEntry]:
        """The entries of the engines of all servers, by name."""
        return {name: find_entry(ENGINES, name, "placement.rollout.engines") for name in self.engines}

    @property
    def shares_gpus(self) -> bool:
        """Whether learner and engine share GPUs and, at staleness.max 0, take turns in using their memory."""
        release = all(entry.releases_memory for entry in self.engine_entries.values())
        return self.placement.colocated and self.staleness.max == 0 and release

    @property
    def evaluations_hold_pushes(self) -> bool:
        """Whether a push waits for the end of an evaluation: eval.pin_version, if rollout servers evaluate."""
        return self.eval.pin_version and self.placement.eval.servers == 0

    def needs_evaluation_of(self, version: int) -> bool:
        """Return whether a version that is due may not be skipped, because its evaluation decides on a checkpoint.

        checkpoint.keep_best chooses among the versions that get one. Gold rewards tell the watcher which one to go
        back to, by the means of evaluations in a row.
        """
        every = self.checkpoint.every_steps
        may_be_best = self.checkpoint.keep_best > 0 and every > 0 and version % every == 0
        return may_be_best or (self.watch.acts and self.has_gold)

    @property
    def has_gold(self) -> bool:
        """Whether answers to held-out prompts have gold rewards, which are not trained on."""
        return bool(self.eval.gold_reward) or self.reward_model.leaves_task_out

    @property
    def drops_zero_variance(self) -> bool:
        """Whether the buffer drops groups whose rewards are all equal: algorithm.filter_zero_variance, if it applies.

        It applies if advantages compare the rewards of a group, and if these are not a reward model's, which the
        buffer does not see.
        """
        algorithm = self.algorithm
        compares = algorithm.advantage_entry.compares_group
        return algorithm.filter_zero_variance and compares and not self.reward_model.path

    @property
    def correction_kind(self) -> str:
        """The correction of the run: algorithm.correction.kind, where auto is none or token_tis.

        It is none at staleness.max 0, and if the loss or the advantage already corrects for being off-policy.
        """
        algorithm = self.algorithm
        if algorithm.correction.kind != "auto":
            return algorithm.correction.kind
        corrects = algorithm.old_logprobs == "rollout" or algorithm.advantage_entry.carries_correction
        return "none" if self.staleness.max == 0 or corrects else "token_tis"

    @property
    def correction_entry(self) -> Correction:
        """The `Correction` that `correction_kind` names, in the table CORRECTIONS or as `module:name`."""
        return self.algorithm.correction.entry or CORRECTIONS[self.correction_kind]
