"""Taking over a running SGLang server: nothing of the run before it may be left in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from async_rl.config import Config, Limit
from async_rl.config.check import check
from async_rl.errors import WaitTimeoutError, WeightSyncError

FLUSH_INTERVAL_S = 0.1


async def take_over(session: aiohttp.ClientSession, url: str, config: Config) -> None:
    """Returns once the server runs nothing, holds the weights of model.path as version 0, and has an empty cache.

    Raises:
        ConfigError: it would tag tokens with wrong versions.
        WeightSyncError: the server can't be reached, or refuses.
        WaitTimeoutError: it did not answer, or end its requests, within `timeouts.push_s`.
    """
    weights = {"model_path": str(Path(config.model.path).resolve()), "weight_version": "0", "flush_cache": False}
    limit = config.timeouts.limit("push_s")
    is_disabled = (await _ask(session, url, "/server_info", limit)).get("disable_overlap_schedule")
    check(
        is_disabled is True or config.weight_sync.on_update != "in_place", "rollout.server_url", url,
        "a server with --disable-overlap-schedule for weight_sync.on_update in_place",
        "Else it tags tokens with versions that did not sample them. Or set weight_sync.on_update: retract.",
    )
    for path, body in (
        ("/continue_generation", {}),  # it may have been left in a push
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_disk", weights),
        ("/end_weight_update", {}),
        ("/continue_generation", {}),
    ):
        await _ask(session, url, path, limit, body)
    try:
        async with asyncio.timeout(limit.seconds):
            while not await _flushed(session, url):
                await asyncio.sleep(FLUSH_INTERVAL_S)  # refused while an aborted request is still being ended
    except TimeoutError:
        raise WaitTimeoutError(f"the run waited {limit} for the server at {url} to end its requests") from None
    version = (await _ask(session, url, "/model_info", limit)).get("weight_version")
    if str(version) != "0":
        raise WeightSyncError(f"the server at {url} must serve weight version 0 after its reset, got {version!r}")


async def _ask(
    session: aiohttp.ClientSession, url: str, path: str, limit: Limit, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """POSTs `body`, or GETs without; what the server says in JSON, if it does."""
    method, timeout = "GET" if body is None else "POST", aiohttp.ClientTimeout(total=limit.seconds)
    try:
        async with session.request(method, url + path, json=body, timeout=timeout) as reply:
            text = await reply.text()
            if reply.status != 200 or '"success":false' in text.replace(" ", ""):
                raise WeightSyncError(f"{url}{path} refused (HTTP {reply.status}): {text[:300]}")
    except TimeoutError:
        raise WaitTimeoutError(f"the run waited {limit} for {url}{path} to take over rollout.server_url") from None
    except aiohttp.ClientError as error:
        raise _unreachable(url, path, error) from error
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


async def _flushed(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.post(f"{url}/flush_cache") as reply:
            return reply.status == 200
    except aiohttp.ClientError as error:
        raise _unreachable(url, "/flush_cache", error) from error


def _unreachable(url: str, path: str, error: aiohttp.ClientError) -> WeightSyncError:
    return WeightSyncError(
        f"rollout.server_url {url} can't be taken over: {path}: {error!r}. Is an SGLang server running there?"
    )
