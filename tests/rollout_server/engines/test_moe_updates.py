"""Experts at a server after each push, with SGLang and the hf engine; every token uses every expert of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, LoraConfig, WeightSyncConfig
from async_rl.base.errors import WeightSyncError
from async_rl.base.weights import WeightPublisher, open_publisher
from async_rl.base.weights.checkpoint_names import to_checkpoint
from async_rl.base.weights.publisher import PushReport, Tolerance
from learner.models.lora import AdapterParcels, merged_parameters
from rollout_server.engines.base import SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.engines.noted_pushes import expected_sums
from tests.kit.engines.pushes import FORMS, adapted_model, keep_most_values
from tests.kit.engines.replies import generate, request_for, with_engine
from tests.kit.engines.routed import experts_as_sampled
from tests.kit.engines.servers import SGLangServer
from tests.kit.engines.tags import check_tags
from tests.kit.tiny_moe import moe_model, save_moe

TOKENS = list(range(5, 60))
EXACT = Tolerance(1e-5, 1e-4)


def pushing(config: Config, transport: str, run_dir: Path, on_update: str = "in_place", form: str = "none") -> Config:
    """The configuration of pushes; `form` is a value of weight_sync.double_buffer, or one of FORMS."""
    run_dir.mkdir(exist_ok=True)
    more = FORMS.get(form, {"double_buffer": form})
    sync = WeightSyncConfig(transport=transport, bucket_bytes=50_000, on_update=on_update, **more)  # type: ignore[arg-type]
    lora = LoraConfig(rank=4 * (form == "adapter"))
    return changed(config, run={"dir": run_dir}, weight_sync=sync, model={"lora": lora})


def pushed(config: Config, seed: int) -> tuple[PreTrainedModel, Iterator[tuple[str, Tensor]]]:
    """The model of a seed, and what is pushed of it: its weights or, where only adapters travel, these.

    Pushes of changed values get models that differ in one value of twenty. Adapters are of layers for attention;
    transformers keeps experts as tensors that are no layers.
    """
    if config.model.lora.rank:
        lm = adapted_model(config, seed)
        model = moe_model(0)
        model.load_state_dict(dict(merged_parameters(lm)))
        return model, AdapterParcels(lm, torch.float32).parcels()
    model = moe_model(seed)
    if config.weight_sync.delta:
        keep_most_values(model, moe_model(10), seed)
    return model, to_checkpoint(model, model.named_parameters())


def push_and_verify(publisher: WeightPublisher, seed: int, version: int) -> PushReport:
    """Push the model of another seed; the server's sums and logprobs must then be the model's."""
    model, tensors = pushed(publisher.config, seed)
    report = publisher.push(tensors, version, erases=True, compares=True)
    assert report.num_compared == (publisher.config.weight_sync.lora != "adapter")
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([TOKENS])).logits[0], dim=-1)
    publisher.verify(TOKENS, [float(logprobs[i, t]) for i, t in enumerate(TOKENS[1:])], EXACT)
    return report


@pytest.fixture(scope="module")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("moe")
    server = SGLangServer(server_config("sglang", save_moe(folder / "model")), folder)
    server.run(server.engine.start(), server.config.timeouts.startup_s)
    yield server
    server.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("transport", "form"),
    [
        ("cuda_ipc", "none"), ("gloo", "adapter"),
        *(pytest.param(*way, marks=pytest.mark.nightly) for way in (("gloo", "device"), ("disk", "delta"))),
    ],
)
def test_sglang_serves_the_learners_experts_after_each_push(
    moe_server: SGLangServer, transport: str, form: str, tmp_path: Path
) -> None:
    """All of the server's weights have the bits of the learner's, those of each expert among them."""
    on_update = "in_place" if transport == "gloo" else "retract"
    config = pushing(moe_server.config, transport, tmp_path / "run", on_update, form)
    publisher = open_publisher(config, [moe_server.engine.url], 0, torch.device("cpu"))
    shares = []
    for seed in (11, 12, 13):
        shares.append(push_and_verify(publisher, seed, version=seed).changed_share)
        model, _ = pushed(config, seed)
        expected = expected_sums("sglang", dict(to_checkpoint(model, model.named_parameters())), torch.float32)
        assert {"model.layers.1.mlp.experts.w13_weight", "model.layers.1.mlp.experts.w2_weight"} < expected.keys()
        admin: Any = publisher.members.admin("rollout/0")
        assert admin.sums_of_weights() == expected
    assert [share < 0.15 for share in shares] == [False, form == "delta", form == "delta"]
    publisher.close()


@pytest.mark.e2e
@pytest.mark.nightly
def test_experts_that_sglang_does_not_load_are_named(moe_server: SGLangServer, tmp_path: Path) -> None:
    """SGLang skips the names of transformers in silence: this is how they were pushed once."""
    config = pushing(moe_server.config, "gloo", tmp_path / "run")
    publisher = open_publisher(config, [moe_server.engine.url], 0, torch.device("cpu"))
    assert publisher.push(moe_model(13).named_parameters(), 13, erases=True).repeats
    with pytest.raises(WeightSyncError, match=r"rollout/0.*model\.layers\.0\.mlp\.experts\.w13_weight"):
        publisher.push(moe_model(13).named_parameters(), 13, erases=True)
    push_and_verify(publisher, 14, version=14)  # a whole push makes the server good again
    publisher.close()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "on_update", ["in_place", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("retract", "abort"))]
)
def test_sglang_returns_the_experts_of_each_tokens_first_forward_best_first(
    moe_server: SGLangServer, on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two updates, and for a prompt in the prefix cache. All experts are used, in an order that weights decide."""
    config = pushing(moe_server.config, "disk", tmp_path / "run", on_update)
    publisher = open_publisher(config, [moe_server.engine.url], 0, torch.device("cpu"))
    moe_server.let_replies_go_on(monkeypatch)
    monkeypatch.setattr(moe_server.engine, "resubmits", on_update == "abort")
    versions = (21, 22, 23)
    models = {version: moe_model(version) for version in versions}
    push_and_verify(publisher, 21, version=21)
    request = request_for(6, n=4, max_tokens=500, temperature=0.3, group_id=versions[0], wants_routing=True)

    async def generate_over_two_updates() -> list[SampledReply]:
        group = asyncio.create_task(moe_server.engine.generate(request))
        for version in versions[1:]:
            for _ in range(3):
                await moe_server.engine.generate(request_for(7, max_tokens=20))
            assert not group.done()
            await asyncio.to_thread(push_and_verify, publisher, version, version=version)
        return await group

    replies = moe_server.run(generate_over_two_updates())
    publisher.close()
    assert all(set(reply.versions.tolist()) == set(versions) for reply in replies)
    for reply in replies[:2]:
        check_tags(models, request.prompt.tokens, reply, 0.3, keeps_kv=on_update == "in_place")
        expected = experts_as_sampled(models, request.prompt.tokens, reply, keeps_kv=on_update == "in_place")
        assert reply.routing is not None and reply.routing.shape == expected.shape
        assert (reply.routing != expected).any((1, 2)).mean() < 0.005  # scores may tie but for rounding
    cached = moe_server.record_cached_tokens(monkeypatch)
    again = request_for(8, n=1, max_tokens=20, group_id=24, wants_routing=True)
    for (reply,) in [generate(moe_server, again)[0] for _ in range(2)]:
        expected = experts_as_sampled({23: models[23]}, again.prompt.tokens, reply, keeps_kv=True)
        assert reply.routing is not None and (reply.routing != expected).any((1, 2)).mean() < 0.05
    assert cached == [0, len(again.prompt.tokens) - 1]


def test_the_hf_engine_serves_the_learners_experts_after_each_push(tmp_path: Path) -> None:
    config = pushing(server_config("hf", save_moe(tmp_path / "model")), "disk", tmp_path / "run")

    async def push_twice(engine: HFEngine) -> None:
        publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
        for seed in (11, 12):
            await asyncio.to_thread(push_and_verify, publisher, seed, version=seed)
            served = dict(engine.model.named_parameters())
            assert all(torch.equal(tensor, served[name]) for name, tensor in moe_model(seed).named_parameters())
        publisher.close()

    with_engine(config, push_twice)


def test_the_hf_engine_names_weights_that_hold_nan(tmp_path: Path) -> None:
    async def erase(engine: HFEngine) -> None:
        assert await engine.unloaded_weights() == []
        await engine.erase_weights()
        assert len(await engine.unloaded_weights()) == len(list(engine.model.parameters()))
        engine.model.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
        engine.model.get_parameter("model.layers.1.mlp.experts.down_proj").data[3, 5, 7] = torch.nan
        assert await engine.unloaded_weights() == ["model.layers.1.mlp.experts.down_proj"]

    with_engine(server_config("hf", save_moe(tmp_path)), erase)
