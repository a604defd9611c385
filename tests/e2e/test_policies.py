"""Every mode, late policy and update policy end to end on a real SGLang server."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config import BufferConfig, Config
from async_rl.base.config.loading import load_config
from buffer.store_state import DROP_REASONS
from rollout_server.question import Question
from tests.kit.assembled import Run, run_assembled
from tests.kit.engines.in_thread import EngineInThread

Case = tuple[str, str, str]
"""staleness.mode, staleness.on_late, weight_sync.on_update"""
STEPS = 6
UPDATES = ("in_place", "retract", "drain", "abort")
BOUNDED = [("bounded", late, on_update) for late in ("wait", "drop", "mask") for on_update in UPDATES]
ALLOWED = [case for case in BOUNDED if case[1:] != ("mask", "drain")]
IN_CI = [("bounded", "drop", "retract"), ("exact", "wait", "drain")]
"""Besides the case of the run with a depth: bounded, wait, in_place. test_episode_policies.py has mask and abort."""


def slow_for_some(question: Question, response: str) -> float:
    """A reward that takes long for about a third of the prompts, so that their groups are late."""
    if len(question.ground_truth) == 5:
        time.sleep(0.3)
    return sum(letter in "aeiou" for letter in response) / 64


def configure(smoke_yaml: Path, tmp_path: Path, case: Case, bound: int, *overrides: str) -> Config:
    mode, late, on_update = case
    return load_config(smoke_yaml, [
        f"run.dir={tmp_path}", f"run.steps={STEPS}", f"staleness.max={bound}", f"staleness.mode={mode}",
        f"staleness.on_late={late}", f"weight_sync.on_update={on_update}", "rollout.max_response_tokens=64",
        "task.reward=tests.e2e.test_policies:slow_for_some", "eval.num_prompts=0",
        *overrides,
    ])


def check(run: Run, config: Config, case: Case) -> None:
    mode, late, on_update = case
    bound, size = config.staleness.max, config.learner.prompts_per_step
    assert [batch.version for batch in run.batches] == list(range(STEPS))
    ids = [group.group_id for batch in run.batches for group in batch.groups]
    assert len(set(ids)) == len(ids) == STEPS * size == run.counters["buffer/trained"]
    dropped = {reason: run.counters[f"buffer/dropped_{reason}"] for reason in DROP_REASONS}
    assert run.counters["buffer/admitted"] == len(ids) + sum(dropped.values())
    happened = {reason for reason, count in dropped.items() if count}
    assert happened <= ({"shutdown"} if late == "wait" else {"shutdown", "late"})
    assert run.aborted <= dropped["late"]
    for step in run.steps:
        assert step["staleness/max"] <= bound
        assert step.get("parity/precision/mean_abs", 0.0) < 1e-4
        assert on_update == "in_place" or "parity/old_kv/mean_abs" not in step
    for batch in run.batches:
        for group in batch.groups:
            assert group.keeps_kv == (on_update == "in_place")
            versions = np.concatenate([r.versions for r in group.rows])
            assert versions.min() >= group.start_version
            if late != "mask":
                assert versions.min() >= batch.version - bound
            if on_update == "drain":
                assert set(versions.tolist()) == {group.start_version}
            if mode == "exact":
                assert set(versions.tolist()) == {max(0, batch.version - bound)}


@pytest.mark.e2e
@pytest.mark.parametrize(("bound", "case"), [
    *((2, case) for case in IN_CI), *(pytest.param(1, case, marks=pytest.mark.nightly) for case in ALLOWED),
])  # fmt: skip
def test_a_run_keeps_its_bound_under_each_policy(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread, bound: int, case: Case
) -> None:
    config = configure(smoke_yaml, tmp_path, case, bound, *sglang_server.overrides)
    check(run_assembled(config), config, case)


@pytest.mark.e2e
def test_a_depth_limits_the_mean_staleness_and_the_bound_the_largest(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread
) -> None:
    """While a batch of 4 is trained, at most 2 of 6 slots are of other groups, which grow older: 2 / 4 a group."""
    case = ("bounded", "wait", "in_place")
    config = configure(smoke_yaml, tmp_path, case, 3, "staleness.depth=0.5", *sglang_server.overrides)
    run = run_assembled(config)
    check(run, config, case)
    assert config.slots == 6 and all(step["buffer/slots_held"] <= 6 for step in run.steps)
    ages = [batch.version - group.start_version for batch in run.batches for group in batch.groups]
    assert sum(ages) / len(ages) <= 0.5 and max(ages) > 0


@pytest.mark.e2e
def test_a_run_that_mixes_in_used_groups_keeps_its_bound_for_each_use(
    smoke_yaml: Path, tmp_path: Path, sglang_server: EngineInThread
) -> None:
    case = ("bounded", "wait", "in_place")
    config = replace(
        configure(smoke_yaml, tmp_path, case, 2, *sglang_server.overrides),
        buffer=BufferConfig(max_uses=2, fresh_fraction=0.5),
    )
    run = run_assembled(config)
    size = config.learner.prompts_per_step
    uses: Counter[int] = Counter()
    for batch in run.batches:
        ids = [group.group_id for group in batch.groups]
        assert len(set(ids)) == size
        assert sum(i not in uses for i in ids) >= config.fresh_per_step
        uses.update(ids)
        assert batch.version - min(group.oldest_version for group in batch.groups) <= 2
    assert max(uses.values()) == 2
    assert (run.counters["buffer/uses"], run.counters["buffer/trained"]) == (STEPS * size, len(uses))
    assert run.counters["buffer/unaccounted"] == 0
