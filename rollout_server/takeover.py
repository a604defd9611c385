"""Taking over a running SGLang server: nothing of the run before it may be left in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from async_rl.config import Config, Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError

FLUSH_INTERVAL_S = 0.1


async def take_over(session: aiohttp.ClientSession, url: str, config: Config) -> None:
    """Returns once the server runs nothing, holds the weights of model.path as version 0, and has an empty cache.

    Raises:
        WeightSyncError: the server can't be reached, or refuses.
        WaitTimeoutError: it did not answer, or end its requests, within `timeouts.push_s`.
    """
    weights = {"model_path": str(Path(config.model.path).resolve()), "weight_version": "0", "flush_cache": False}
    limit = config.timeouts.limit("push_s")
    for path, body in (
        ("/continue_generation", {}),  # it may have been left in a push
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_disk", weights),
        ("/end_weight_update", {}),
        ("/continue_generation", {}),
    ):
        await _post(session, url, path, body, limit)
    try:
        async with asyncio.timeout(limit.seconds):
            while not await _flushed(session, url):
                await asyncio.sleep(FLUSH_INTERVAL_S)  # refused while an aborted request is still being ended
    except TimeoutError:
        raise WaitTimeoutError(f"the run waited {limit} for the server at {url} to end its requests") from None
    async with session.get(f"{url}/model_info") as reply:
        version = (await reply.json()).get("weight_version")
    if str(version) != "0":
        raise WeightSyncError(f"the server at {url} must serve weight version 0 after its reset, got {version!r}")


async def _post(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any], limit: Limit) -> None:
    try:
        async with session.post(url + path, json=body, timeout=aiohttp.ClientTimeout(total=limit.seconds)) as reply:
            text = await reply.text()
            if reply.status != 200 or '"success":false' in text.replace(" ", ""):
                raise WeightSyncError(f"{url}{path} refused (HTTP {reply.status}): {text[:300]}")
    except TimeoutError:
        raise WaitTimeoutError(f"the run waited {limit} for {url}{path} to take over rollout.server_url") from None
    except aiohttp.ClientError as error:
        raise WeightSyncError(
            f"rollout.server_url {url} can't be taken over: {path}: {error!r}. Is an SGLang server running there?"
        ) from error


async def _flushed(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.post(f"{url}/flush_cache") as reply:
        return reply.status == 200
