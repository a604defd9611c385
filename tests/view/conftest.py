"""Fixtures: a run directory that ended, and a client of the application that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.view.chromium import open_browser
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import make_run
from tests.kit.view.server import ViewServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "my-run")


@pytest.fixture
def client(run_dir: Path) -> Client:
    return Client(run_dir)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run that goes on, and the address of its page."""
    run_dir = make_run(tmp_path_factory.mktemp("runs") / "live-run", note="running")
    server = ViewServer(run_dir)
    yield run_dir, server.url
    server.close()


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
