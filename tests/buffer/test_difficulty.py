"""Prompts that are always or never solved are sampled less: the rule, its records, and the groups that are granted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.config.check import SettingsError
from async_rl.base.errors import WireError
from async_rl.base.types import Group, Slot
from buffer.client import LearnerClient, WorkerClient
from buffer.difficulty import PromptDraw
from buffer.prompt_order import PromptOrder
from buffer.store import Store
from buffer.store_state import StoreState
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.buffer.clients import learner_at, with_worker
from tests.kit.buffer.journal import journalled, same_port, select
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import buffer_config, changed, opened_run
from tests.kit.groups import make_group, make_row
from tests.kit.runs import make_checkpoint

PROMPTS = 12
LEAST = {"solved": 0.125, "unsolved": 0.5}


def skipping(config: Config, **least: float) -> Config:
    return changed(config, task={"difficulty": least or LEAST})


def play(store: Store, epochs: int, rewards: dict[int, float | None], position: PromptOrder) -> list[int]:
    """Play groups one at a time until so many epochs are over; return the prompt index of each.

    Args:
        rewards: [position] the reward of all answers; None: they differ, by .5 in the mean.
    """
    played = []
    store.served(store.state.version)
    while store.state.next_prompt < epochs * position.num_prompts:
        for slot in store.admit("w", 1, 0.0):
            played.append(slot.prompt_index)
            reward = rewards[position.position(slot.prompt_index)]
            outcome = make_arrival(
                slot.start_version, reward=0.5 if reward is None else reward, equal_rewards=reward is not None
            )
            store.finish(slot.group_id, b"group", outcome)
        if store.take(store.state.version):
            store.trained(store.state.version + 1)
            store.served(store.state.version)
    return played


def new_store(config: Config, size: int = PROMPTS) -> Store:
    store = Store(plain_rules(0, config.learner.prompts_per_step), draw=PromptDraw(config))
    assert store.draw
    store.state.prompts.learn([[size, size]])
    return store


def test_solved_and_unsolved_prompts_come_as_often_as_their_chances_say() -> None:
    size, epochs = 90, 150
    config = skipping(buffer_config())
    order = PromptOrder([(size, size)], config.run.seed, shuffles=True)
    rewards = {place: (1.0, 0.0, None)[place % 3] for place in range(size)}
    store = new_store(config, size)
    indices = play(store, epochs, rewards, order)
    assert indices == sorted(set(indices)), "each prompt is granted at most once, in the order of the task"
    counts = Counter(order.position(index) % 3 for index in indices)
    assert counts[2] == size // 3 * epochs, "prompts whose answers differ are never skipped"
    # Independent binomials of 30 prompts over 150 epochs: 5 standard deviations, and the first epochs until 1/8.
    for kind, least in ((0, 0.125), (1, 0.5)):
        trials = size // 3 * epochs
        assert abs(counts[kind] - least * trials) < 5 * (trials * least * (1 - least)) ** 0.5 + 30 * 8
    metrics = store.state.counters()
    assert metrics["difficulty/skipped_solved"] == size // 3 * epochs - counts[0]
    assert metrics["difficulty/skipped_unsolved"] == size // 3 * epochs - counts[1]
    assert metrics["difficulty/prompts_seen"] == size
    assert metrics["buffer/admitted"] == len(indices) and metrics["buffer/unaccounted"] == 0


def test_which_prompts_are_skipped_follows_from_the_seed() -> None:
    runs = {}
    for seed in (0, 0, 1):
        config = changed(skipping(buffer_config()), run={"seed": seed})
        order = PromptOrder([(PROMPTS, PROMPTS)], seed, shuffles=True)
        runs.setdefault(seed, []).append(play(new_store(config), 20, dict.fromkeys(range(PROMPTS), 1.0), order))
    assert runs[0][0] == runs[0][1] != runs[1][0]


def is_right(position: int) -> bool:
    return position % 2 == 0


async def answer_epochs(client: WorkerClient, learner: LearnerClient, groups: int) -> list[int]:
    """Play and train so many groups, those of even positions with right answers only, the others without."""
    order = PromptOrder([(PROMPTS, PROMPTS)], 0, shuffles=True)
    indices: list[int] = []
    await client.tell_prompts(order.sources)
    while len(indices) < groups:
        for slot in await client.admit(4):
            await client.put(group_of(slot, float(is_right(order.position(slot.prompt_index)))))
            indices.append(slot.prompt_index)
        version = len(indices) // 4 - 1
        learner.take(version)
        learner.trained(version + 1)
        learner.served(version + 1)
    return indices


def group_of(slot: Slot, reward: float) -> Group:
    return make_group(slot, rows=[make_row(3, version=slot.start_version, reward=reward) for _ in range(2)])


def run_and_crash(config: Config, groups: int) -> tuple[Any, dict[str, float], list[int], dict[str, Any]]:
    """Return (the server, its counters, the prompts played, its part of a checkpoint)."""
    with serving_until_a_crash(config) as server, learner_at(server) as learner:
        indices = with_worker(server.address, lambda client: answer_epochs(client, learner, groups))
        saved = learner.buffer_checkpoint(groups // 4)
        counters = server.counters()
    return server, counters, indices, saved


def test_a_buffer_that_crashed_knows_the_prompts_and_a_resume_does_too(tmp_path: Path) -> None:
    config = skipping(changed(journalled(tmp_path), staleness={"max": 0}))
    server, counters, indices, saved = run_and_crash(config, 40)
    assert counters["difficulty/skipped_solved"] > counters["difficulty/skipped_unsolved"] > 0
    assert max(indices) + 1 == 40 + counters["difficulty/skipped_solved"] + counters["difficulty/skipped_unsolved"]
    streaks = dict(select(config, "SELECT position, streak FROM streaks"))
    assert {place: streak > 0 for place, streak in streaks.items()} == {p: is_right(p) for p in range(PROMPTS)}
    assert sum(map(abs, streaks.values())) == 40
    assert [index for (index,) in select(config, "SELECT prompt_index FROM groups ORDER BY group_id")] == indices
    with serving(same_port(config, server)) as again:
        assert again.counters() == {**counters, "buffer/restarts": 1}

        async def admit(client: WorkerClient) -> list[Slot]:  # its worker has told the prompts to the buffer before
            return await client.admit(4)

        assert [slot.prompt_index > max(indices) for slot in with_worker(again.address, admit)] == [True] * 4

    make_checkpoint(config.run_dir, 10, buffer=saved)
    with opened_run(changed(config, run={"resume": config.run_dir})) as resumed:
        with serving(resumed) as server:
            kept = {name: value for name, value in counters.items() if name.startswith("difficulty/")}
            assert {name: server.counters()[name] for name in kept} == kept
        assert dict(select(resumed, "SELECT position, streak FROM streaks")) == streaks


def test_the_records_of_other_data_are_forgotten() -> None:
    store = new_store(skipping(buffer_config()))
    play(store, 2, dict.fromkeys(range(PROMPTS), 1.0), PromptOrder([(PROMPTS, PROMPTS)], 0, shuffles=True))
    scalars, streaks = store.state.scalars(), store.state.prompts.streaks
    for sources, kept in (([[PROMPTS, PROMPTS]], PROMPTS), ([[PROMPTS, 2 * PROMPTS]], 0)):
        recorded: dict[int, int | None] = {}
        state = StoreState(record_streak=lambda place, streak, into=recorded: into.update({place: streak}))
        resumed = Store(store.rules, state, PromptDraw(skipping(buffer_config())))
        resumed.state.restore([], scalars, list(streaks.items()))
        resumed.state.prompts.learn(sources)
        assert len(resumed.state.prompts.streaks) == kept
        assert recorded == ({} if kept else dict.fromkeys(range(PROMPTS)))


def test_workers_tell_their_prompts_first_and_all_the_same() -> None:
    config = skipping(changed(buffer_config(workers=2)))
    with serving(config) as server:

        async def admit(client: WorkerClient) -> None:
            await client.admit(1)

        with pytest.raises(WireError, match="op: got admit"):
            with_worker(server.address, admit)
        with_worker(server.address, lambda client: client.tell_prompts([(5, 5)]))
        for wrong in ([(6, 6)], [(5, 0)], []):
            with pytest.raises(WireError, match="sources: got"):
                with_worker(server.address, lambda client, told=wrong: client.tell_prompts(told), name="rollout/1")


def test_difficulty_is_refused_where_rewards_do_not_tell_it_or_runs_are_compared() -> None:
    config = buffer_config()
    for section in (
        {"staleness": {"mode": "exact"}, "weight_sync": {"on_update": "drain"}}, {"reward_model": {"path": "judge"}},
        {"rollout": {"group_size": 1}, "algorithm": {"advantage": "gae"}},
    ):
        changed(config, **section)
        with pytest.raises(SettingsError, match=r"task\.difficulty"):
            skipping(changed(config, **section))
    with pytest.raises(SettingsError, match=r"task\.difficulty\.solved"):
        skipping(config, solved=0.0)
