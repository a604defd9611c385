"""A run with episodes of several turns, and what must hold of it under its policies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from buffer.store_state import DROP_REASONS
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from tests.kit.assembled import Run

Case = tuple[str, str, str]
"""staleness.mode, staleness.on_late, weight_sync.on_update"""
STEPS, BOUND, TURNS = 5, 2, 5


class SmallTalk:
    """Says one to five letters, one a turn, after a wait with a long tail. The reward of a turn is for vowels."""

    tools: Sequence[Tool] = ()

    def __init__(self, index: int, seed: int) -> None:
        self._turns = 1 + index % TURNS
        self._random = random.Random(seed)

    async def start(self) -> list[Message]:
        return [user("hello")]

    async def step(self, reply: Message) -> Step:
        await asyncio.sleep(self._random.lognormvariate(-4, 1.2))
        self._turns -= 1
        reward = sum(letter in "aeiou" for letter in reply["content"]) / 16
        messages = [user(self._random.choice("bcdfg"))]
        return Step(reward=reward, done=not self._turns, messages=messages)

    async def close(self) -> None:
        pass


def configure(smoke_yaml: Path, tmp_path: Path, case: Case, *overrides: str) -> Config:
    mode, late, on_update = case
    return load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.steps={STEPS}", f"staleness.max={BOUND}", f"staleness.mode={mode}",
        f"staleness.on_late={late}", f"weight_sync.on_update={on_update}", *overrides,
        "task.name=", "task.params={}", "task.env=tests.kit.episode_policies:SmallTalk", "task.size=100",
        "rollout.max_response_tokens=16", "rollout.max_episode_tokens=160", "timeouts.episode_s=1800",
        "eval.num_prompts=4", "eval.every_steps=2",
    ])


def check(run: Run, config: Config, case: Case) -> None:
    mode, late, on_update = case
    assert [batch.version for batch in run.batches] == list(range(STEPS))
    groups = [group for batch in run.batches for group in batch.groups]
    assert len({group.group_id for group in groups}) == len(groups) == run.counters["buffer/trained"]
    dropped = sum(run.counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS)
    assert run.counters["buffer/admitted"] == len(groups) + dropped and run.counters["buffer/unaccounted"] == 0
    assert {episode.turns for group in groups for episode in group.episodes} > {1, 2, 3}
    for step in run.steps:
        assert step["staleness/max"] <= BOUND
        assert step.get("parity/precision/mean_abs", 0.0) < 1e-4
        assert on_update == "in_place" or "parity/old_kv/mean_abs" not in step
        assert 0 <= step["buffer/waited_for_late_s"] <= step["time/wait_data_s"] + 0.05
    for batch in run.batches:
        for group in batch.groups:
            sampled = np.concatenate([r.versions[r.mask] for r in group.rows])
            assert sampled.min() >= group.start_version
            if late != "mask":
                assert sampled.min() >= batch.version - BOUND
            if on_update == "drain":
                assert len(set(sampled.tolist())) == 1
            if mode == "exact":
                assert set(sampled.tolist()) == {max(0, batch.version - BOUND)}
    assert set(run.evals) >= {2} and all(values["eval/reward"] >= 0 for values in run.evals.values())
