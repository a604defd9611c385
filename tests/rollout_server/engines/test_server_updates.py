"""Answers of a server when weights change while they run, and the KV that they read then."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import PlacementConfig
from async_rl.base.seams.engines import UPDATE_POLICIES
from rollout_server.engines.base import SampledReply
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import FORMS, MODELS, VERSIONS, connected, deliver, new_version, push, pushing
from tests.kit.engines.replies import SUPPORT_TOLERANCE, TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.servers import Server, on_both
from tests.kit.engines.tags import check_supports, check_tags
from tests.kit.engines.turns import OBSERVED, error_from_scratch, next_turn, play_over_pushes
from tests.kit.engines.vllm import vllm
from tests.kit.learner.exported import train_and_export
from tests.kit.models import load_model

pytestmark = pytest.mark.e2e

TEMPERATURE = 0.3
"""Low, so that replies rarely end early."""


def nightly(*way: object) -> Any:
    return pytest.param(*way, marks=pytest.mark.nightly)


WAYS = [
    ("sglang", "abort", "disk", False, "none"), ("sglang", "in_place", "gloo", False, "delta"),
    *(nightly("sglang", "in_place", "gloo", False, form) for form in ("none", "device", "adapter")),
    nightly("sglang", "in_place", "cuda_ipc", True, "none"), nightly("sglang", "drain", "gloo", False, "none"),
    *(nightly("sglang", "retract", "disk", False, form) for form in FORMS),
    nightly("overlapping", "in_place", "gloo", False, "host"),
    vllm("in_place", "gloo", False, "none"), vllm("abort", "disk", False, "none"),
    vllm("in_place", "cuda_ipc", False, "none"), vllm("retract", "gloo", False, "device"),
    vllm("drain", "gloo", False, "none"), vllm("abort", "gloo", False, "host"),
    vllm("in_place", "gloo", False, "delta"),
    vllm("in_place", "disk", False, "adapter"),
]
"""Server, weight_sync.on_update, weight_sync.transport, placement.colocated, weight_sync.double_buffer or a form."""


@pytest.mark.parametrize(("server", "on_update", "transport", "colocated", "form"), WAYS, indirect=["server"])
def test_every_token_has_the_logprob_of_its_version_and_of_no_other(
    server: Server, on_update: str, transport: str, colocated: bool, form: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `drain` only replies of an evaluation can be running while weights change.

    cuda_ipc has the code path of GPUs, with host memory. An SGLang server that takes turns with the learner releases no
    memory on a CPU, but checks that nothing runs then.
    """
    config = pushing(server, tmp_path, on_update, transport, form, placement=PlacementConfig(colocated=colocated))
    assert config.shares_gpus == colocated
    url = server.engine.url
    monkeypatch.setattr(server.engine, "resubmits", on_update == "abort")
    server.let_replies_go_on(monkeypatch)  # some models would end all of them before the second push
    first = push(config, url)
    slow_push = server.config.rollout.engine == "vllm" and transport in ("disk", "cuda_ipc")
    n = 64 if slow_push else 16  # more of them take longer
    # Each has KV of its own. SGLang also gives the ids that the tokens of a second group are drawn from. Its
    # temperature is 1: a lower one makes the rounding of logits a larger error of logprobs.
    request = request_for(6, n=n, max_tokens=900, temperature=TEMPERATURE, group_id=first)
    monkeypatch.setattr(server.engine, "support_ids", server.engine.vocab_size, raising=False)
    narrowed = [
        dataclasses.replace(request, n=4, group_id=next(VERSIONS), temperature=1.0, top_p=0.95, wants_support=True)
        for _ in range(server.config.rollout.engine == "sglang")
    ]
    # Both updates are made and the connection is open before the replies begin, which are soon at their end.
    publisher, updates = connected(config, url), [new_version(config), new_version(config)]
    shares: list[float] = []

    async def generate_over_two_updates() -> list[list[SampledReply]]:
        group = asyncio.gather(*map(server.engine.generate, [request, *narrowed]))
        for version in updates:
            async with asyncio.timeout(30):  # until some of it runs, after an abort anew
                while not group.done() and ((load := await server.engine.load()) is None or load.running < 4):
                    await asyncio.sleep(0.02)
            assert not group.done(), f"it ended before it was updated twice: {group}"
            for _ in range(3 if on_update == "abort" else 1):
                await server.engine.generate(request_for(7))
            shares.append((await asyncio.to_thread(deliver, publisher, version)).changed_share)
        return await group

    replies, *with_supports = server.run(generate_over_two_updates())
    publisher.close()
    models = {version: MODELS[version] for version in (first, *updates)}
    assert shares[0] == 1.0
    assert (shares[1] < 0.15) == (form == "delta")  # of changed values alone
    spanning = [a for a in replies if len(set(a.versions.tolist())) == 3]
    assert len(spanning) >= 2
    assert all((np.diff(a.versions) >= 0).all() for a in replies)
    keeps_kv = on_update == "in_place" and not colocated
    mismatches = [check_tags(models, request.prompt.tokens, a, TEMPERATURE, keeps_kv=keeps_kv) for a in spanning[:4]]
    assert (max(mismatches) > 0.01) == keeps_kv  # by a recompute from scratch
    for other, of_other in zip(narrowed, with_supports, strict=True):
        assert any(len(set(reply.versions.tolist())) == 3 for reply in of_other)
        for reply in of_other:
            check_tags(models, other.prompt.tokens, reply, 1.0, keeps_kv=keeps_kv, tolerance=SUPPORT_TOLERANCE)
            check_supports(models, other, reply, keeps_kv=keeps_kv)

    # The same prompt in another group: its KV cache must be of the newest version too.
    (last,) = generate(server, dataclasses.replace(request, group_id=updates[-1], max_tokens=100))
    assert {v for a in last for v in a.versions.tolist()} == {updates[-1]}
    for reply in last:
        check_tags(models, request.prompt.tokens, reply, TEMPERATURE, keeps_kv=False)


