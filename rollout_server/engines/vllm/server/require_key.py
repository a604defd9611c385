"""Middleware of the vLLM server that refuses every request without the API key; vLLM's own guards some paths only."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

API_KEY_VARIABLE = "ASYNC_RL_SERVER_KEY"
"""The environment variable with the server's API key, which on the command line every user of the host could read."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """An ASGI application in front of vLLM's: it replies 401 unless the request has `Authorization: Bearer <key>`."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[API_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"wrong API key"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)
