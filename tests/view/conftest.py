"""Fixtures: a run directory that ended, and a client of the application that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.view.chromium import open_browser
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
