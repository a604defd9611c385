"""The priorities of requests at the engines with a server, which a small server stands in for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from async_rl.base.config import Config
from rollout_server.engines.base import Purpose
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.vllm.admin import VLLMAdmin
from rollout_server.engines.vllm.engine import VLLMEngine
from tests.kit.configs import make_config
from tests.kit.engines.replies import request_for

SPANS = [{"version": "9", "start": 0, "end": 1}]


async def answered(request: web.Request) -> web.Response:
    """As SGLang and vLLM answer requests for one token, and for the logprobs of a prompt."""
    body = await request.json()
    request.app["priorities"].append(body["priority"])
    if "token_ids" in body:
        choice = {
            "token_ids": [7], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.5}]},
            "weight_versions": SPANS,
        }
        choices = [choice] * body["sampling_params"].get("n", 1)
        return web.json_response({"choices": choices, "prompt_logprobs": [None, {"8": {"logprob": -1.5}}]})
    meta = {
        "finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.5, 7, None]], "weight_versions": SPANS,
        "input_token_logprobs": [[None, 7], [-1.5, 8]],
    }
    whole = {"output_ids": [7], "meta_info": meta}
    return web.json_response([whole] * len(body["rid"]) if "rid" in body else whole)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_baselines_queue_with_their_groups_evaluations_behind_and_probes_before_all(
    name: str, tmp_path: Path
) -> None:
    asked = (
        (Purpose.TRAINING, 7), (Purpose.TRAINING, 6), (Purpose.BASELINE, 6), (Purpose.EVALUATION, 0),
        (Purpose.TRAINING, 8), (Purpose.EVALUATION, 0),
    )  # fmt: skip

    async def priorities(config: Config) -> list[int]:
        app = web.Application()
        app["priorities"] = []
        found: list[int] = []
        app.router.add_post("/{path:.*}", answered)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = (SGLangEngine if name == "sglang" else VLLMEngine)(config, 0, tmp_path)
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine.vocab_size, engine.end_tokens, engine.forbidden = 200, [2], []  # type: ignore[union-attr]
        admin: Any = (HttpAdmin if name == "sglang" else VLLMAdmin)(config, engine.url)
        try:
            async with aiohttp.ClientSession() as engine.session:
                for purpose, version in asked:
                    await engine.generate(request_for(1, n=1, max_tokens=1, purpose=purpose, start_version=version))
                    found.append(app["priorities"][-1])
            assert await asyncio.to_thread(admin.score_tokens, [7, 8]) == [-1.5]
            return [*found, app["priorities"][-1]]
        finally:
            await runner.cleanup()

    *found, probe = asyncio.run(priorities(make_config(rollout={"engine": name})))
    assert found == [7, 6, 6, 8, 8, 9] and probe < 0
