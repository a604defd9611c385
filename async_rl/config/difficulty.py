"""The section task.difficulty: how much less often prompts are sampled that are always or never solved."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from async_rl.config.check import check
from async_rl.config.section import section

Chance = Annotated[float, Field(ge=0.01, le=1)]


@section("task.difficulty")
class DifficultyConfig:
    """The lowest chances with which prompts are sampled whose answers all have one reward. 1: none is skipped.

    Nothing is learned from such a group. With each one in a row the chance that a prompt is sampled in an epoch halves,
    down to these; a group with different rewards makes it 1 again.
    """

    solved: Chance = 1.0
    """The lowest chance of a prompt whose answers were all right, by eval.right_above."""
    unsolved: Chance = 1.0
    """The lowest chance of a prompt whose answers were not right, and all had one reward. A higher one than `solved`
    gives hard prompts more tries."""

    @property
    def skips(self) -> bool:
        """Whether prompts may be skipped."""
        return min(self.solved, self.unsolved) < 1


def check_difficulty(difficulty: DifficultyConfig, mode: str, reward_model: str, group_size: int) -> None:
    """Check that rewards within a group can tell whether a prompt is solved, and that prompts may differ by run.

    Args:
        mode: staleness.mode.
        reward_model: reward_model.path.
    """
    given = {"solved": difficulty.solved, "unsolved": difficulty.unsolved}
    for unfit, where, hint in (
        (
            mode == "exact", "staleness.mode exact",
            "It compares runs that train on the same prompts, and skipping depends on the run.",
        ),
        (
            bool(reward_model), "reward_model.path",
            "The buffer, which draws the prompts, does not see the rewards of the model.",
        ),
        (
            group_size == 1, "rollout.group_size 1",
            "One answer does not tell whether a prompt is always solved.",
        ),
    ):
        check(not (difficulty.skips and unfit), "task.difficulty", given, f"1 for both with {where}", hint)