@on_both
@pytest.mark.parametrize(
    "on_update", [each if each in ("in_place", "retract") else nightly(each) for each in UPDATE_POLICIES]
)
def test_a_turn_reuses_the_kv_of_its_history_until_a_push_drops_it(
    server: Server, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, url = pushing(server, tmp_path, on_update, "disk"), server.engine.url
    server.let_replies_go_on(monkeypatch)
    first = request_for(3, n=1, max_tokens=60, temperature=TEMPERATURE, group_id=next(VERSIONS))
    push(config, url)
    cached = server.record_cached_tokens(monkeypatch)
    ((said,),) = generate(server, first)
    second = next_turn(first, said)
    ((added,),) = generate(server, second)
    push(config, url)
    third = next_turn(second, added)
    ((last,),) = generate(server, third)
    keeps_kv, block = on_update == "in_place", server.cache_block_tokens
    # All but the last token of a history have KV.
    histories = [(len(turn.prompt.tokens) - len(OBSERVED) - 1) // block * block for turn in (second, third)]
    assert cached == [0, histories[0], histories[1] if keeps_kv else 0]
    assert error_from_scratch(MODELS, first, said) < TOLERANCE
    assert error_from_scratch(MODELS, second, added) < TOLERANCE
    error = error_from_scratch(MODELS, third, last)
    assert error > 100 * TOLERANCE if keeps_kv else error < TOLERANCE


@pytest.mark.parametrize(
    ("server", "on_update"), [("sglang", "retract"), nightly("sglang", "abort"), vllm("retract"), vllm("abort")],
    indirect=["server"],
)
def test_no_turn_that_meets_a_push_reads_kv_of_older_weights(
    server: Server, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, url = pushing(server, tmp_path, on_update, "disk"), server.engine.url
    monkeypatch.setattr(server.engine, "resubmits", on_update == "abort")
    first = push(config, url)
    cached = server.record_cached_tokens(monkeypatch)
    played = server.run(play_over_pushes(server.engine, lambda: push(config, url), pushes=3))
    assert sum(cached) > 0
    assert {v for _, reply in played for v in reply.versions.tolist()} >= set(range(first, first + 4))
    assert max(error_from_scratch(MODELS, request, reply) for request, reply in played) < TOLERANCE


def check_logprobs(server: EngineInThread, exported: Path, before: Path) -> None:
    groups = [request_for(i, max_tokens=10) for i in range(4)]
    replies = generate(server, *groups)
    assert largest_error(load_model(exported), groups, replies) < TOLERANCE
    assert largest_error(load_model(before), groups, replies) > 10 * TOLERANCE  # training has changed the weights


@on_both
def test_an_exported_checkpoint_is_served_with_the_logprobs_of_transformers(
    server: Server, tmp_path: Path, one_rank: None
) -> None:
    base = Path(server.config.model.path)
    train_and_export(base, tmp_path, rank=2)
    server.admin.pause("retract")
    server.admin.begin_update()
    server.admin.load_folder(tmp_path / "out", next(VERSIONS))
    server.admin.end_update()
    server.admin.resume()
    check_logprobs(server, tmp_path / "out", base)
