"""Weights are pushed while 200 episodes wait for a tool: the push waits for none of them, and none of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.seams.engines import UPDATE_POLICIES
from buffer.store_state import DROP_REASONS
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.episodes.user_code import in_thread
from tests.kit.assembled import run_assembled
from tests.kit.engines.in_thread import EngineInThread

BATCH, GROUP, BOUND = 4, 4, 13
STEPS = BOUND + 1
"""So many batches have room for all groups that start at version 0."""
WAITING = BATCH * GROUP * BOUND
"""The number of episodes in the tool during the first push: all but those of the first batch."""
TOOL_S = 180.0


class LookUp:
    """Two turns, between which a tool looks something up. During the first push it lasts until that is done.

    The episodes of the first prompts that begin do not wait for the push, only until all others are in the tool.
    """

    tools: Sequence[Tool] = ()
    in_first_batch: ClassVar[set[int]] = set()
    num_inside: ClassVar[int] = 0
    all_inside: ClassVar[threading.Event]
    released: ClassVar[threading.Event]

    @classmethod
    def begin_test(cls) -> None:
        cls.in_first_batch, cls.num_inside = set(), 0
        cls.all_inside, cls.released = threading.Event(), threading.Event()

    def __init__(self, index: int) -> None:
        self._index = index
        self._turn = 0
        if len(self.in_first_batch) < BATCH:
            self.in_first_batch.add(index)

    async def start(self) -> list[Message]:
        return [user("hello")]

    async def step(self, reply: Message) -> Step:
        self._turn += 1
        if self._turn == 1:
            await self._look_up()
        return Step(messages=[user("found")], reward=float("a" in reply["content"]), done=self._turn == 2)

    async def _look_up(self) -> None:
        if self._index in self.in_first_batch:
            await in_thread(self.all_inside.wait)
            return
        LookUp.num_inside += 1
        if LookUp.num_inside == WAITING:
            self.all_inside.set()
        await in_thread(self.released.wait)
        LookUp.num_inside -= 1

    async def close(self) -> None:
        pass


@pytest.mark.e2e
@pytest.mark.nightly
# drain waits for all of them
@pytest.mark.parametrize("on_update", [name for name in UPDATE_POLICIES if name != "drain"])
def test_a_push_waits_for_no_tool_and_loses_no_episode(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread, on_update: str
) -> None:
    LookUp.begin_test()
    config = load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.steps={STEPS}", f"staleness.max={BOUND}", f"weight_sync.on_update={on_update}",
        *sglang_server.overrides, f"rollout.group_size={GROUP}",
        f"learner.prompts_per_step={BATCH}", f"timeouts.turn_s={TOOL_S}", f"timeouts.tool_s={TOOL_S}",
        "task.name=", "task.params={}", f"task.env={LookUp.__module__}:LookUp", "task.size=100", "eval.num_prompts=0",
        "rollout.max_episode_tokens=64",
    ])
    inside: list[int] = []

    def after_a_push() -> None:
        inside.append(LookUp.num_inside)
        LookUp.released.set()

    try:
        run = run_assembled(config, after_a_push)
    finally:
        LookUp.all_inside.set()
        LookUp.released.set()
    assert inside[0] >= WAITING >= 200
    assert [batch.version for batch in run.batches] == list(range(STEPS))
    groups = [group for batch in run.batches for group in batch.groups]
    assert sorted(group.group_id for group in groups if group.start_version == 0) == list(range(STEPS * BATCH))
    assert {(episode.turns, group.start_version) for group in groups for episode in group.episodes} == {(2, 0)}
    assert {row.finish_reason for group in groups for row in group.rows} <= {"stop", "length"}
    dropped = {reason: run.counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS}
    assert run.counters["buffer/admitted"] == len(groups) + dropped.pop("shutdown")
    assert set(dropped.values()) == {0.0} and run.counters["buffer/unaccounted"] == 0
    versions = [set(r.versions[r.mask].tolist()) for batch in run.batches[1:] for g in batch.groups for r in g.rows]
    assert all(min(each) == 0 and max(each) >= 1 for each in versions)  # a turn before the push, and one after it
    assert max(step.get("parity/precision/mean_abs", 0.0) for step in run.steps) < 1e-4
