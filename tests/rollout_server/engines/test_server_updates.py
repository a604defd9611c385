"""Answers of a real SGLang server when weights change while they run, and when their caller is cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config import Config, PlacementConfig, WeightSyncConfig
from async_rl.seams.engines import UPDATE_POLICIES
from async_rl.weights import open_publisher
from async_rl.weights.base import Tolerance
from rollout_server.engines.base import SampledReply
from rollout_server.engines.sglang.admin import SGLangAdmin
from tests.kit.configs import changed, server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.pushes import update_in_place
from tests.kit.engines.tags import check_tags
from tests.kit.engines.turns import OBSERVED, error_from_scratch, next_turn, play_over_pushes
from tests.kit.learner.exported import train_and_export
from tests.kit.models import load_model, sharp_model

pytestmark = pytest.mark.e2e

TEMPERATURE = 0.3
"""Low, so that replies rarely end early."""
VERSIONS = itertools.count(10)
MODELS: dict[int, PreTrainedModel] = {}
"""The weights that the server was given, by version."""


def push(config: Config, url: str) -> int:
    """Make the server serve a new version, very different from all others, and return its number.

    If learner and server take turns, the learner has its turn before.
    """
    version = next(VERSIONS)
    model = MODELS[version] = sharp_model("tiny-qwen2", 100 + version).eval()
    publisher = open_publisher(config, [url], 0, torch.device("cpu"))
    publisher.connect()
    if config.shares_gpus:
        publisher.release_server_memory()
    publisher.push(model.named_parameters(), version)
    tokens = list(range(5, 30))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], dim=-1)
    publisher.verify(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])], Tolerance(1e-3, 1e-3))
    publisher.close()
    return version


def pushing_over_disk(server: EngineInThread, on_update: str, folder: Path) -> Config:
    return changed(
        server.config, run={"dir": folder},
        weight_sync=WeightSyncConfig(on_update=on_update, transport="disk", bucket_bytes=100_000),
    )


@pytest.mark.parametrize("on_update", UPDATE_POLICIES)
def test_every_token_has_the_logprob_of_its_version_and_of_no_other(
    sglang_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `drain` only replies of an evaluation can be running while weights change."""
    server, url = sglang_server, sglang_server.engine.url
    config = pushing_over_disk(server, on_update, tmp_path)
    monkeypatch.setattr(server.engine, "_resubmits", on_update == "abort")
    request = request_for(6, n=16, max_tokens=300, temperature=TEMPERATURE)
    first = push(config, url)

    async def generate_over_two_updates() -> list[SampledReply]:
        running = asyncio.create_task(server.engine.generate(request))
        for _ in range(2):
            for _ in range(3 if on_update == "abort" else 1):  # the group runs then, after an abort anew
                await server.engine.generate(request_for(7))
            await asyncio.to_thread(push, config, url)
        return await running

    replies = server.run(generate_over_two_updates())
    models = {version: MODELS[version] for version in range(first, first + 3)}
    spanning = [a for a in replies if len(set(a.versions.tolist())) == 3]
    assert len(spanning) >= 2
    assert all((np.diff(a.versions) >= 0).all() for a in replies)
    keeps_kv = on_update == "in_place"
    mismatches = [
        check_tags(models, request.prompt.tokens, a, TEMPERATURE, keeps_kv=keeps_kv) for a in spanning[:4]
    ]
    assert (max(mismatches) > 0.01) == keeps_kv  # by a recompute from scratch

    # The same prompt in another group: its KV cache must be of the newest version too.
    (last,) = generate(server, dataclasses.replace(request, group_id=100))
    assert {v for a in last for v in a.versions.tolist()} == {first + 2}
    for reply in last:
        check_tags(models, request.prompt.tokens, reply, TEMPERATURE, keeps_kv=False)


