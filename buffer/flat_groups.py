"""Counts the groups in a row in which every answer had the same reward, and says when nothing is left to learn."""

from __future__ import annotations

from collections.abc import Callable

from buffer.stored_group import Arrival

FLAT_BATCHES = 8
"""If this many batches' worth of groups in a row have the same reward, the task has nothing left to teach."""
MIXED_FLAT_GROUPS = 4096
"""If this many groups in a row, and at least FLAT_BATCHES batches' worth, are flat at different rewards, no prompt has
anything left to teach. It is so large because any one group with a difference in reward keeps the run alive: of a task
in which one prompt of 200 has such a difference, exp(-20) of the gaps between two such groups are that long.
"""


class FlatGroups:
    """Counts flat groups: those that arrived with one and the same reward for every answer.

    A buffer that is started again counts anew.

    Args:
        prompts_per_step: the number of groups in a batch.
        is_right: whether an answer with this reward counts as right.
    """

    def __init__(self, prompts_per_step: int, is_right: Callable[[float], bool]) -> None:
        self._same_limit = FLAT_BATCHES * prompts_per_step
        self._mixed_limit = max(MIXED_FLAT_GROUPS, self._same_limit)
        self._is_right = is_right
        self._reward = 0.0
        self.num_same = 0
        """The number of flat groups in a row that all have one reward."""
        self.num_in_row = 0
        """The number of flat groups in a row, whichever the reward of each is."""
        self.num_dropped = 0
        """The number of flat groups that were dropped since the last batch."""

    def add(self, arrival: Arrival) -> None:
        """Count a group that has arrived, or begin to count anew with it."""
        if arrival.reward != self._reward or not arrival.equal_rewards:
            self.num_same, self._reward = 0, arrival.reward
        self.num_same += arrival.equal_rewards
        self.num_in_row = self.num_in_row + 1 if arrival.equal_rewards else 0

    def why_nothing_is_left(self, version: int) -> str:
        """Return why there is nothing left to learn at `version` from groups that are dropped; "" if there may be."""
        if self.num_same >= self._same_limit:
            return f"{self.num_same} groups in a row had the same reward, {self._reward:g}, for every answer: " + (
                self._said_of_one_reward(version)
            )
        if self.num_in_row >= self._mixed_limit:
            return (
                f"{self.num_in_row} groups in a row had one reward for all of their answers, though not each the same: "
                "each prompt is always right or always wrong, or always gets another one reward, and so has nothing "
                f"left to teach at version {version}. Raise rollout.group_size or rollout.temperature, choose another "
                "data set, or set algorithm.filter_zero_variance: false, with which such groups are trained on."
            )
        return ""

    def _said_of_one_reward(self, version: int) -> str:
        left = f"has nothing left to teach at version {version}"
        if self._is_right(self._reward):
            return f"the task is solved and {left}. Choose a harder one."
        if self._reward <= 0:
            return f"the task is out of reach and {left}. Choose an easier one."
        return (
            f"the task {left}. This reward is neither that of a right answer (eval.right_above) nor 0 or less: see "
            "what gives it to every answer, and raise rollout.temperature or choose a reward that tells answers apart."
        )
