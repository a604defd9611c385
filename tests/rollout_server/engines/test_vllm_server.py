"""Answers of a real vLLM server when weights change while they run, and updates that it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.errors import WeightSyncError
from async_rl.seams.engines import UPDATE_POLICIES
from async_rl.weights import open_publisher
from rollout_server.engines.base import SampledReply
from rollout_server.engines.vllm.admin import VLLMAdmin
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.tags import check_tags
from tests.kit.engines.turns import OBSERVED, error_from_scratch, next_turn, play_over_pushes
from tests.kit.engines.vllm import MODELS, VERSIONS, connected, new_version, push, pushing
from tests.kit.models import sharp_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]

TEMPERATURE = 0.3
"""Low, so that replies rarely end early."""
WAYS = [
    *((on_update, "gloo") for on_update in ("in_place", "retract", "drain", "abort")), ("in_place", "disk"),
]


@pytest.mark.parametrize(("on_update", "transport"), WAYS)
def test_every_token_has_the_logprob_of_its_version_and_of_no_other(
    vllm_server: EngineInThread, on_update: str, transport: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `drain` only replies of an evaluation can be running while weights change."""
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, on_update, transport)
    monkeypatch.setattr(server.engine, "_resubmits", on_update == "abort")
    monkeypatch.setattr(server.engine, "_end_tokens", [])  # some models would end all replies before the second push
    request = request_for(6, n=16, max_tokens=900, temperature=TEMPERATURE)
    first = push(config, url)
    # Both updates are made and the connection is open before the replies begin, which are soon at their end.
    publisher, updates = connected(config, url), [new_version(), new_version()]

    async def generate_over_two_updates() -> list[SampledReply]:
        group = asyncio.create_task(server.engine.generate(request))
        for version in updates:
            async with asyncio.timeout(30):  # until the group runs, after an abort anew
                while not group.done() and ((load := await server.engine.load()) is None or load.running < request.n):
                    await asyncio.sleep(0.02)
            assert not group.done(), f"it ended before it was updated twice: {group}"
            for _ in range(3 if on_update == "abort" else 1):
                await server.engine.generate(request_for(7))
            await asyncio.to_thread(publisher.push, MODELS[version].named_parameters(), version)
        return await group

    replies = server.run(generate_over_two_updates())
    publisher.close()
    models = {version: MODELS[version] for version in range(first, first + 3)}
    spanning = [a for a in replies if len(set(a.versions.tolist())) == 3]
    assert len(spanning) >= 2
    assert all((np.diff(a.versions) >= 0).all() for a in replies)
    keeps_kv = on_update == "in_place"
    mismatches = [check_tags(models, request.prompt.tokens, a, TEMPERATURE, keeps_kv=keeps_kv) for a in spanning[:4]]
    assert (max(mismatches) > 0.01) == keeps_kv  # by a recompute from scratch

    # The same prompt in another group: its KV cache must be of the newest version too.
    (last,) = generate(server, dataclasses.replace(request, group_id=100))
    assert {v for a in last for v in a.versions.tolist()} == {first + 2}
    for reply in last:
        check_tags(models, request.prompt.tokens, reply, TEMPERATURE, keeps_kv=False)