@pytest.mark.parametrize("on_update", ["retract", "drain", "abort"])
def test_a_push_between_a_prompt_and_its_answers_leaves_no_kv_of_old_weights(
    sglang_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = sglang_server, sglang_server.engine.url
    config = pushing_over_disk(server, on_update, tmp_path)
    request = request_for(9, n=4, max_tokens=20, temperature=TEMPERATURE)
    first, post = push(config, url), server.engine._post

    async def post_and_push(path: str, body: dict[str, Any], *rest: Any) -> Any:
        responses = await post(path, body, *rest)
        if body["sampling_params"][0]["max_new_tokens"] == 0:  # the prompt's KV is computed, no reply has begun
            await asyncio.to_thread(push, config, url)
        return responses

    monkeypatch.setattr(server.engine, "_post", post_and_push)
    (replies,) = generate(server, request)
    assert {v for a in replies for v in a.versions.tolist()} == {first + 1}
    assert largest_error(MODELS[first + 1], [request], [replies]) < TOLERANCE


def recorded_cached_tokens(server: EngineInThread, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which each later request for one reply appends the tokens whose KV was in the prefix cache."""
    cached: list[int] = []
    post = server.engine._post

    async def post_and_record(path: str, body: dict[str, Any], *rest: Any) -> Any:
        responses = await post(path, body, *rest)
        cached.append(responses[0]["meta_info"].get("cached_tokens", 0))  # not in the response to an aborted request
        return responses

    monkeypatch.setattr(server.engine, "_post", post_and_record)
    return cached


@pytest.mark.parametrize("on_update", UPDATE_POLICIES)
def test_a_turn_reuses_the_kv_of_its_history_until_a_push_drops_it(
    sglang_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = sglang_server, sglang_server.engine.url
    config = pushing_over_disk(server, on_update, tmp_path)
    group_id = 3000 + UPDATE_POLICIES.index(on_update)
    first = request_for(3, n=1, max_tokens=20, temperature=TEMPERATURE, group_id=group_id)
    push(config, url)
    cached = recorded_cached_tokens(server, monkeypatch)
    ((said,),) = generate(server, first)
    second = next_turn(first, said)
    ((added,),) = generate(server, second)
    push(config, url)
    third = next_turn(second, added)
    ((last,),) = generate(server, third)
    keeps_kv = on_update == "in_place"
    histories = [len(turn.prompt.tokens) - len(OBSERVED) - 1 for turn in (second, third)]  # all but the last token
    assert cached == [0, histories[0], histories[1] if keeps_kv else 0]
    assert error_from_scratch(MODELS, first, said) < TOLERANCE
    assert error_from_scratch(MODELS, second, added) < TOLERANCE
    error = error_from_scratch(MODELS, third, last)
    assert error > 100 * TOLERANCE if keeps_kv else error < TOLERANCE


@pytest.mark.parametrize("on_update", ["retract", "drain", "abort"])
def test_no_turn_that_meets_a_push_reads_kv_of_older_weights(
    sglang_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `drain` only turns of an evaluation can be running while weights change."""
    server, url = sglang_server, sglang_server.engine.url
    config = pushing_over_disk(server, on_update, tmp_path)
    monkeypatch.setattr(server.engine, "_resubmits", on_update == "abort")
    first = push(config, url)
    cached = recorded_cached_tokens(server, monkeypatch)
    played = server.run(play_over_pushes(server.engine, lambda: push(config, url), pushes=5))
    assert sum(cached) > 0
    assert {v for _, reply in played for v in reply.versions.tolist()} >= set(range(first, first + 6))
    assert max(error_from_scratch(MODELS, request, reply) for request, reply in played) < TOLERANCE


@pytest.mark.parametrize("colocated", [False, True])
def test_weights_in_shared_memory_arrive_whole_while_answers_run(
    sglang_server: EngineInThread, colocated: bool
) -> None:
    """The code path of cuda_ipc with host memory. This server releases no memory, but checks that nothing runs then."""
    server, url = sglang_server, sglang_server.engine.url
    config = dataclasses.replace(
        server.config, weight_sync=WeightSyncConfig(transport="cuda_ipc", bucket_bytes=100_000),
        placement=PlacementConfig(colocated=colocated),
    )
    assert config.shares_gpus == colocated
    request = request_for(8, n=8, max_tokens=300, temperature=TEMPERATURE)
    first = push(config, url)

    async def generate_over_an_update() -> list[SampledReply]:
        running = asyncio.create_task(server.engine.generate(request))
        await server.engine.generate(request_for(7))  # the group runs once this is answered
        await asyncio.to_thread(push, config, url)
        return await running

    replies = server.run(generate_over_an_update())
    models = {version: MODELS[version] for version in (first, first + 1)}
    spanning = [a for a in replies if len(set(a.versions.tolist())) == 2]
    assert len(spanning) >= 2
    for reply in spanning[:4]:
        check_tags(models, request.prompt.tokens, reply, TEMPERATURE, keeps_kv=not colocated)


def test_an_exported_checkpoint_is_served_with_the_logprobs_of_transformers(
    sglang_server: EngineInThread, model_folder: Path, tmp_path: Path, one_rank: None
) -> None:
    train_and_export(model_folder, tmp_path, rank=2)
    update_in_place(sglang_server, tmp_path / "out", next(VERSIONS))
    check_logprobs(sglang_server, tmp_path / "out", model_folder)


@pytest.mark.nightly
def test_a_server_starts_from_an_exported_checkpoint(model_folder: Path, tmp_path: Path, one_rank: None) -> None:
    train_and_export(model_folder, tmp_path, rank=0)
    server = EngineInThread(server_config("sglang", tmp_path / "out"), tmp_path)
    server.run(server.engine.start())
    try:
        check_logprobs(server, tmp_path / "out", model_folder)
    finally:
        server.close()


def check_logprobs(server: EngineInThread, exported: Path, before: Path) -> None:
    groups = [request_for(i, max_tokens=10) for i in range(4)]
    replies = generate(server, *groups)
    assert largest_error(load_model(exported), groups, replies) < TOLERANCE
    assert largest_error(load_model(before), groups, replies) > 10 * TOLERANCE  # training has changed the weights


def test_a_cancelled_group_ends_on_the_server_and_no_other_does(sglang_server: EngineInThread) -> None:
    engine = sglang_server.engine
    admin = SGLangAdmin(sglang_server.config, engine.url)

    def unfinished() -> int:
        loads = admin.ask("GET", "/v1/loads")["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def cancel_one() -> list[SampledReply]:
        kept, cancelled = (asyncio.create_task(engine.generate(request_for(i, n=9, max_tokens=400))) for i in (0, 1))
        while await asyncio.to_thread(unfinished) <= 9:
            assert not (kept.done() or cancelled.done())
        # From now on nothing ends by itself.
        await asyncio.to_thread(admin.ask, "POST", "/pause_generation", {"mode": "retract"})
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await engine._cancelled.join()
        await asyncio.to_thread(admin.resume)
        while await asyncio.to_thread(unfinished) > 9:  # it updates its counts with the first tokens after the pause
            assert not kept.done()
        return await kept

    assert len(sglang_server.run(cancel_one())) == 9


def test_a_paused_server_uses_almost_no_cpu(sglang_server: EngineInThread) -> None:
    admin = SGLangAdmin(sglang_server.config, sglang_server.engine.url)
    served_on = int(admin.url.rpartition(":")[2])
    server = next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == served_on and c.status == "LISTEN")
    processes = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]

    def cpu_s() -> float:
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)

    admin.pause("in_place")
    before_s = cpu_s()
    time.sleep(1.0)
    assert cpu_s() - before_s < 0.5  # a scheduler that polls for messages uses a whole core
    admin.resume()
