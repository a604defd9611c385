"""Headless Chromium for the tests of the page, and the mark of tests that need it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
READY_LIMIT_MS = 30_000
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or sync_playwright is None,
    reason="needs Chromium and playwright: scripts/chromium.sh and pip install -e '.[dev]' install them",
)


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def open_page(page: Page, path: str) -> None:
    page.goto(path)
    page.wait_for_selector("body[data-ready]", timeout=READY_LIMIT_MS)
