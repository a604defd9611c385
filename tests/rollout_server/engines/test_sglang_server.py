"""A real SGLang server where no other is like it: a run may attach, a primer comes first, garbage is frozen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from async_rl.run.before_start.gpus import plan_memory
from learner.memory.sizes import GIB
from rollout_server.engines.base import open_engine
from tests.kit.configs import changed, server_config
from tests.kit.engines.pushes import MODELS, push, pushing
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.servers import SGLangServer
from tests.kit.models import load_model

pytestmark = pytest.mark.e2e


def test_a_run_that_attaches_gets_its_own_model_at_version_0(sglang_server: SGLangServer, model_folder: Path) -> None:
    request = request_for(0)
    (replies,) = generate(sglang_server, request)
    assert {v for a in replies for v in a.versions.tolist()} == {0}
    assert largest_error(load_model(model_folder), [request], [replies]) < TOLERANCE


def test_a_request_without_a_priority_leaves_the_server_alive(sglang_server: SGLangServer) -> None:
    """SGLang's own warm-up is such a request, which it leaves out on a CPU."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    for _ in range(2):
        sglang_server.admin.ask("POST", "/generate", body)


@pytest.mark.parametrize(
    "on_update", ["retract", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("drain", "abort"))]
)
def test_a_push_between_a_prompt_and_its_answers_leaves_no_kv_of_old_weights(
    sglang_server: SGLangServer, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = sglang_server, sglang_server.engine.url
    config = pushing(server, tmp_path, on_update, "disk")
    request = request_for(9, n=4, max_tokens=20, temperature=0.3)
    first, post = push(config, url), server.engine.post

    async def post_and_push(path: str, body: dict[str, Any], *rest: Any) -> Any:
        responses = await post(path, body, *rest)
        if body["sampling_params"][0]["max_new_tokens"] == 0:  # the prompt's KV is computed, no reply has begun
            await asyncio.to_thread(push, config, url)
        return responses

    monkeypatch.setattr(server.engine, "post", post_and_push)
    (replies,) = generate(server, request)
    assert {v for a in replies for v in a.versions.tolist()} == {first + 1}
    assert largest_error(MODELS[first + 1], [request], [replies]) < TOLERANCE


@pytest.mark.nightly
def test_the_kv_cache_of_a_server_takes_what_the_plan_says(sglang_server: SGLangServer) -> None:
    plan = plan_memory(sglang_server.config, 0, 64 * GIB)
    (state,) = sglang_server.admin.server_info()["internal_states"]
    held = state["memory_usage"]
    assert held["token_capacity"] == pytest.approx(plan.kv_tokens, rel=0.02)  # a few more for each answer
    assert held["kvcache"] * GIB == pytest.approx(plan.kv_tokens * plan.kv_token, rel=0.15)
    loaded = load_model(plan.config.model.path)
    assert plan.weights == sum(parameter.nbytes for parameter in loaded.parameters())


@pytest.mark.nightly
def test_two_servers_of_a_run_sample_independently_for_different_prompts(tiny_model: Path, tmp_path: Path) -> None:
    """Of an untrained model's tokens some 1 % are equal by chance; of two servers with one seed 86 % were."""
    config = changed(server_config("sglang", tiny_model), placement={"rollout": {"servers": 2}})

    async def sample(server: int) -> list[list[int]]:
        engine = open_engine(config, server, tmp_path)
        await engine.start()
        requests = [request_for(6 * server + number, n=8, max_tokens=24) for number in range(6)]
        groups = [await engine.generate(request) for request in requests]
        await engine.aclose()
        return [reply.tokens.tolist() for group in groups for reply in group]

    async def both() -> list[list[list[int]]]:
        return [await sample(server) for server in (0, 1)]

    pairs = [pair for replies in zip(*asyncio.run(both()), strict=True) for pair in zip(*replies, strict=False)]
    assert len(pairs) > 500
    assert sum(a == b for a, b in pairs) / len(pairs) < 0.03
