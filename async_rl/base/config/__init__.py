"""The configuration of a run: one frozen section for each component. loading.py reads it from YAML and overrides.

The keys state intent. Derived values are properties; `async-rl train CONFIG --dry-run` prints them.
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
        """The folder for all files of the run: run.dir/run.name."""
        return Path(self.run.dir) / self.run.name

    @property
    def episodes_per_step(self) -> int:
        """The number of episodes in a batch. An episode has one row unless its conversation is forked or rewritten."""
        return self.learner.prompts_per_step * self.rollout.group_size

    @property
    def batch_shares(self) -> int:
        """The number of parts into which a batch is split among the learner's ranks: ranks / learner.sequence_parallel.

        Ranks that split rows among them (sequence parallelism) share one part.
        """
        return self.placement.learner.ranks // self.learner.sequence_parallel

    @property
    def longest_tokens(self) -> int:
        """The most tokens of a row: rollout.max_episode_tokens if set, else the longest prompt plus the longest answer.
        """
        return self.rollout.max_episode_tokens or self.task.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_response_tokens(self) -> int:
        """The most tokens that a row has after the prompt of its group.

        In multi-turn tasks that is the whole row, because a group's prompt is only what its rows have in common.
        """
        return self.longest_tokens if self.task.has_turns else self.rollout.max_response_tokens

    @property
    def fewest_episodes(self) -> int:
        """The fewest episodes with which a group can be trained on: 2 if advantages compare them, else 1.

        Failed multi-turn episodes, and answers without a verdict of a reward, are left out of their groups.
        """
        return 2 if self.algorithm.advantage_entry.compares_group else 1

    @property
    def records_support(self) -> bool:
        """Whether each sampled token is recorded with its support: the ids that it was drawn from."""
        return self.algorithm.support == "replay" and self.rollout.sampling.narrows

    @property
    def max_rows_per_group(self) -> int:
        """The most rows of a group: one for each single-turn episode, rollout.max_rows for each multi-turn episode."""
        return self.rollout.group_size * (self.rollout.max_rows if self.task.has_turns else 1)

    @property
    def fresh_per_step(self) -> int:
        """The fewest fresh groups in a batch, which no earlier batch had: F in buffer/staleness.py."""
        return math.ceil(self.buffer.fresh_fraction * self.learner.prompts_per_step)

    @property
    def slots(self) -> int:
        """The number of groups that may have a slot simultaneously: (staleness.depth + 1) * fresh_per_step, rounded up.
        """
        return self.slot_limits.at(self.staleness.batches_ahead)

    @property
    def slot_limits(self) -> SlotLimits:
        """Computes the number of slots for a staleness depth, and the smallest number that works."""
        return SlotLimits(
            prompts_per_step=self.learner.prompts_per_step, fresh_per_step=self.fresh_per_step,
            every_steps=self.weight_sync.every_steps, max_uses=self.buffer.max_uses,
        )

    @property
    def max_running_replies(self) -> int:
        """The most replies that one server may have to sample simultaneously, evaluations included."""
        groups = min(self.rollout.max_groups_in_flight, self.slots)
        return groups * self.rollout.group_size + self.eval.num_prompts * self.eval.samples_per_prompt

    @property
    def journal_kept_steps(self) -> int:
        """The number of steps for which the journal keeps the tokens of trained and dropped groups; -1: for ever.

        It is at least 2 * checkpoint.every_steps: a resume needs the groups trained on after its checkpoint. That is
        the second newest checkpoint if the newest is incomplete because of a crash. It is at least 1, as Ctrl-C writes
        a checkpoint too.
        """
        kept = self.buffer.journal_keep_steps
        return kept if kept == -1 else max(kept, 2 * self.checkpoint.every_steps, 1)

    @property
    def server_names(self) -> tuple[str, ...]:
        """The names of all servers that may serve the policy, by pool: rollout/0, rollout/1, ..., eval/0, ..."""
        counts = {"rollout": self.placement.rollout.most, "eval": self.placement.eval.servers}
        return tuple(f"{pool}/{number}" for pool, count in counts.items() for number in range(count))

    @property
    def judge_names(self) -> tuple[str, ...]:
        """The names of the judge's servers, which get no weight pushes: judge/0, judge/1, ..."""
        return tuple(f"judge/{number}" for number in range(self.placement.judge.servers))

    @property
    def engines(self) -> tuple[str, ...]:
        """The engine of each server, in the order of `server_names`."""
        placement, engine = self.placement, self.rollout.engine
        of_rollout = placement.rollout.engines or (engine,) * placement.rollout.most
        return of_rollout + (engine,) * placement.eval.servers

    @property
    def engine_entries(self) -> dict[str, EngineEntry]:
        """The entries in ENGINES of all servers' engines, by the engine's name."""
        return {name: find_entry(ENGINES, name, "placement.rollout.engines") for name in self.engines}

    @property
    def shares_gpus(self) -> bool:
        """Whether learner and servers take turns in using the memory of the same GPUs (colocated, at staleness.max 0).
        """
        release = all(entry.releases_memory for entry in self.engine_entries.values())
        return self.placement.colocated and self.staleness.max == 0 and release

    @property
    def evaluations_hold_pushes(self) -> bool:
        """Whether a push waits until a running evaluation has ended: eval.pin_version, if rollout servers evaluate."""
        return self.eval.pin_version and self.placement.eval.servers == 0

    def needs_evaluation_of(self, version: int) -> bool:
        """Return whether the evaluation of a version must not be skipped, because a checkpoint is chosen by it.

        checkpoint.keep_best chooses among the versions that get a checkpoint. With gold rewards, the watcher chooses
        the checkpoint to go back to by the means of consecutive evaluations.
        """
        every = self.checkpoint.every_steps
        may_be_best = self.checkpoint.keep_best > 0 and every > 0 and version % every == 0
        return may_be_best or (self.watch.acts and self.has_gold)

    @property
    def has_gold(self) -> bool:
        """Whether answers to held-out prompts get gold rewards, which are not trained on."""
        return bool(self.eval.gold_reward) or self.reward_model.leaves_task_out

    @property
    def drops_zero_variance(self) -> bool:
        """Whether the buffer drops groups whose rewards are all equal.

        It does so with algorithm.filter_zero_variance if advantages compare the rewards of a group. It can't if a
        reward model gives the rewards, because the buffer does not see these.
        """
        algorithm = self.algorithm
        compares = algorithm.advantage_entry.compares_group
        return algorithm.filter_zero_variance and compares and not self.reward_model.path

    @property
    def correction_kind(self) -> str:
        """The correction of the run: algorithm.correction.kind, with `auto` resolved to none or token_tis.

        auto becomes none at staleness.max 0, and if the loss or the advantage already corrects for being off-policy.
        """
        algorithm = self.algorithm
        if algorithm.correction.kind != "auto":
            return algorithm.correction.kind
        corrects = algorithm.old_logprobs == "rollout" or algorithm.advantage_entry.carries_correction
        return "none" if self.staleness.max == 0 or corrects else "token_tis"

    @property
    def correction_entry(self) -> Correction:
        """The `Correction` named by `correction_kind`, in the table CORRECTIONS or as `module:name`."""
        return self.algorithm.correction.entry or CORRECTIONS[self.correction_kind]
