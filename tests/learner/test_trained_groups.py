from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.errors import StalenessError
from learner.batch_checks import TrainedGroupLedger


def test_ids_become_ranges_whatever_their_order() -> None:
    ledger = TrainedGroupLedger(1)
    ledger.add([0, 1, 2, 9, 7, 8, 4])
    assert ledger.ranges() == [[[0, 2], [4, 4], [7, 9]]]
    ledger.add([3])
    assert ledger.ranges() == [[[0, 4], [7, 9]]]


def test_a_group_is_trained_on_at_most_max_uses_times_also_after_a_resume() -> None:
    ledger = TrainedGroupLedger(2)
    ledger.add([5, 6])
    resumed = TrainedGroupLedger(2, ledger.ranges())
    resumed.add([6])
    assert resumed.ranges() == [[[5, 6]], [[6, 6]]]
    with pytest.raises(StalenessError, match=r"group 6 .* buffer.max_uses = 2"):
        resumed.add([5, 6])


@given(st.lists(st.integers(0, 40), unique=True))
def test_ranges_hold_exactly_what_was_added(ids: list[int]) -> None:
    ledger = TrainedGroupLedger(1)
    ledger.add(ids)
    ((ranges),) = ledger.ranges()
    assert sorted(ids) == [i for first, last in ranges for i in range(first, last + 1)]
    assert all(left[1] + 1 < right[0] for left, right in pairwise(ranges))
    for group_id in ids:
        with pytest.raises(StalenessError):
            ledger.add([group_id])
