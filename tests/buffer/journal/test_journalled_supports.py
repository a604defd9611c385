"""The ids that tokens were drawn from, and their experts, in a real buffer and its journal: a crash, the export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from async_rl.base.types import Group, Slot, Support
from async_rl.tools.view.journal_reader import JournalReader
from buffer.journal import FILE_NAME
from tests.kit.buffer.clients import run_pipeline
from tests.kit.buffer.journal import exported, journalled, same_port, select
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import changed
from tests.kit.groups import make_group, make_row
from tests.kit.routing import CHOSEN, COUNT, tiny_experts

PROMPT, LAYERS = (7, 8), 2


def exact(slot: Slot, rng: np.random.Generator, newest: int = -1) -> Group:
    """A group whose tokens were drawn from random ids and have random experts, which follow from its id."""
    del newest
    rng = np.random.default_rng(slot.group_id)
    rows = []
    for _ in range(2):
        sets = [rng.choice(50_000, int(rng.integers(1, 200)), replace=False).tolist() for _ in range(4)]
        row = make_row([each[0] for each in sets], version=slot.start_version)
        used = rng.integers(0, COUNT, (len(PROMPT) + len(sets) - 1, LAYERS, CHOSEN)).astype(np.uint8)
        rows.append(dataclasses.replace(row, support=Support.of(sets), routing=used))
    return make_group(slot, PROMPT, rows)


def assert_exact(group: Group) -> None:
    slot = Slot(group_id=group.group_id, prompt_index=group.prompt_index, start_version=group.start_version)
    for found, expected in zip(group.rows, exact(slot, np.random.default_rng()).rows, strict=True):
        assert found.support is not None and expected.support is not None
        assert found.support.ids.tolist() == expected.support.ids.tolist()
        assert found.support.offsets.tolist() == expected.support.offsets.tolist()
        np.testing.assert_array_equal(found.routing, expected.routing)


def test_supports_and_experts_survive_a_crash_of_the_buffer_and_reach_the_learner(tmp_path: Path) -> None:
    tiny_experts("Qwen3Moe").save_pretrained(tmp_path / "experts")
    config = journalled(tmp_path, keep_steps=-1)
    config = changed(config, rollout={"top_p": 0.9}, model={"path": tmp_path / "experts"})
    with serving_until_a_crash(config) as server:
        batches = run_pipeline(server, config, steps=3, workers=1, make=exact)
    with serving(same_port(config, server)):
        reader = JournalReader(config.run_dir / FILE_NAME)
        arrived = select(config, "SELECT group_id FROM groups WHERE state IN ('finished', 'held', 'trained')")
        kept = [group for (group_id,) in arrived if (group := reader.payload(group_id))]
    assert len(kept) >= 12
    for group in [*kept, *(group for batch in batches for group in batch.groups)]:
        assert_exact(group)
    assert len(exported(config)) >= 24
