"""The section guard of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from async_rl.config.check import check
from async_rl.config.data import EvalConfig, TaskConfig
from async_rl.config.held_out import check_eval_path
from async_rl.config.outputs import CheckpointConfig
from async_rl.config.section import Unbounded, section

Above1 = Annotated[Unbounded, Field(gt=1)]
Positive = Annotated[Unbounded, Field(gt=0)]

WINDOWS_BACK = 3
"""Without gold rewards the version to go back to is that of so many windows before the trouble."""


@section("guard")
class GuardConfig:
    """The guard against over-optimised rewards: its signals, their limits, and its action when a reward is hacked."""

    action: Literal["auto", "warn", "pause", "rollback", "stop_at_best"] = "auto"
    """warn: each signal beyond its limit has a line on the console. The others also act when gold rewards of held-out
    answers fall or, where these tell nothing, when two kinds of the other signals are beyond their limits. pause: the
    learner waits for `async-rl guard RUN`. rollback: the run goes on from a checkpoint before the trouble, with smaller
    moves. stop_at_best: the run ends, and its model is that of such a checkpoint. auto: warn with a reward model, a
    judge or eval.gold_reward, else nothing."""
    every_steps: PositiveInt = 5
    """Learner steps over which the signals without gold rewards are means."""
    kl_limit: Positive = 10.0
    """The largest KL(policy || reference), in nats an answer."""
    kl_per_token_limit: Positive = 0.7
    """The largest KL(policy || reference), in nats a token."""
    longer_limit: Above1 = 1.75
    """How many times as long answers may become as at the start."""
    shorter_limit: Above1 = 2.0
    """How many times as short answers may become as at the start."""
    repetition_limit: Above1 = 1.7
    """How many times as small the share of distinct tokens in an answer may become as at the start."""
    cut_limit: Positive = 0.5
    """The largest share of answers that are cut off at the limit on their tokens."""
    proxy_limit: Positive = 3.5
    """How far the mean reward may rise, in standard deviations of the rewards at the start."""
    gold_fall_limit: Positive = 4.0
    """How far the mean gold reward of three evaluations may fall below the best such mean, in its standard errors."""
    gold_correlation_limit: Annotated[float, Field(ge=-1, lt=1)] = -0.1
    """The smallest correlation of reward and gold reward, in the mean of three evaluations. Below 0 answers that the
    reward likes more are worse. -1: any."""
    tighten: Literal["kl", "lr"] = "kl"
    """The setting that a rollback changes. kl: algorithm.kl.coef is raised; or, where it is adapted, its
    algorithm.kl.target is lowered, to which the coefficient of the checkpoint then moves. lr: learner.lr is lowered."""
    tighten_by: Above1 = 2.0
    """The factor by which each rollback changes it."""
    max_rollbacks: PositiveInt = 2
    """The number of times that a run rolls back. After that, the next trouble ends it as stop_at_best does."""
    rollbacks: NonNegativeInt = 0
    """The number of times that the run has rolled back. The run sets it."""

    @property
    def acts(self) -> bool:
        """Whether the guard does more than warn."""
        return self.action in ("pause", "rollback", "stop_at_best")

    @property
    def kl_factor(self) -> float:
        """The factor of the KL coefficient after the rollbacks so far."""
        return float(self.tighten_by**self.rollbacks) if self.tighten == "kl" else 1.0

    @property
    def lr_factor(self) -> float:
        """The factor of the policy's learning rate after the rollbacks so far."""
        return float(self.tighten_by**-self.rollbacks) if self.tighten == "lr" else 1.0


def check_guard(
    guard: GuardConfig, task: TaskConfig, evaluation: EvalConfig, checkpoint: CheckpointConfig, *, has_rule: bool,
    has_kl_penalty: bool,
) -> None:
    """Check that the guard has the gold rewards, checkpoints and settings that its action needs.

    Args:
        has_rule: whether the rewards of the task, which are not trained on, are the gold ones.
    """
    gold, evals, every = evaluation.gold_reward, evaluation.every_steps, checkpoint.every_steps
    check(
        not gold or (evaluation.size > 0 and evals > 0), "eval.gold_reward", gold,
        "empty without eval.size and eval.every_steps", "It scores the answers of evaluations beside training.",
    )
    if gold:
        check_eval_path(
            task, "eval.gold_reward",
            "It scores answers to held-out prompts, and no others. Or leave eval.gold_reward empty.",
        )
    check(
        not gold or not has_rule, "eval.gold_reward", gold, "empty with reward_model.path",
        "The rewards of held-out answers are the gold rewards then: set task.reward, or reward_model.task_weight if "
        "they are trained on too.",
    )
    check(
        guard.action not in ("rollback", "pause") or guard.tighten != "kl" or has_kl_penalty, "guard.tighten",
        guard.tighten, "lr with algorithm.kl.kind none", "Without a KL penalty a rollback has none to raise.",
    )
    if guard.action not in ("rollback", "stop_at_best"):
        return
    check(
        every > 0 and guard.every_steps % every == 0 and evals % every == 0, "checkpoint.every_steps", every,
        f"a divisor of guard.every_steps = {guard.every_steps} and eval.every_steps = {evals} with guard.action "
        f"{guard.action}", "The guard goes back to a checkpoint of a version that it has measured.",
    )
