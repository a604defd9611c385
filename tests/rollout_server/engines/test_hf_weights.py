from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from async_rl.base.network import authorization
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config, with_keys
from tests.kit.engines.replies import recomputed_logprobs, request_for, with_engine
from tests.kit.engines.strangers import answered, status_of
from tests.kit.models import save_sharp_model, sharp_model

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"))


async def post(engine: HFEngine, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        return response.status, json.loads(await response.text())


def push_by_gloo(folder: Path, run_dir: Path) -> Callable[[HFEngine], Awaitable[list[float]]]:
    """Push other weights while replies run; return the largest logprob error of each later reply."""

    async def push(engine: HFEngine) -> list[float]:
        publisher = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.kit.engines.hf_publisher", "gloo", engine.url, str(folder),
            str(run_dir), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        assert publisher.stdout is not None
        is_connected = await publisher.stdout.readline()
        running = asyncio.create_task(_keep_generating(engine))
        while is_connected and (await engine.load()).running < 4:
            await asyncio.sleep(0.01)
        _, errors = await publisher.communicate(b"go on\n")
        assert publisher.returncode == 0, errors.decode()
        versions = await running
        assert any(set(v.tolist()) == {0, 3} for v in versions)
        assert all(np.all(np.diff(v) >= 0) for v in versions)
        new = sharp_model("tiny-qwen2", 5).eval()
        replies = await engine.generate(request_for(4))
        assert all(set(c.versions.tolist()) == {3} for c in replies)
        expected = [recomputed_logprobs(new, request_for(4), c) for c in replies]
        return [float(np.abs(c.logprobs - e).max()) for c, e in zip(replies, expected, strict=True)]

    return push


async def _keep_generating(engine: HFEngine) -> list[np.ndarray]:
    """Generate from four callers until replies have only the new version; return all token versions.

    The callers are out of step, so that some replies are always unfinished.
    """

    async def call(caller: int) -> list[np.ndarray]:
        versions: list[np.ndarray] = []
        while not versions or versions[-1][0] == 0:
            request = request_for(caller, n=6, max_tokens=300 - 70 * caller)
            versions += [c.versions for c in await engine.generate(request)]
        return versions

    return [versions for of_one in await asyncio.gather(*map(call, range(4))) for versions in of_one]


def test_the_publisher_updates_a_generating_engine(folder: Path, tmp_path: Path) -> None:
    assert max(with_engine(server_config("hf", folder), push_by_gloo(folder, tmp_path))) < 1e-4


@pytest.mark.parametrize(
    ("label", "end"), [({"weight_version": "1"}, "/continue_generation"), ({}, "/end_weight_update")]
)
def test_a_push_that_breaks_off_leaves_the_old_version_serving(
    folder: Path, tmp_path: Path, label: dict[str, str], end: str
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

    with_engine(server_config("hf", folder), break_off)


def test_refusals_have_status_400_and_the_reason(folder: Path, tmp_path: Path) -> None:
    def saved(name: str, tensor: torch.Tensor) -> str:
        (tmp_path / name).mkdir()
        save_file({"model.norm.weight": tensor}, tmp_path / name / "a.safetensors")
        return str(tmp_path / name)

    partial, wrong = saved("partial", torch.ones(96)), saved("wrong", torch.ones(95))
    narrow = saved("narrow", torch.ones(96, dtype=torch.bfloat16))
    load = "/update_weights_from_disk"

    async def refused(engine: HFEngine) -> None:
        for path, body, status, named in (
            (load, {"model_path": partial}, 400, "/begin_weight_update"),
            ("/pause_generation", {"mode": "stop"}, 400, "'stop'"),
            ("/begin_weight_update", {}, 200, ""),
            (load, {"model_path": wrong}, 400, "[95]"), (load, {"model_path": narrow}, 400, "bfloat16"),
            (load, {"model_path": str(tmp_path)}, 400, str(tmp_path)),
            (load, {"model_path": partial, "weight_version": "1"}, 200, ""),
            ("/end_weight_update", {}, 400, "lacks"),
        ):  # fmt: skip
            got, response = await post(engine, path, body)
            assert got == status and named in response["message"], (path, body, response)

    with_engine(server_config("hf", folder), refused)


def test_a_second_end_of_the_same_push_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_sharp_model(tmp_path / "other", seed=9)

    async def end_twice(engine: HFEngine) -> list[int]:
        await post(engine, "/begin_weight_update", {})
        await post(engine, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "1"})
        responses = await asyncio.gather(*(post(engine, "/end_weight_update", {}) for _ in range(2)))
        assert engine.version == 1
        return sorted(status for status, _ in responses)

    assert with_engine(server_config("hf", folder), end_twice) == [200, 400]


@pytest.mark.parametrize("has_keys", [True, False])
def test_strangers_get_no_answer_from_the_engine(folder: Path, tmp_path: Path, has_keys: bool) -> None:
    config = server_config("hf", folder)
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
