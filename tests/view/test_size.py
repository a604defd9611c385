"""Ten thousand groups: the pages of the list come within a second, whatever they are filtered and ordered by."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from buffer.journal import FILE_NAME
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import JournalWriter, make_run, text_group

GROUPS = 10_000
ADDRESSES = (
    "./groups", "./groups?order=staleness DESC", "./groups?where=staleness >= 1&order=reward&page=40",
    "./groups?where=step = 70", "./groups/9999", "./",
)  # fmt: skip
LIMIT_S = 3.0
"""On a machine that does nothing else, each page takes well under a second; these tests may share theirs."""


@pytest.mark.nightly
def test_ten_thousand_groups_are_listed_in_a_moment(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "large", steps=1000, groups=0)
    (run_dir / FILE_NAME).unlink()
    writer = JournalWriter(run_dir)
    for i in range(GROUPS):
        step = i // 10 + 1
        group = text_group(i, [f"answer {i} {number}" for number in range(8)], version=max(0, step - 1 - i % 3))
        writer.add(group, step=step)
    writer.close()
    client = Client(run_dir)
    seconds = {}
    for address in ADDRESSES:
        start_s = time.monotonic()
        assert client.get(address).status_code == 200
        seconds[address] = time.monotonic() - start_s
        print(f"{seconds[address]:.3f} s  {address}")
    assert max(seconds.values()) < LIMIT_S
