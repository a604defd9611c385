from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from async_rl.base.network import authorization
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config, with_keys
from tests.kit.engines.replies import recomputed_logprobs, request_for, with_engine
from tests.kit.engines.strangers import answered, status_of
from tests.kit.models import save_sharp_model, sharp_model

pytestmark = pytest.mark.processes


async def post(engine: HFEngine, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        return response.status, json.loads(await response.text())


@pytest.mark.parametrize(
    ("label", "end"), [({"weight_version": "1"}, "/continue_generation"), ({}, "/end_weight_update")]
)
def test_a_push_that_breaks_off_leaves_the_old_version_serving(
    model_folder: Path, tmp_path: Path, label: dict[str, str], end: str
) -> None:
    other = save_sharp_model(tmp_path / "other", seed=9)
    old = sharp_model("tiny-qwen2", 0).eval()

    async def break_off(engine: HFEngine) -> None:
        await post(engine, "/begin_weight_update", {})
        status, _ = await post(engine, "/update_weights_from_disk", {"model_path": str(other), **label})
        assert status == 200
        assert (await post(engine, end, {}))[0] == 200  # without the end, or without a version
        for reply in await engine.generate(request_for(1)):
            assert set(reply.versions.tolist()) == {0}
            expected = recomputed_logprobs(old, request_for(1), reply)
            np.testing.assert_allclose(reply.logprobs, expected, atol=1e-4)

    with_engine(server_config("hf", model_folder), break_off)


def test_a_second_end_of_the_same_push_is_refused(model_folder: Path, tmp_path: Path) -> None:
    other = save_sharp_model(tmp_path / "other", seed=9)

    async def end_twice(engine: HFEngine) -> list[int]:
        await post(engine, "/begin_weight_update", {})
        await post(engine, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "1"})
        responses = await asyncio.gather(*(post(engine, "/end_weight_update", {}) for _ in range(2)))
        assert engine.version == 1
        return sorted(status for status, _ in responses)

    assert with_engine(server_config("hf", model_folder), end_twice) == [200, 400]


@pytest.mark.parametrize("has_keys", [True, False])
def test_strangers_get_no_answer_from_the_engine(model_folder: Path, tmp_path: Path, has_keys: bool) -> None:
    config = server_config("hf", model_folder)
    if has_keys:
        config = with_keys(config, tmp_path / "keys")
    key = authorization(config.network)

    async def ask(engine: HFEngine) -> None:
        resources = engine.endpoints.runner.app.router.routes()  # type: ignore[union-attr]
        routes = {(route.method, route.resource.canonical) for route in resources if route.resource}
        assert ("POST", "/pause_generation") in routes
        if has_keys:
            assert await asyncio.to_thread(answered, engine.url, routes) == set()
        # A page whose name a name server has turned into this host's address, so that a browser sends no Origin.
        rebound = key | {"Host": f"evil.example:{engine.url.rpartition(':')[2]}"}
        statuses = {await asyncio.to_thread(status_of, *_to(engine, route), rebound) for route in routes}
        assert statuses == {403}
        assert await asyncio.to_thread(status_of, "GET", engine.url + "/model_info", key) == 200
        assert len(await engine.generate(request_for(4))) == 4  # nobody has paused it

    with_engine(config, ask)


def _to(engine: HFEngine, route: tuple[str, str]) -> tuple[str, str]:
    return route[0], engine.url + route[1]
