"""A client of the page of a run that needs no server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import httpx

from async_rl.view.app import make_app
from async_rl.view.library import Library


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
