"""The pages in a real browser: headless Chromium, driven by playwright, against a server process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from async_rl.base.telemetry.status import NORMAL_END, ServerStatus, Status, write_status
from tests.kit.view.chromium import READY_LIMIT_MS, needs_chromium, open_page
from tests.kit.view.run_dirs import HOSTILE, JournalWriter, append_step, make_chat, make_run
from tests.kit.view.server import ViewServer

with suppress(ImportError):  # then the tests are skipped
    from playwright.sync_api import Browser, Page, expect

    expect.set_options(timeout=READY_LIMIT_MS)

pytestmark = [pytest.mark.processes, needs_chromium]
RUN = "/run/live"
PATHS = [f"{RUN}/", f"{RUN}/groups", f"{RUN}/groups/1", f"{RUN}/groups/20", f"{RUN}/groups/22", "/"]
WIDTHS = (1280, 390)
WAITS_ON = "2 of 8 groups finished, 14 running (oldest 1 s, worker rollout/0), served version 21"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with a run that goes on and one that ended, and the address of its page."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = make_run(folder / "live", note="running")
    make_run(folder / "ended", steps=3)
    writer = JournalWriter(run_dir)
    writer.add(make_chat(20), step=11)
    writer.add_without_answers(22, "running")
    writer.close()
    status = Status(process="buffer", doing="answers", waits_on=WAITS_ON, since_s=0.0, limit_s=9.0)
    server = ServerStatus(
        name="rollout/0", state="serving", place="http://gpu-host-17.cluster.example:30000", version=21, since_s=0.0
    )
    write_status(run_dir, [status], "running", servers=[server])
    saved = json.loads((run_dir / "status.json").read_text())
    # The run counts as one that goes on until the last test ends, on a slow machine too.
    (run_dir / "status.json").write_text(json.dumps(saved | {"time_s": saved["time_s"] + 3600.0}))
    view = ViewServer(folder)
    yield run_dir, view.url
    view.close()


@pytest.fixture
def page(browser: Browser, shown: tuple[Path, str]) -> Iterator[Page]:
    """A page whose errors, and requests that leave this host, fail the test."""
    context = browser.new_context(base_url=shown[1], viewport={"width": 1280, "height": 900})
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if is_elsewhere(request.url, shown[1]) else None)
    yield page
    context.close()
    assert problems == []


def is_elsewhere(url: str, home: str) -> bool:
    return not url.startswith((home, "data:", "blob:"))


@pytest.mark.parametrize("path", PATHS)
def test_pages_load_without_an_error_and_fit_the_screen(page: Page, path: str) -> None:
    page.goto(path)
    if path == f"{RUN}/":
        page.wait_for_selector("body[data-ready]", timeout=READY_LIMIT_MS)
        assert page.locator(".bk-Figure").count() == 7
    expect(page.locator(".live.on")).to_be_visible()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
        assert page.evaluate(OUTSIDE) == []


def test_new_steps_groups_and_metrics_are_shown_on_an_open_page(page: Page, shown: tuple[Path, str]) -> None:
    open_page(page, f"{RUN}/")
    page.wait_for_selector(".live.on >> text=live")
    for step in (15, 16):
        append_step(shown[0], step)
        expect(page.locator(".progress")).to_have_text(f"step {step} of 20")
    with (shown[0] / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "eval/accuracy": 0.25}) + "\n" for step in (0, 12))
    expect(page.locator("#tiles")).to_contain_text("25.0%")
    assert page.locator("#charts figure").count() == 6


def test_a_tab_that_nobody_sees_asks_for_nothing_and_catches_up(page: Page, shown: tuple[Path, str]) -> None:
    page.add_init_script(f"({HIDE})(true)")
    page.goto(f"{RUN}/groups")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert asked == []
    append_step(shown[0], 17)
    page.evaluate(HIDE, False)
    expect(page.locator(".progress")).to_have_text("step 17 of 20")


def test_groups_are_searched_by_sql(page: Page) -> None:
    page.goto(f"{RUN}/groups")
    page.get_by_label("WHERE").fill("drop_reason = 'late'")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_label("WHERE").fill("step = 4")
    page.keyboard.press("Enter")
    page.wait_for_url("**where=step**")
    page.locator("tbody a").first.click()
    page.wait_for_url("**/groups/1")
    page.goto(f"{RUN}/groups?where=steps=4")
    expect(page.get_by_role("alert")).to_contain_text("no such column: steps")


def test_tokens_are_coloured_and_say_what_is_known_of_them(page: Page) -> None:
    page.goto(f"{RUN}/groups/1")
    assert page.locator(".t.v0").count() == page.locator(".t.v1").count() == 6
    page.get_by_role("link", name="importance ratio").click()
    page.wait_for_url("**color=ratio*")  # loaded: its script answers keys
    expect(page.locator(".t.r5")).to_have_count(11)  # log ratio 0.5
    assert page.locator(".t.m0").count() == 1  # the learner masked the first token
    page.locator("#tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token-facts")).to_contain_text("importance ratio 1.6487")
    page.locator(".t").last.hover()
    expect(page.locator("#token-facts")).to_contain_text("token 11")
    page.locator(".sibling").nth(1).click()
    page.wait_for_url("**answer=1&color=ratio")
    assert page.locator("#tokens").inner_text() == HOSTILE
    assert page.evaluate("window.hacked") is None


def test_the_state_of_a_run_that_ends_is_shown_on_an_open_page(page: Page, shown: tuple[Path, str]) -> None:
    """It comes last, because it ends the run."""
    open_page(page, f"{RUN}/")
    expect(page.locator("#processes")).to_contain_text(WAITS_ON)
    page.wait_for_selector(".live.on >> text=live")
    write_status(shown[0], [], NORMAL_END)
    page.wait_for_selector(".pill.ended", timeout=READY_LIMIT_MS)
    expect(page.locator("#processes")).to_be_hidden()
    page.wait_for_selector(".live.on >> text=up to date", timeout=READY_LIMIT_MS)


HIDE = """hidden => {
  Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
}"""
"""A browser without a window shows all of its tabs."""

OUTSIDE = """() => [...document.querySelectorAll("main *, header *")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !e.closest(".hidden, .skip, .scroll, .plot, #lanes, .tokens, .clip, svg, option"))
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.outerHTML.slice(0, 100))"""
