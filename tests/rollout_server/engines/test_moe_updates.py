"""Experts at a server after each push, with SGLang and the hf engine; every token uses every expert of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.base.errors import WeightSyncError
from async_rl.base.weights.checkpoint_names import to_checkpoint
from async_rl.base.weights.publisher import WeightPublisher
from rollout_server.engines.base import SampledReply
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.noted_pushes import expected_sums
from tests.kit.engines.pushes import MODELS, connected, deliver, new_version, pushing, verify
from tests.kit.engines.replies import SUPPORT_TOLERANCE, generate, request_for
from tests.kit.engines.routed import TIE, replayed
from tests.kit.engines.servers import SGLangServer
from tests.kit.engines.tags import check_tags
from tests.kit.tiny_moe import moe_model, save_moe


def push_and_verify(publisher: WeightPublisher, version: int) -> float:
    """Push a version; the server's sums and logprobs must then be the model's. Returns the share of changed values.

    Adapters are of layers for attention; transformers keeps experts as tensors that are no layers.
    """
    report = deliver(publisher, version, erases=True, compares=True)
    assert report.num_compared == (publisher.config.weight_sync.lora != "adapter")
    verify(publisher, version, mean=1e-5)
    return report.changed_share


@pytest.fixture(scope="module")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("moe")
    server = SGLangServer(server_config("sglang", save_moe(folder / "model")), folder)
    server.run(server.engine.start(), server.config.timeouts.startup_s)
    yield server
    server.close()


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("transport", "form"), [("cuda_ipc", "none"), ("gloo", "adapter"), ("gloo", "device"), ("disk", "delta")]
)
def test_sglang_serves_the_learners_experts_after_each_push(
    moe_server: SGLangServer, transport: str, form: str, tmp_path: Path
) -> None:
    """All of the server's weights have the bits of the learner's, those of each expert among them."""
    on_update = "in_place" if transport == "gloo" else "retract"
    config = pushing(moe_server, tmp_path, on_update, transport, form)
    publisher = connected(config, moe_server.engine.url)
    shares = []
    for _ in range(3):
        shares.append(push_and_verify(publisher, version := new_version(config)))
        weights = dict(to_checkpoint(MODELS[version], MODELS[version].named_parameters()))
        expected = expected_sums("sglang", weights, torch.float32)
        assert {"model.layers.1.mlp.experts.w13_weight", "model.layers.1.mlp.experts.w2_weight"} < expected.keys()
        admin: Any = publisher.members.admin("rollout/0")
        assert admin.sums_of_weights() == expected
    assert [share < 0.15 for share in shares] == [False, form == "delta", form == "delta"]
    publisher.close()


@pytest.mark.e2e
@pytest.mark.nightly
def test_experts_that_sglang_does_not_load_are_named(moe_server: SGLangServer, tmp_path: Path) -> None:
    """SGLang skips the names of transformers in silence: this is how they were pushed once."""
    config = pushing(moe_server, tmp_path, "in_place", "gloo")
    publisher = connected(config, moe_server.engine.url)
    assert publisher.push(moe_model(13).named_parameters(), 13, erases=True).repeats
    with pytest.raises(WeightSyncError, match=r"rollout/0.*model\.layers\.0\.mlp\.experts\.w13_weight"):
        publisher.push(moe_model(13).named_parameters(), 13, erases=True)
    push_and_verify(publisher, new_version(config))  # a whole push makes the server good again
    publisher.close()


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("on_update", ["in_place", "retract", "abort"])
def test_sglang_returns_the_experts_of_each_tokens_first_forward_best_first(
    moe_server: SGLangServer, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two updates, and for a prompt in the prefix cache. All experts are used, in an order that weights decide.

    Experts whose probabilities are equal but for rounding may be in any order.
    """
    config = pushing(moe_server, tmp_path, on_update, "disk")
    publisher = connected(config, moe_server.engine.url)
    moe_server.let_replies_go_on(monkeypatch)
    monkeypatch.setattr(moe_server.engine, "resubmits", on_update == "abort")
    versions = [new_version(config, seed) for seed in (21, 22, 23)]
    models = {version: MODELS[version] for version in versions}
    push_and_verify(publisher, versions[0])
    request = request_for(6, n=4, max_tokens=500, group_id=versions[0], wants_routing=True)

    async def generate_over_two_updates() -> list[SampledReply]:
        group = asyncio.create_task(moe_server.engine.generate(request))
        for version in versions[1:]:
            for _ in range(3):
                await moe_server.engine.generate(request_for(7, max_tokens=20))
            assert not group.done()
            await asyncio.to_thread(push_and_verify, publisher, version)
        return await group

    replies = moe_server.run(generate_over_two_updates())
    publisher.close()
    assert all(set(reply.versions.tolist()) == set(versions) for reply in replies)
    for reply in replies[:2]:
        keeps_kv = on_update == "in_place"
        check_tags(models, request.prompt.tokens, reply, 1.0, keeps_kv=keeps_kv, tolerance=SUPPORT_TOLERANCE)
        _, lags = replayed(models, request.prompt.tokens, reply, 1.0, keeps_kv)
        assert reply.routing is not None and len(reply.routing) == len(lags)
        assert lags.max() < TIE
    cached = moe_server.record_cached_tokens(monkeypatch)
    again = request_for(8, n=1, max_tokens=20, group_id=versions[-1], wants_routing=True)
    for (reply,) in [generate(moe_server, again)[0] for _ in range(2)]:
        assert replayed(models, again.prompt.tokens, reply, again.temperature, keeps_kv=True)[1].max() < TIE
    assert cached == [0, len(again.prompt.tokens) - 1]


def test_the_hf_engine_serves_the_learners_experts_after_each_push(tmp_path: Path) -> None:
    server = EngineInThread(server_config("hf", save_moe(tmp_path / "model")), tmp_path)
    server.run(server.engine.start())
    config = pushing(server, tmp_path, "in_place", "disk")
    publisher = connected(config, server.engine.url)
    for _ in range(2):
        push_and_verify(publisher, version := new_version(config))
        served = dict(server.engine.model.named_parameters())  # type: ignore[attr-defined]
        assert all(torch.equal(tensor, served[name]) for name, tensor in MODELS[version].named_parameters())
    publisher.close()
    server.close()