@pytest.mark.parametrize("on_update", UPDATE_POLICIES)
def test_a_turn_reuses_the_kv_of_its_history_until_a_push_drops_it(
    vllm_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, on_update, "disk")
    monkeypatch.setattr(server.engine, "_end_tokens", [])

    def cached_tokens() -> int:
        """The tokens so far whose KV was found in the prefix cache."""
        lines = (server.run(server.engine._get_text("/metrics")) or "").splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    request = request_for(3, n=1, max_tokens=60, temperature=TEMPERATURE, group_id=3000 + next(VERSIONS))
    push(config, url)
    found, errors, lengths = [cached_tokens()], [], []
    for is_last in (False, False, True):
        if is_last:
            push(config, url)
            found[-1] = cached_tokens()
        ((reply,),) = generate(server, request)
        found.append(cached_tokens())
        errors.append(error_from_scratch(MODELS, request, reply))
        request = next_turn(request, reply)
        lengths.append(len(request.prompt.tokens) - len(OBSERVED) - 1)  # the KV of the last token was never needed
    keeps_kv = on_update == "in_place"
    blocks = [length // 32 * 32 for length in lengths]
    assert np.diff(found).tolist() == [0, blocks[0], blocks[1] if keeps_kv else 0]
    assert max(errors[:2]) < TOLERANCE
    assert errors[2] > 100 * TOLERANCE if keeps_kv else errors[2] < TOLERANCE


@pytest.mark.parametrize("on_update", ["retract", "drain", "abort"])
def test_no_turn_that_meets_a_push_reads_kv_of_older_weights(
    vllm_server: EngineInThread, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `drain` only turns of an evaluation can be running while weights change."""
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, on_update, "disk")
    monkeypatch.setattr(server.engine, "_resubmits", on_update == "abort")
    first = push(config, url)
    played = server.run(play_over_pushes(server.engine, lambda: push(config, url), pushes=5))
    assert {v for _, reply in played for v in reply.versions.tolist()} >= set(range(first, first + 6))
    assert max(error_from_scratch(MODELS, request, reply) for request, reply in played) < TOLERANCE


def without_one(named: dict[str, Tensor]) -> None:
    del named["model.layers.1.mlp.up_proj.weight"]


def with_one_too_short(named: dict[str, Tensor]) -> None:
    named["model.norm.weight"] = named["model.norm.weight"][:-1]


def with_one_too_many(named: dict[str, Tensor]) -> None:
    named["model.layers.2.mlp.up_proj.weight"] = named["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("transport", ["gloo", "disk"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_one, r"layers\.1\.mlp\.up_proj\.weight must have shape \[384, 96\], got none"),
        (with_one_too_short, r"model\.norm\.weight must have shape \[96\], got \[95\]"),
        (with_one_too_many, r"layers\.2\.mlp\.up_proj\.weight must have shape \(none: no such tensor\)"),
    ],
)
def test_a_wrong_update_is_refused_and_the_old_weights_serve_on(
    vllm_server: EngineInThread, transport: str, tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, "in_place", transport)
    version = push(config, url)
    named = {name: parameter.detach() for name, parameter in sharp_model("tiny-qwen3", 1).named_parameters()}
    spoil(named)
    publisher = open_publisher(config, [url], 0, torch.device("cpu"))
    publisher.connect()
    with pytest.raises(WeightSyncError, match=message):
        publisher.push(named.items(), next(VERSIONS))
    publisher.close()
    admin = VLLMAdmin(server.config, url)
    assert admin.served_version() == str(version)
    admin.resume()
    request = request_for(2)
    (replies,) = generate(server, request)
    assert {v for a in replies for v in a.versions.tolist()} == {version}
    assert largest_error(MODELS[version], [request], [replies]) < TOLERANCE


def test_an_update_that_breaks_off_changes_nothing_and_the_next_one_works(
    vllm_server: EngineInThread, tmp_path: Path
) -> None:
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, "retract", "disk")
    version = push(config, url)
    folder = tmp_path / "half"
    sharp_model("tiny-qwen3", 1).save_pretrained(folder)
    admin = VLLMAdmin(server.config, url)
    admin.pause("retract")
    admin.begin_update()
    admin.load_folder(folder, None)
    admin.end_update()  # the learner gives up: it has not sent the version
    admin.resume()
    request = request_for(4)
    (replies,) = generate(server, request)
    assert largest_error(MODELS[version], [request], [replies]) < TOLERANCE
    admin.begin_update()  # by a learner that ends right after
    assert push(config, url) == version + 1


def test_requests_with_a_shared_cache_key_read_stale_kv(vllm_server: EngineInThread, tmp_path: Path) -> None:
    """A counterpart of the tests above: when requests share a salt, vLLM uses the KV of old weights."""
    server, url = vllm_server, vllm_server.engine.url
    config = pushing(server, tmp_path, "in_place", "disk")
    admin = VLLMAdmin(server.config, url)
    tokens = [5 + i % 90 for i in range(100)]  # longer than a block of the cache

    def logprob_error(salt: str, version: int) -> float:
        sampling = {"max_tokens": 1, "logprobs": 0}
        body = {"token_ids": tokens, "cache_salt": salt, "sampling_params": sampling}
        entry = admin.ask("POST", "/inference/v1/generate", body)["choices"][0]["logprobs"]["content"][0]
        with torch.no_grad():
            logits = MODELS[version](input_ids=torch.tensor([tokens])).logits[0, -1]
        return abs(float(torch.log_softmax(logits, -1)[entry["token_id"]]) - entry["logprob"])

    assert logprob_error("shared", push(config, url)) < TOLERANCE
    version = push(config, url)
    assert logprob_error("shared", version) > 100 * TOLERANCE
    assert logprob_error("own", version) < TOLERANCE
