"""Which rollout groups were trained on, and how often: exactly once is asserted here, also after a resume."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from async_rl.errors import StalenessError


class TrainedGroupLedger:
    """Group ids by number of uses, as ranges.

    Between two ranges there is a group that was not used so often: dropped, live, or retired before. So there is at
    most one range more than such groups: with half of a million groups dropped at random (where
    algorithm.filter_zero_variance drops many) there are 250 000, 4.5 MB in a checkpoint.

    Args:
        max_uses: buffer.max_uses.
        ranges: of an earlier `ranges()`.
    """

    def __init__(self, max_uses: int, ranges: Sequence[Sequence[Sequence[int]]] = ()) -> None:
        self._uses: list[list[list[int]]] = [[] for _ in range(max_uses)]
        for mine, theirs in zip(self._uses, ranges, strict=False):
            mine += [list(ends) for ends in theirs]

    def add(self, group_ids: Iterable[int]) -> None:
        """
        Raises:
            StalenessError: a group was used as often as it may be; groups before it are added.
        """
        for group_id in group_ids:
            free = next((ranges for ranges in self._uses if not _holds(ranges, group_id)), None)
            if free is None:
                raise StalenessError(
                    f"group {group_id} would be trained on once more than buffer.max_uses = {len(self._uses)}"
                )
            _insert(free, group_id)

    def ranges(self) -> list[list[list[int]]]:
        """[use] sorted ranges [first, last] of the ids used more than `use` times."""
        return [[list(ends) for ends in ranges] for ranges in self._uses]


def _holds(ranges: list[list[int]], number: int) -> bool:
    place = bisect_right(ranges, number, key=lambda ends: ends[0])
    return place > 0 and number <= ranges[place - 1][1]


def _insert(ranges: list[list[int]], number: int) -> None:
    """Add a number that `ranges` does not hold; neighbours grow together."""
    place = bisect_right(ranges, number, key=lambda ends: ends[0])
    joins_left = place > 0 and ranges[place - 1][1] == number - 1
    joins_right = place < len(ranges) and ranges[place][0] == number + 1
    if joins_left and joins_right:
        ranges[place - 1][1] = ranges.pop(place)[1]
    elif joins_left:
        ranges[place - 1][1] = number
    elif joins_right:
        ranges[place][0] = number
    else:
        ranges.insert(place, [number, number])
