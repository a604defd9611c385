"""Exports of a journal in whose files a payload is damaged: what is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.journal import FILE_NAME, payload_folder
from tests.kit.buffer.clients import run_pipeline
from tests.kit.buffer.journal import exported, journalled, select
from tests.kit.buffer.serving import serving

Damage = Callable[[Path, int, int], None]
"""Damages the payload at a place of a file: its first byte and its length."""


def cut_short(file: Path, start: int, size: int) -> None:
    os.truncate(file, start + size - 1)


def fill_with_zeros(file: Path, start: int, size: int) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:start] + bytes(size) + data[start + size :])


@pytest.mark.parametrize("damage", [cut_short, fill_with_zeros])
def test_a_damaged_payload_costs_an_export_the_tokens_of_its_group_alone(
    damage: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = journalled(tmp_path)
    with serving(config) as server:
        run_pipeline(server, config, steps=3, workers=1)
    group_id, number, start, size = select(config, "SELECT * FROM payloads ORDER BY file, start")[-1]
    whole = exported(config)
    assert f"group {group_id}: " not in capsys.readouterr().out
    damage(payload_folder(config.run_dir / FILE_NAME) / str(number), start, size)
    rest = exported(config)
    assert f"group {group_id}: " in capsys.readouterr().out
    arrays = ("tokens", "logprobs", "versions", "mask", "prompt_tokens")
    without = [row | dict.fromkeys(arrays) if row["group_id"] == group_id else row for row in whole]
    assert rest == without
