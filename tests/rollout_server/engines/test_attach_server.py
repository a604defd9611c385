"""Tests of attaching to a running server, with a stand-in for it; tests/e2e/test_policies.py attaches to SGLang."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from async_rl.base.config import Config, WeightSyncConfig
from async_rl.base.errors import ConfigError
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.sglang.engine import attach_server
from tests.kit.configs import changed, make_config
from tests.kit.tiny_moe import save_moe

CONFIG = make_config()


async def attach(
    config: Config, says: dict[str, Any], asked: list[str] | None = None, support_ids: int = 0
) -> None:
    """Attach to a server that answers /server_info with `says`; the paths of all requests are added to `asked`."""

    async def reply(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        return web.json_response({"/server_info": says, "/model_info": {"weight_version": "0"}}.get(request.path, {}))

    app = web.Application()
    app.router.add_route("*", "/{path}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        admin = HttpAdmin(config, f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.to_thread(attach_server, admin, config, support_ids)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("says", [{}, {"disable_overlap_schedule": False}])
def test_a_server_that_would_tag_tokens_with_wrong_versions_is_refused(says: dict[str, Any]) -> None:
    asked: list[str] = []
    with pytest.raises(ConfigError, match="--disable-overlap-schedule"):
        asyncio.run(attach(CONFIG, says, asked))
    assert asked == ["/server_info"], "the server must be left alone"
    retracting = dataclasses.replace(CONFIG, weight_sync=WeightSyncConfig(on_update="retract"))
    asyncio.run(attach(retracting, says))
    asyncio.run(attach(CONFIG, {"disable_overlap_schedule": True}))


def test_a_server_that_does_not_record_the_experts_of_a_mixture_is_refused(tmp_path: Path) -> None:
    config = make_config(save_moe(tmp_path))
    says = {"disable_overlap_schedule": True}
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        asyncio.run(attach(config, says))
    recording = says | {"enable_return_routed_experts": True}
    asyncio.run(attach(config, recording))
    with pytest.raises(ConfigError, match="retract"):
        asyncio.run(attach(changed(config, weight_sync={"on_update": "retract"}), recording))
    ignoring = changed(config, rollout={"routing": "ignore"}, weight_sync={"on_update": "retract"})
    asyncio.run(attach(ignoring, says))


def test_a_server_that_gives_too_few_ids_of_a_support_is_refused() -> None:
    says: dict[str, Any] = {"disable_overlap_schedule": True}
    for most, hint in ((None, "support: ignore."), (99, "rollout.top_k: 99")):
        known = says if most is None else says | {"sampling_mask_max_tokens": most}
        asked: list[str] = []
        with pytest.raises(ConfigError, match=f"server_urls.*--sampling-mask-max-tokens 100 .*{hint}"):
            asyncio.run(attach(CONFIG, known, asked, support_ids=100))
        assert set(asked) == {"/server_info"}, "the server must be left alone"
        asyncio.run(attach(CONFIG, known))  # a run without supports needs none
    asyncio.run(attach(CONFIG, says | {"sampling_mask_max_tokens": 100}, support_ids=100))
