"""The page beside a real run: `async-rl train --view`, which is followed, and in the end stopped by Ctrl-C."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.view.chromium import needs_chromium

with suppress(ImportError):  # then the tests with a browser are skipped
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

START_LIMIT_S = 180.0
LIVE_LIMIT_S = 2.0
MEASURED_STEPS = 5
SHOWS_STEP = "step => Number(document.querySelector('.progress').innerText.match(/step (\\d+)/)[1]) >= step"
Shown = tuple[MarkedCommand, str, Path]
"""A run with --view that has made two steps, the address of its page, and its directory."""


@pytest.fixture(scope="module")
def shown_run(smoke_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("live")
    arguments = [
        "train", str(smoke_yaml), "--view", f"run.dir={folder}", "run.name=shown", "run.steps=100000",
        "rollout.engine=hf", "eval.num_prompts=0", "staleness.max=1",
    ]  # fmt: skip
    command = MarkedCommand(arguments, folder / "command.log")
    try:
        wait_until(lambda: last_step(folder / "shown") >= 2, START_LIMIT_S, "two steps")
        found = re.search(r"http://localhost:\d+", command.text())
        assert found, command.text()
        yield command, found[0], folder / "shown"
    finally:
        command.kill()


def last_step(run_dir: Path) -> int:
    with suppress(OSError):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        return max((int(json.loads(line)["step"]) for line in lines if line.endswith("\n")), default=0)
    return 0


@needs_chromium
def test_the_page_of_a_real_run_follows_it_within_two_seconds(
    shown_run: Shown, browser: Browser
) -> None:
    _, url, run_dir = shown_run
    page, problems = browser.new_context(base_url=url).new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto("/run/shown/")
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    page.wait_for_selector(".live.on")
    delays_s = [delay_of_next_step(page, run_dir) for _ in range(MEASURED_STEPS)]
    print("seconds from a step in metrics.jsonl to the page:", *(f"{delay_s:.2f}" for delay_s in sorted(delays_s)))
    assert sorted(delays_s)[MEASURED_STEPS // 2] < LIVE_LIMIT_S
    assert "a batch, while rollout generated" in page.locator("#waits").inner_text()
    page.goto("/run/shown/groups")
    page.locator("tbody a").first.click()
    page.get_by_role("link", name="importance ratio").click()
    page.wait_for_selector(".t.r3")  # about 1: a young policy hardly moves in a step
    assert problems == []


def test_train_with_view_serves_the_page_until_the_run_ends(shown_run: Shown) -> None:
    """It comes last, because it ends the run that the tests share."""
    command, url, run_dir = shown_run
    with urllib.request.urlopen(f"{url}/run/shown/", timeout=30) as answer:
        text = answer.read().decode()
    assert 'class="pill running"' in text
    assert "learner/0" in text and "Who waits on whom now" in text
    command.interrupt()
    assert command.wait(120) == 130, command.text()[-3000:]
    assert f"async-rl view {run_dir} shows the run again" in command.text()
    assert command.orphans() == []
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/run/shown/", timeout=5)


def delay_of_next_step(page: Page, run_dir: Path) -> float:
    """Wait for a step that is not in metrics.jsonl yet; returns the seconds from then until the page shows it."""
    before = last_step(run_dir)
    wait_until(lambda: last_step(run_dir) > before, 60, "a step")
    step = last_step(run_dir)
    return wait_until(lambda: bool(page.evaluate(SHOWS_STEP, step)), 30, f"step {step} on the page")
