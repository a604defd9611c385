"""Server-sent events: tells a page which files of a run or a sweep have changed, so that it asks for what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

LOOK_EVERY_S = 0.5
HEARTBEAT_S = 10.0
"""A comment is sent at least this often, so that a connection that ended is noticed."""
RETRY_MS = 1000


def event_stream(request: Request, revision: Callable[[], Mapping[str, str]]) -> StreamingResponse:
    """Return a stream with an event whenever a text that `revision` returns has changed, until the page is left.

    It ends with the server too. An event's data is a JSON list of the keys whose text changed, at first of all keys.
    """
    return StreamingResponse(
        _events(request, revision), media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )  # fmt: skip


async def _events(request: Request, revision: Callable[[], Mapping[str, str]]) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    seen: Mapping[str, str] = {}
    silent_s = 0.0
    while not request.app.state.is_ending() and not await request.is_disconnected():
        now = await run_in_threadpool(revision)
        changed = [key for key, value in now.items() if seen.get(key) != value]
        seen = now
        if changed:
            yield f"event: change\ndata: {json.dumps(changed)}\n\n"
            silent_s = 0.0
        elif silent_s >= HEARTBEAT_S:
            yield ": still here\n\n"
            silent_s = 0.0
        await asyncio.sleep(LOOK_EVERY_S)
        silent_s += LOOK_EVERY_S
