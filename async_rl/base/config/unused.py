"""Finds settings that have no effect beside others; a run tells them before it starts.

They are not refused: along an axis of a sweep a setting has an effect in some cells only.
"""

from __future__ import annotations

import dataclasses

from async_rl.base.config import Config
from async_rl.base.config.algorithm import AlgorithmConfig, ClipConfig
from async_rl.base.config.learning import CriticConfig, LearnerConfig
from async_rl.base.config.presets import PRESETS


def unused_settings(config: Config) -> list[str]:
    """Return a sentence for each setting, other than its default or the preset's, that nothing reads, or not all."""
    algorithm, learner, critic = config.algorithm, config.learner, config.critic
    preset, advantage = PRESETS[algorithm.preset], f"algorithm.advantage {algorithm.advantage}"
    entry, found = algorithm.advantage_entry, []

    def compare(key: str, value: object, usual: tuple[object, ...], beside: str) -> None:
        if value not in usual:
            found.append(f"{key} {value} has no effect with {beside}.")

    if not entry.needs_critic:
        compare("algorithm.gae_lambda", algorithm.gae_lambda, (AlgorithmConfig.gae_lambda, preset.get("gae_lambda")),
            advantage)
        compare("critic.path", critic.path, (CriticConfig.path,), advantage)
        compare("critic.warmup_steps", critic.warmup_steps, (CriticConfig.warmup_steps,), advantage)
    for name, value in dataclasses.asdict(algorithm.clip).items():
        if name not in algorithm.loss_entry.reads_clip:
            usual = (getattr(ClipConfig, name), preset.get("clip", {}).get(name))
            compare(f"algorithm.clip.{name}", value, usual, f"algorithm.loss {algorithm.loss}")
    if learner.lr_decay_fraction == 0:
        compare("learner.lr_decay", learner.lr_decay, (LearnerConfig.lr_decay,), "learner.lr_decay_fraction 0")
        compare("learner.lr_decay_to", learner.lr_decay_to, (LearnerConfig.lr_decay_to,), "learner.lr_decay_fraction 0")
    if entry.carries_correction:
        normalised = algorithm.correction.batch_normalised
        compare("algorithm.correction.batch_normalised", normalised, (False,), advantage)
    if algorithm.kl.kind == "k1_reward" and config.task.has_turns and config.rollout.max_rows > 1:
        found.append(
            "algorithm.kl.kind k1_reward has no effect from row to row: in an episode of several rows "
            f"(rollout.max_rows {config.rollout.max_rows}) the penalty of a token counts for those before it in its "
            "own row alone. k2_loss has the same gradient in the mean, and no such limit."
        )
    return found
