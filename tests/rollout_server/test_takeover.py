from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from async_rl.config import Config, ModelConfig, TaskConfig, TimeoutsConfig
from async_rl.errors import WaitTimeoutError
from rollout_server.takeover import take_over


def test_a_server_that_does_not_answer_is_not_taken_over_and_the_key_of_the_wait_is_named() -> None:
    config = Config(
        model=ModelConfig(path="none"), task=TaskConfig(name="reasoning_gym/chain_sum"),
        timeouts=TimeoutsConfig(push_s=0.2),
    )

    async def try_it(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            await take_over(session, url, config)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        message = rf"waited 0 s \(timeouts\.push_s\) for {url}/continue_generation"
        with pytest.raises(WaitTimeoutError, match=message):
            asyncio.run(try_it(url))
