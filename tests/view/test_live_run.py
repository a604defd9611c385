"""The page beside a real run: `async-rl train --view`, which is in the end stopped by Ctrl-C."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.runs import logged


@pytest.mark.e2e
@pytest.mark.nightly
def test_train_with_view_serves_the_page_until_the_run_ends(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    run_dir = tmp_path / "shown"
    command = start(
        "train", str(smoke_yaml), "--view", f"run.dir={tmp_path}", "run.name=shown", "run.steps=100000",
        "rollout.engine=hf", "eval.num_prompts=0", "staleness.max=1",
    )
    wait_until(lambda: len(logged(run_dir)) > 1 or command.process.poll() is not None, 180, "two steps")
    found = re.search(r"http://localhost:\d+", command.text())
    assert found, command.text()

    def page() -> str:
        with urllib.request.urlopen(f"{found[0]}/run/shown/", timeout=30) as answer:
            return answer.read().decode()

    wait_until(lambda: 'class="pill running"' in (text := page()) and "learner/0" in text, 60, "the processes' states")
    command.interrupt()
    assert command.wait(120) == 130, command.text()[-3000:]
    assert command.orphans() == []
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{found[0]}/run/shown/", timeout=5)
