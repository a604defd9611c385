"""The pages in a real browser: headless Chromium, driven by playwright, against a server process of its own."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sweeps import make_sweep
from tests.kit.view.chromium import READY_LIMIT_MS, needs_chromium, open_page
from tests.kit.view.run_dirs import (
    HOSTILE,
    TOOL_RESULT,
    JournalWriter,
    append_step,
    make_episodes,
    make_run,
    text_group,
)
from tests.kit.view.server import ViewServer

with suppress(ImportError):  # then the tests are skipped
    from playwright.sync_api import Browser, Page, Route, expect

    expect.set_options(timeout=READY_LIMIT_MS)

pytestmark = [pytest.mark.processes, needs_chromium]
LIGHT_AND_DARK = ("light", "dark")


@pytest.mark.parametrize("path", ["/run/overview", "/run/overlap", "/run/staleness", "/run/groups/1"])
def test_pages_load_and_draw_without_an_error(page: Page, path: str) -> None:
    open_page(page, path)
    assert page.evaluate(
        "document.querySelectorAll('canvas, .t').length + document.querySelectorAll('.bk-Figure').length"
    )


def test_new_steps_are_shown_on_an_open_page(page: Page, shown: tuple[Path, str]) -> None:
    open_page(page, "/run/overview")
    page.wait_for_selector(".live.on")
    page.wait_for_timeout(1000)
    for step in (15, 16, 17):
        append_step(shown[0], step)
        expect(page.locator(".progress")).to_have_text(f"step {step} of 20")
        expect(page.locator(".readout").first).to_contain_text(f"0.{step}")


HIDE = """hidden => {
  Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""A browser without a window shows all of its tabs."""


def test_tabs_that_nobody_sees_leave_the_browsers_connections_to_others(
    browser: Browser, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "many-tabs", note="running")
    server = ViewServer(run_dir)
    context = browser.new_context(base_url=server.url)
    for _ in range(8):
        tab = context.new_page()
        open_page(tab, "/run/overview")
        tab.wait_for_selector(".live.on")
        tab.evaluate(HIDE, True)
    append_step(run_dir, 15)
    first = context.pages[0]
    first.evaluate(HIDE, False)
    expect(first.locator(".progress")).to_have_text("step 15 of 20")
    append_step(run_dir, 16)
    expect(first.locator(".progress")).to_have_text("step 16 of 20")
    server.close()


def test_a_tab_that_was_hidden_before_it_was_connected_catches_up(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "hidden", note="running")
    server = ViewServer(run_dir)
    context = browser.new_context(base_url=server.url)
    context.add_init_script(f"document.addEventListener('DOMContentLoaded', () => ({HIDE})(true))")
    tab = context.new_page()
    tab.goto("/run/overview")
    append_step(run_dir, 15)
    tab.evaluate(HIDE, False)
    expect(tab.locator(".progress")).to_have_text("step 15 of 20")
    server.close()


def test_evaluations_written_after_later_steps_are_shown_on_an_open_page(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "evaluated", groups=0)
    server = ViewServer(run_dir)
    page = browser.new_context(base_url=server.url).new_page()
    open_page(page, "/run/overview")
    page.wait_for_selector(".live.on")
    page.wait_for_timeout(1000)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "eval/accuracy": 0.25}) + "\n" for step in (0, 12))
    expect(page.locator(".readout").first).to_contain_text("held-out accuracy 0.25")
    server.close()


def test_an_open_sweep_page_shows_the_trade_off_once_cells_have_finished(browser: Browser, tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, bounds=(0, 1), seeds=1)
    records = {record: record.read_text() for record in (folder / "cells").glob("*/cell.json")}
    for record in records:
        record.unlink()
    server = ViewServer(folder)
    page = browser.new_context(base_url=server.url).new_page()
    open_page(page, "/sweep")
    page.wait_for_selector(".live.on")
    page.wait_for_timeout(1000)
    expect(page.locator("#trade-off figure")).to_have_count(0)
    for record, text in records.items():
        record.write_text(text)
    expect(page.locator("#trade-off figure").first).to_be_visible()
    server.close()


def test_the_cursor_reads_all_charts_at_one_step(page: Page) -> None:
    open_page(page, "/run/overview")
    first = page.locator(".chart").first
    first.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    step = int(page.locator(".progress").inner_text().split()[1]) - 10  # of the last one, which other tests may add
    expect(page.locator("#cursor-step")).to_have_text(f"step {step}")
    expect(page.locator(".readout").first).to_contain_text(str(step / 100))
    box = first.locator(".plot").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.locator("#cursor-step")).not_to_have_text(f"step {step}")


def test_smoothing_and_another_metric(page: Page) -> None:
    open_page(page, "/run/overview")
    page.locator("#smoothing").fill("0.9")
    assert page.locator("#smoothing-value").inner_text() == "0.90"
    page.locator("#metric").fill("policy/grad_norm")
    page.locator("#metric").press("Enter")
    page.locator("#metric").blur()
    page.wait_for_selector("#more .readout .entry")


def test_filters_list_the_groups_that_meet_them(page: Page) -> None:
    page.goto("/run/groups")
    page.get_by_label("Drop reason").select_option("late")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_role("link", name="Clear").click()
    page.wait_for_url("**/run/groups")
    page.get_by_label("Trained in step").fill("4")
    page.keyboard.press("Enter")
    page.wait_for_url("**step=4**")
    page.locator("tbody a").first.click()
    page.wait_for_url("**/groups/1")


def test_a_colour_that_is_chosen_before_the_answer_has_come_is_its_colour(page: Page) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    held: list[Route] = []
    page.route("**/data/answers/**", lambda route: held.append(route))
    page.goto("/run/groups/1")
    page.get_by_label("importance ratio").check()
    page.locator("#tokens").press("ArrowRight")
    held[0].continue_()
    page.wait_for_selector(".t.r5")
    assert problems == []


def test_an_answer_is_coloured_and_shown_as_text_and_as_ids(page: Page) -> None:
    open_page(page, "/run/groups/1")
    assert page.locator(".t.v0").count() == page.locator(".t.v1").count() == 6
    page.get_by_label("behaviour logprob").check()
    assert page.locator(".t.p0").count() < 12
    assert "color=logprob" in page.url
    page.get_by_label("importance ratio").check()
    assert page.locator(".t.r5").count() == 11  # log ratio 0.5
    assert page.locator(".t.m0").count() == 1  # the learner masked the first token
    page.locator("#tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "importance ratio 1.6487" in page.locator("#token-facts").inner_text()
    page.get_by_label("mask").check()
    assert page.locator(".t.m1").count() == 11
    page.locator("#tokens").focus()
    page.keyboard.press("End")
    assert "token 11" in page.locator("#token-facts").inner_text()
    page.get_by_label("text", exact=True).check()
    assert page.locator("#tokens").inner_text() == "right answer"
    page.get_by_label("token ids", exact=True).check()
    assert page.locator("#tokens").inner_text().split()[:2] == ["82", "73"]


def test_html_in_an_answer_is_shown_as_text_and_never_runs(page: Page) -> None:
    open_page(page, "/run/groups/1?answer=1")
    page.get_by_label("text", exact=True).check()
    assert page.locator("#tokens").inner_text() == HOSTILE
    for path in ("/run/groups", "/run/groups?text=hacked"):
        page.goto(path)
    assert page.evaluate("window.hacked") is None


def test_siblings_are_chosen_by_mouse_and_by_key(page: Page) -> None:
    open_page(page, "/run/groups/1")
    page.locator("#tab-1").click()
    page.wait_for_selector("body[data-ready='1']")
    assert "answer=1" in page.url
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("body[data-ready='0']")
    assert page.locator("#tab-0").get_attribute("aria-selected") == "true"


def test_lanes_follow_a_chosen_window(page: Page) -> None:
    open_page(page, "/run/overlap")
    page.get_by_role("spinbutton", name="Steps").fill("3")
    page.get_by_label("to", exact=True).fill("4")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#waits")).to_contain_text("0.60")
    page.get_by_role("button", name="Earlier steps").click()
    expect(page.get_by_role("spinbutton", name="Steps")).to_have_value("1")
    assert page.url.endswith("from=3&to=4")


@pytest.mark.parametrize("theme", LIGHT_AND_DARK)
@pytest.mark.parametrize("path", ["/run/overview", "/run/groups", "/run/groups/1", "/run/overlap"])
def test_text_has_contrast_and_controls_have_names(
    browser: Browser, shown: tuple[Path, str], path: str, theme: Any
) -> None:
    context = browser.new_context(base_url=shown[1], color_scheme=theme)
    page = context.new_page()
    page.goto(path)
    if path != "/run/groups":
        page.wait_for_selector("body[data-ready]", timeout=READY_LIMIT_MS)
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(LOW_CONTRAST) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    context.close()


def test_turns_and_what_tools_said_are_folded(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "episodes", groups=0)
    writer = JournalWriter(run_dir)
    writer.add(make_episodes(0), step=1)
    writer.close()
    server = ViewServer(run_dir)
    page = browser.new_context(base_url=server.url).new_page()
    open_page(page, "/run/groups/0?answer=0")
    summaries = [each.strip() for each in page.locator("#tokens summary").all_inner_texts()]
    tool = page.locator("#tokens details:not(.turn)")
    texts = page.locator(".sibling").all_inner_texts()
    is_open = [tool.get_attribute("open"), page.locator("#tokens details.turn[open]").count()]
    tool.locator("summary").click()
    expect(tool.locator(".t").first).to_be_visible()
    server.close()
    assert summaries == [
        "turn 1 · 9 tokens · reward 0.250", f"{TOOL_RESULT.strip()} · 26 tokens that are not trained on",
        "turn 2 · 9 tokens · reward 0.750",
    ]  # fmt: skip
    assert is_open == [None, 2]
    times = "2 turns in 2.00 s, 1.25 s of it sampled, 0.25 s outside of sampling and tool calls · 1 tool call in 0.50 s"
    assert f"episode 0 · {times}" in texts[0]
    assert "episode 1, row 2 of 2" in texts[2]


def test_long_answers_are_shown_whole(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "long", groups=0)
    (run_dir / "trajectories.sqlite").unlink()
    writer = JournalWriter(run_dir)
    writer.add(text_group(0, ["tokens, " * 1000] * 8), step=1)
    writer.close()
    server = ViewServer(run_dir)
    page = browser.new_context(base_url=server.url).new_page()
    page.goto("/run/groups")  # the tokenizer is loaded at the first page
    start_s = time.monotonic()
    open_page(page, "/run/groups/0")
    print(f"8 answers of 8,000 tokens: shown after {time.monotonic() - start_s:.2f} s")
    assert page.locator(".t").count() == 8000
    server.close()


NAMELESS = """() => [...document.querySelectorAll("input, select, button, a[href], [tabindex='0']")]
  .filter((e) => e.checkVisibility() && !(e.labels && e.labels.length) && !e.getAttribute("aria-label")
    && !e.textContent.trim() && !e.getAttribute("aria-labelledby"))
  .map((e) => e.outerHTML.slice(0, 120))"""

LOW_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
      if (a > 0) layers.push([r, g, b, a]);
      if (a === 1) break;
    }
    const over = (under, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
    return layers.reverse().reduce(over, [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !e.checkVisibility() || e.closest(".hidden, .skip, .bk-Figure, option, :disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${e.className || e.tagName}: ${text.slice(0, 40)}`);
  }
  return [...new Set(found)];
}"""
