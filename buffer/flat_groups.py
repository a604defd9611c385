"""Counts flat groups in a row, whose answers all had the same reward, and says when nothing is left to learn."""

from __future__ import annotations

from collections.abc import Callable

from buffer.stored_group import Arrival

FLAT_BATCHES = 8
"""The fewest batches' worth of flat groups in a row that end a run."""
MANY_GROUPS = 4096
"""So many flat groups in a row, and at least FLAT_BATCHES batches' worth, end a run even if an epoch has more prompts.
If the reward changes from group to group, a run ends after no fewer, and not before an epoch of them. The number is
large because one group with a difference in reward shows that there is something to learn. Example: if one prompt of
200 gives such a group, a gap this long between two of them has a probability of exp(-20).
"""


def most_of_one_reward(prompts_per_step: int, epoch: int) -> int:
    """Return the number of flat groups in a row, all of one reward, that ends a run.

    If the policy can solve few prompts of a task, most groups have the same reward, and a few batches' worth of them in
    a row come by chance. So every prompt of an epoch has its turn first.

    Args:
        epoch: the number of prompts in an epoch; 0 if it is not known.
    """
    return max(FLAT_BATCHES * prompts_per_step, min(epoch, MANY_GROUPS))


class FlatGroups:
    """Counts flat groups: those that arrived with one and the same reward for every answer.

    A buffer that is started again counts anew.

    Args:
        prompts_per_step: the number of groups in a batch.
        is_right: whether an answer with this reward counts as right.
    """

    def __init__(self, prompts_per_step: int, is_right: Callable[[float], bool]) -> None:
        self._prompts_per_step = prompts_per_step
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

    def why_nothing_is_left(self, version: int, epoch: int) -> str:
        """Return why there is nothing left to learn at `version` from groups that are dropped; "" if there may be.

        Args:
            epoch: the number of prompts in an epoch; 0 if it is not known.
        """
        if self.num_same >= most_of_one_reward(self._prompts_per_step, epoch):
            return f"{self.num_same} groups in a row had the same reward, {self._reward:g}, for every answer: " + (
                self._said_of_one_reward(version)
            )
        if self.num_in_row >= max(FLAT_BATCHES * self._prompts_per_step, MANY_GROUPS, epoch):
            return (
                f"{self.num_in_row} groups in a row had one reward for all of their answers, though not each the same: "
                "no prompt's answers differed when it was asked last, and so none seems to have anything left to teach "
                f"at version {version}. Raise rollout.group_size or rollout.temperature, choose another data set, or "
                "set algorithm.filter_zero_variance: false, with which such groups are trained on."
            )
        return ""

    def _said_of_one_reward(self, version: int) -> str:
        left = f"and to have nothing left to teach at version {version}"
        if self._is_right(self._reward):
            return f"the task seems to be solved {left}. Choose a harder one."
        if self._reward <= 0:
            return f"the task seems to be out of reach {left}. Choose an easier one, or raise rollout.group_size."
        return (
            f"the task seems to have nothing left to teach at version {version}. This reward is neither that of a "
            "right answer (eval.correct_threshold) nor 0 or less: see what gives it to every answer, and raise "
            "rollout.temperature or choose a reward that tells answers apart."
        )
