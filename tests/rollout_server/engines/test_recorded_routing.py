"""Replies have the experts of each token's first forward pass, over weight updates too; recomputed by transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.base.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.episodes.conversation.session import make_rows
from rollout_server.episodes.episode import Node
from tests.kit.configs import server_config
from tests.kit.engines.replies import (
    TOLERANCE,
    from_scratch,
    generate,
    over_updates,
    recomputed_logprobs,
    request_for,
    with_engine,
)
from tests.kit.engines.routed import experts_as_sampled
from tests.kit.engines.servers import SGLangServer
from tests.kit.engines.tags import check_tags
from tests.kit.engines.turns import next_turn
from tests.kit.routing import tiny_experts
from tests.kit.tiny_moe import moe_model, save_moe

pytestmark = pytest.mark.processes  # together they compute for long
SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"), **SIZES)


@pytest.fixture(scope="module")
def models() -> dict[int, Any]:
    return {version: moe_model(seed, **SIZES) for version, seed in enumerate((0, 5, 6))}


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_each_token_keeps_the_experts_with_which_it_was_sampled(
    folder: Path, models: dict[int, Any], keeps_kv: bool
) -> None:
    request = request_for(3, n=6, max_tokens=100, wants_routing=True)

    replies = over_updates(server_config("hf", folder), request, models, keeps_kv)
    spanning = [reply for reply in replies if reply.versions[-1] == 2]
    assert spanning
    newest_differ = 0
    for reply in spanning:
        check_tags(models, request.prompt.tokens, reply, 1.0, keeps_kv=keeps_kv)
        expected = experts_as_sampled(models, request.prompt.tokens, reply, keeps_kv)
        np.testing.assert_array_equal(reply.routing, expected)
        as_newest = dataclasses.replace(reply, versions=np.full_like(reply.versions, 2))
        newest_differ += int((experts_as_sampled(models, request.prompt.tokens, as_newest, True) != expected).sum())
    assert newest_differ > 100


def test_the_rows_of_an_episode_have_the_experts_of_each_token_when_it_was_fed_first(
    folder: Path, models: dict[int, Any]
) -> None:
    """Between the turns the weights change; the hf engine then computes the history again, with the new ones."""
    first = request_for(2, n=1, max_tokens=9, wants_routing=True)

    async def play(engine: HFEngine) -> list[SampledReply]:
        (said,) = await engine.generate(first)
        await engine.load_weights(dict(models[1].named_parameters()), 1)
        second = next_turn(first, said)
        return [said, *await engine.generate(second), *await engine.generate(second)]

    said, *replies = with_engine(server_config("hf", folder), play)
    root = Node(None, first.prompt.tokens.tolist())
    reply = Node(root, said.tokens.tolist(), said)
    second = next_turn(first, said)
    context = Node(reply, second.prompt.tokens[reply.num_tokens :].tolist())
    leaves = [Node(context, each.tokens.tolist(), each) for each in replies]
    rows = make_rows([reply, *leaves])
    assert len(rows) == 2
    known = experts_as_sampled(models, first.prompt.tokens, said, keeps_kv=False)
    for row, each in zip(rows, replies, strict=True):
        expected = experts_as_sampled(models, second.prompt.tokens, each, False, known)
        np.testing.assert_array_equal(row.routing, expected)
        assert row.routing is not None and len(row.routing) == len(row.tokens) - 1
        assert each.routing is not None and (each.routing[: len(known)] != known).any()
        logprobs = from_scratch(models[1], second.prompt.tokens, each.tokens, 1.0)
        np.testing.assert_allclose(each.logprobs, logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Olmoe"])
def test_sglang_records_the_experts_of_families_that_need_its_changes(family: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    lm = tiny_experts(family, max_position_embeddings=1024, **sizes)
    lm.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    server = SGLangServer(server_config("sglang", tmp_path / "model"), tmp_path)
    try:
        server.run(server.engine.start(), server.config.timeouts.startup_s)
        request = request_for(5, n=2, max_tokens=40, wants_routing=True)
        (replies,) = generate(server, request)
    finally:
        server.close()
    for reply in replies:
        expected = experts_as_sampled({0: lm}, request.prompt.tokens, reply, keeps_kv=True)
        np.testing.assert_array_equal(reply.routing, expected)
        differences = np.abs(reply.logprobs - recomputed_logprobs(lm, request, reply))
        assert differences.mean() < 2e-5 and differences.max() < TOLERANCE, "the limits of a certificate in float32"


def test_an_engine_does_not_start_with_a_family_whose_choice_it_does_not_see(tmp_path: Path) -> None:
    tiny_experts("Phimoe").save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)

    async def nothing(engine: HFEngine) -> None:
        pass

    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        with_engine(server_config("hf", tmp_path), nothing)
    with_engine(server_config("hf", tmp_path, routing="ignore"), nothing)
