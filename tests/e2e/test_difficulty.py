"""A run with `task.difficulty` plays, trains and counts the prompts that its records let through, and no others."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from buffer.journal import FILE_NAME
from buffer.prompt_order import PromptOrder
from rollout_server.question import Question
from tests.kit.assembled import run_assembled

SIZE, STEPS = 16, 24
LEAST = {True: 0.125, False: 0.5}


def by_the_first_letter(question: Question, response: str) -> float:
    """Some words are always solved, some never, and some in part, by how an answer is written."""
    kind = ord(question.ground_truth[0]) % 3
    return {0: 1.0, 1: 0.0}.get(kind, sum(letter in "aeiou" for letter in response) / 8)


def last_in_a_row(groups: list[tuple[bool, bool]]) -> tuple[int, bool]:
    """Return the number of the last groups in a row that were flat and right or wrong alike, and whether right."""
    count, is_right = 0, bool(groups) and groups[-1][1]
    while count < len(groups) and groups[-1 - count] == (True, is_right):
        count += 1
    return count, is_right


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_run_skips_prompts_by_the_groups_before_them(smoke_yaml: Path, tmp_path: Path) -> None:
    config = load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.steps={STEPS}", f"task.size={SIZE}", "eval.num_prompts=0", "rollout.engine=hf",
        "weight_sync.transport=disk", f"task.reward={__name__}:by_the_first_letter",
        f"task.difficulty.solved={LEAST[True]}", f"task.difficulty.unsolved={LEAST[False]}",
    ])
    run = run_assembled(config)
    with contextlib.closing(sqlite3.connect(config.run_dir / FILE_NAME)) as journal:
        groups = journal.execute(
            "SELECT prompt_index, equal_rewards, reward FROM groups WHERE state = 'trained' ORDER BY group_id"
        ).fetchall()
        streaks = dict(journal.execute("SELECT position, streak FROM streaks").fetchall())
    size = config.learner.prompts_per_step
    assert len(groups) == run.counters["buffer/admitted"] == STEPS * size

    # At staleness 0 the groups of a batch are granted when all of the batch before have arrived.
    order, past = PromptOrder([(SIZE, SIZE)], config.run.seed, shuffles=True), defaultdict(list)
    skipped, turn = Counter[bool](), 0
    for start in range(0, len(groups), size):
        batch = groups[start : start + size]
        for index, *_ in batch:
            for passed in range(turn, index):
                count, is_right = last_in_a_row(past[order.position(passed)])
                assert count > 0, "a prompt that was not played before, or whose rewards differed, is skipped"
                skipped[is_right] += 1
            turn = index + 1
        for index, is_flat, reward in batch:
            past[order.position(index)].append((bool(is_flat), reward == 1))
    found = {position: last_in_a_row(each) for position, each in past.items()}
    assert streaks == {position: count if is_right else -count for position, (count, is_right) in found.items()}
    ends = run.steps[-1]
    assert (ends["difficulty/skipped_solved"], ends["difficulty/skipped_unsolved"]) == (skipped[True], skipped[False])
    assert skipped[True] > 0 and ends["difficulty/prompts_seen"] == SIZE
    assert run.counters["buffer/unaccounted"] == 0
