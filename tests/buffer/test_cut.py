"""The buffer's part of a checkpoint: after a resume no prompt is lost and none is trained on twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_rl.checkpoints import Cut
from buffer.cut import cut_of, go_on_from
from buffer.store import Store
from buffer.store_state import StoreState
from tests.buffer.made import make_outcome, plain_rules

RULES = plain_rules(max_staleness=2, prompts_per_step=3)


def checkpoint(store: Store) -> Cut:
    return Cut(
        version=store.state.version, lineage=0, ranks=1, networks={}, kl_coef=0.0, consumed=[],
        buffer=cut_of(store.state),
    )


def train_batches(store: Store, number: int) -> list[int]:
    """Prompts trained on in `number` batches of groups that finish in the order of their grants."""
    prompts = []
    store.served(store.state.version)
    for _ in range(number):
        store.admit("w", 99, 0.0)
        taken = None
        while taken is None:
            store.finish(min(store.state.running), b"group", make_outcome())
            taken = store.take(store.state.version)
        prompts += [row.prompt_index for row in taken.groups]
        store.trained(store.state.version + 1)
        store.served(store.state.version)
    return prompts


def resumed_state(cut: Cut) -> StoreState:
    state = StoreState()
    go_on_from(cut, state)
    return state


@given(before=st.integers(0, 4), lost=st.integers(0, 4), after=st.integers(1, 4))
def test_prompts_are_trained_on_exactly_once_across_a_resume(before: int, lost: int, after: int) -> None:
    store = Store(RULES)
    prompts = train_batches(store, before)
    store.admit("w", 4, 0.0)
    cut = checkpoint(store)
    train_batches(store, lost)  # after the checkpoint: the resumed run knows nothing of it

    resumed = Store(RULES, resumed_state(cut))
    assert resumed.state.version == before
    assert resumed.capacity() == 0  # until the learner says what the servers serve
    prompts += train_batches(resumed, after)
    assert sorted(prompts) == list(range(3 * (before + after)))
    resumed.close()
    counters = resumed.state.counters()
    assert counters["buffer/unaccounted"] == 0
    assert counters["buffer/trained"] == 3 * (before + after)


def test_group_ids_go_on_so_that_no_late_answer_meets_another_group() -> None:
    store = Store(RULES)
    store.served(0)
    store.admit("w", 99, 0.0)
    resumed = Store(RULES, resumed_state(checkpoint(store)))
    resumed.served(0)
    slots = resumed.admit("w", 99, 0.0)
    assert [slot.group_id for slot in slots] == list(range(9, 18))
    assert [slot.prompt_index for slot in slots] == list(range(9))
    assert resumed.state.counters()["buffer/dropped_failed"] == 9
