"""A client of the page that needs no server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from async_rl.tools.view.app import make_app
from async_rl.tools.view.runs import Runs


class Client:
    """Asks an application for pages, without a server. A path that begins with a dot is one of the folder's run."""

    def __init__(self, folder: Path) -> None:
        self._app = make_app(Runs(folder))
        self._run = f"/run/{folder.name}"

    def get(self, path: str, host: str = "localhost") -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.get(self._run + path[1:] if path.startswith(".") else path)

        return asyncio.run(ask())
