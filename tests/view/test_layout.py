"""The layout of the pages in a real browser, above all on a narrow screen, and texts that turn their direction."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from async_rl.telemetry.status import Status, write_status
from tests.kit.view.chromium import READY_LIMIT_MS, needs_chromium, open_page
from tests.kit.view.run_dirs import RIGHT_TO_LEFT, JournalWriter, make_chat, make_run, text_group
from tests.kit.view.server import ViewServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.processes, needs_chromium]
NARROW = {"width": 390, "height": 844}
OUTSIDE = """() => [...document.querySelectorAll("main *, header *")]
  .filter((e) => e.checkVisibility() && !e.closest(".hidden, .skip, .scroll, .plot, .tokens, svg, option"))
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.outerHTML.slice(0, 100))"""
LABEL = "e => getComputedStyle(e, '::before').content"
SHADES = """(theme) => {
  document.documentElement.dataset.theme = theme;
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const light = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16) / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  return [0, 1, 2, 3].map((bucket) => light(of(`--stale-${bucket}`)) + 0.05);
}"""
WAITS_ON = "2 of 8 groups finished, 14 running (oldest 1 s, worker rollout/0), served version 21"


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run that goes on, with tool calls and with a text that turns its direction; and the address of its page."""
    run_dir = make_run(tmp_path_factory.mktemp("runs") / "chats", note="running", groups=0)
    writer = JournalWriter(run_dir)
    writer.add(make_chat(0), step=3)
    writer.add(text_group(1, [f"answer {RIGHT_TO_LEFT}ltr"], prompt=f"who {RIGHT_TO_LEFT}rtl"), step=4)
    writer.add_without_answers(2, "running")
    writer.close()
    status = Status(process="buffer", doing="answers", waits_on=WAITS_ON, since_s=0.0, limit_s=9.0)
    write_status(run_dir, [status], "running")
    server = ViewServer(run_dir)
    yield run_dir, server.url
    server.close()


@pytest.fixture
def narrow(browser: Browser, chat_run: tuple[Path, str]) -> Iterator[Page]:
    context = browser.new_context(base_url=chat_run[1], viewport=NARROW)  # type: ignore[arg-type]
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(
    "path", ["/run/overview", "/run/overlap", "/run/groups", "/run/groups/0", "/run/groups/2", "/run/staleness"]
)
def test_nothing_is_off_a_narrow_screen(narrow: Page, path: str) -> None:
    narrow.goto(path)
    if path not in ("/run/groups", "/run/groups/2"):
        narrow.wait_for_selector("body[data-ready]", timeout=READY_LIMIT_MS)
    assert narrow.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    assert narrow.evaluate(OUTSIDE) == []
    assert narrow.evaluate("getComputedStyle(document.querySelector('.top')).position") == "static"


def test_who_waits_on_whom_is_read_in_lines_on_a_narrow_screen(narrow: Page) -> None:
    open_page(narrow, "/run/overview")
    cell = narrow.locator("[data-label='waits on']").first
    box = cell.bounding_box()
    assert box is not None
    assert box["width"] > 250
    assert narrow.locator("[data-label='at most']").first.evaluate(LABEL) == '"at most "'


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_shades_of_neighbouring_staleness_can_be_told_apart(narrow: Page, theme: str) -> None:
    open_page(narrow, "/run/staleness")
    shades = narrow.evaluate(SHADES, theme)
    contrasts = [max(pair) / min(pair) for pair in itertools.pairwise(shades)]
    assert min(contrasts) > 1.28


def test_a_table_that_scrolls_has_shaded_edges(narrow: Page) -> None:
    open_page(narrow, "/run/overlap")
    assert "gradient" in narrow.locator(".scroll").first.evaluate("e => getComputedStyle(e).backgroundImage")


def test_a_character_that_turns_text_is_shown_by_its_code_and_turns_no_neighbour(narrow: Page) -> None:
    open_page(narrow, "/run/groups/1")
    assert narrow.locator("#tokens").inner_text() == "answer ⟨U+202E⟩ltr"
    assert narrow.locator(".t").first.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
    assert RIGHT_TO_LEFT not in narrow.content()
    narrow.goto("/run/groups")
    assert "who ⟨U+202E⟩rtl" in narrow.content()
    assert RIGHT_TO_LEFT not in narrow.content()


def test_a_folded_tool_result_is_one_line_that_begins_with_its_text(narrow: Page) -> None:
    open_page(narrow, "/run/groups/0")
    summaries = narrow.locator("#tokens summary")
    assert [text.strip() for text in summaries.all_inner_texts()] == [
        "turn 1 · 53 tokens · calls price · reward 0.000", "3 euros a piece · 68 tokens that are not trained on",
        "turn 2 · 18 tokens · reward 1.000",
    ]  # fmt: skip
    heights = [box["height"] for each in summaries.all() if (box := each.bounding_box())]
    assert max(heights) < 1.5 * min(heights)


def test_the_sign_beside_the_state_follows_it(narrow: Page, chat_run: tuple[Path, str]) -> None:
    """It comes last, because it ends the run."""
    status = json.loads((chat_run[0] / "status.json").read_text())
    status["time_s"] += 3600.0  # so that it is not out of date before the test ends, on a slow machine
    (chat_run[0] / "status.json").write_text(json.dumps(status))
    open_page(narrow, "/run/overview")
    narrow.wait_for_selector(".pill.running")
    narrow.wait_for_selector(".live.on >> text=/^live$/", timeout=READY_LIMIT_MS)
    narrow.wait_for_timeout(1000)  # the first event names all files, and is passed over
    (chat_run[0] / "status.json").write_text(json.dumps(status | {"note": "ended normally"}))
    narrow.wait_for_selector(".pill.ended", timeout=READY_LIMIT_MS)
    narrow.wait_for_selector(".live.on >> text=up to date", timeout=READY_LIMIT_MS)
