"""Keeps a ledger of the rollout groups that were trained on, to enforce buffer.max_uses, also after a resume."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from async_rl.errors import StalenessError


class TrainedGroupLedger:
    """Keeps the ids of the groups that were used once, twice, ..., as ranges.

    Between two ranges is at least one group that was not used so often: dropped, in flight, or retired before. So the
    number of ranges exceeds that of such groups by at most one: with half of a million groups dropped at random, which
    algorithm.filter_zero_variance may do, there are 250 000 ranges, 4.5 MB in a checkpoint.

    Args:
        max_uses: buffer.max_uses.
        ranges: the result of an earlier `ranges()`.
    """

    def __init__(self, max_uses: int, ranges: Sequence[Sequence[Sequence[int]]] = ()) -> None:
        self._edges: list[list[int]] = [[] for _ in range(max_uses)]
        """[use] sorted first id of a range, first id after it, first id of the next range, and so on."""
        for edges, loaded in zip(self._edges, ranges, strict=False):
            edges += [edge for first, last in loaded for edge in (first, last + 1)]

    def add(self, group_ids: Iterable[int]) -> None:
        """Count one use of each group.

        Raises:
            StalenessError: a group was used buffer.max_uses times already. The groups before it are counted.
        """
        for group_id in group_ids:
            edges = next((edges for edges in self._edges if not _holds(edges, group_id)), None)
            if edges is None:
                raise StalenessError(
                    f"group {group_id} would be trained on more often than buffer.max_uses = {len(self._edges)}"
                )
            _flip(edges, group_id)
            _flip(edges, group_id + 1)

    def ranges(self) -> list[list[list[int]]]:
        """Return, by use, the sorted ranges [first, last] of the ids that were used more than `use` times."""
        return [
            [[first, end - 1] for first, end in zip(edges[::2], edges[1::2], strict=True)] for edges in self._edges
        ]


def _holds(edges: list[int], number: int) -> bool:
    return bisect_right(edges, number) % 2 == 1


def _flip(edges: list[int], edge: int) -> None:
    """Begin or end a range at `edge`, or join two ranges that meet there."""
    place = bisect_left(edges, edge)
    if edges[place : place + 1] == [edge]:
        del edges[place]
    else:
        edges.insert(place, edge)
