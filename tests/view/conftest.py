"""Fixtures: a run directory that ended, and a client of the application that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from async_rl.view.app import make_app
from async_rl.view.library import Library
from tests.view.chromium import open_browser
from tests.view.factories import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Client:
    """Asks an application for pages, without a server."""

    def __init__(self, folder: Path, is_loopback: bool = True, names: Collection[str] = ()) -> None:
        self._app = make_app(Library(folder), is_loopback, names)

    def get(self, path: str, host: str = "localhost", raises: bool = True) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=raises)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.get(path)

        return asyncio.run(ask())


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
