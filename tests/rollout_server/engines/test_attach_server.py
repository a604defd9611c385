"""Taking over a server by what it says of itself; tests/e2e/test_sweep.py does so with SGLang."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from async_rl.config import Config, ModelConfig, TaskConfig, TimeoutsConfig, WeightSyncConfig
from async_rl.errors import ConfigError, WaitTimeoutError
from rollout_server.engines.sglang.attach_server import take_over

CONFIG = Config(model=ModelConfig(path="m"), task=TaskConfig(name="reasoning_gym/chain_sum"))


async def taken_over(config: Config, says: dict[str, Any], asked: list[str] | None = None) -> None:
    """A server of which /server_info is `says`; `asked` gets what it was asked for."""

    async def answer(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        return web.json_response({"/server_info": says, "/model_info": {"weight_version": "0"}}.get(request.path, {}))

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            await take_over(session, f"http://127.0.0.1:{runner.addresses[0][1]}", config)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("says", [{}, {"disable_overlap_schedule": False}])
def test_a_server_that_would_tag_tokens_wrongly_is_refused(says: dict[str, Any]) -> None:
    asked: list[str] = []
    with pytest.raises(ConfigError, match="a server with --disable-overlap-schedule for weight_sync"):
        asyncio.run(taken_over(CONFIG, says, asked))
    assert asked == ["/server_info"], "whatever it does goes on"
    retracting = dataclasses.replace(CONFIG, weight_sync=WeightSyncConfig(on_update="retract"))
    asyncio.run(taken_over(retracting, says))
    asyncio.run(taken_over(CONFIG, {"disable_overlap_schedule": True}))


def test_a_server_that_does_not_answer_is_not_taken_over_and_the_key_of_the_wait_is_named() -> None:
    config = dataclasses.replace(CONFIG, timeouts=TimeoutsConfig(push_s=0.2))

    async def try_it(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            await take_over(session, url, config)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        message = rf"waited 0 s \(timeouts\.push_s\) for {url}/server_info"
        with pytest.raises(WaitTimeoutError, match=message):
            asyncio.run(try_it(url))
