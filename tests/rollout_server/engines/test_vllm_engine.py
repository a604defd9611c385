"""The vLLM engine with a real server on CPU. The tests share one."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_rl.errors import AsyncRLError, ProcessDiedError
from async_rl.network import authorization
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.engines.vllm.admin import GENERATE, VLLMAdmin
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.strangers import answered, listed_routes
from tests.kit.engines.vllm import MODELS, START_S, needs_vllm, push, pushing
from tests.kit.models import load_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture
def served(vllm_server: EngineInThread, tmp_path: Path) -> int:
    """Weights that no test has served before."""
    return push(pushing(vllm_server, tmp_path, "retract", "disk"), vllm_server.engine.url)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8)])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    vllm_server: EngineInThread, served: int, temperature: float, top_p: float
) -> None:
    """As with the other engines, they are those of all tokens also where top_p excludes some."""
    groups = [request_for(i, temperature=temperature, top_p=top_p, max_tokens=3 + 7 * i) for i in range(12)]
    replies = generate(vllm_server, *groups)
    assert largest_error(MODELS[served], groups, replies) < TOLERANCE


def test_a_temperature_near_zero_takes_the_most_probable_token(vllm_server: EngineInThread, served: int) -> None:
    request = request_for(1, n=2, temperature=1e-4)
    (replies,) = generate(vllm_server, request)
    assert largest_error(MODELS[served], [request], [replies]) < 1e-3
    assert replies[0].tokens.tolist() == replies[1].tokens.tolist()
    assert abs(replies[0].logprobs).max() < 1e-3


def test_a_group_is_n_different_samples_of_one_prompt(vllm_server: EngineInThread, served: int) -> None:
    (replies,) = generate(vllm_server, request_for(1, n=16, max_tokens=40))
    assert len({a.tokens.tobytes() for a in replies}) == 16


def test_answers_end_with_the_end_token_or_at_the_limit(vllm_server: EngineInThread, served: int) -> None:
    eos = character_tokenizer().eos_token_id
    groups = [request_for(i, n=8, max_tokens=150, temperature=2.0) for i in range(4)]
    replies = [a for group in generate(vllm_server, *groups) for a in group]
    for reply in replies:
        assert (reply.tokens[:-1] != eos).all()
        assert reply.finish_reason == ("stop" if reply.tokens[-1] == eos else "length")
        assert len(reply.tokens) == 150 or reply.finish_reason == "stop"
    assert {a.finish_reason for a in replies} == {"stop", "length"}


def test_the_longest_prompt_gets_the_longest_answer(vllm_server: EngineInThread, served: int) -> None:
    prompt = dataclasses.replace(request_for(0).prompt, tokens=np.full(512, 7, dtype=np.int32))
    group = request_for(0, n=4, prompt=prompt, max_tokens=512, temperature=0.1)  # it repeats itself
    (replies,) = generate(vllm_server, group)
    assert any(len(a.tokens) == 512 for a in replies)
    assert largest_error(MODELS[served], [group], [replies]) < 10 * TOLERANCE  # errors grow by 1 / T


def test_a_token_the_model_does_not_have_is_refused_and_the_server_lives(vllm_server: EngineInThread) -> None:
    size = vllm_server.engine.vocab_size
    for tokens in ([5, size], [-1, 5], []):
        prompt = dataclasses.replace(request_for(3).prompt, tokens=np.array(tokens, dtype=np.int32))
        with pytest.raises(ValueError, match=rf"prompt 3 must be one or more tokens in 0\.\.{size - 1}"):
            generate(vllm_server, request_for(3, prompt=prompt))
    assert len(generate(vllm_server, request_for(3))[0]) == 4


def test_a_refusal_names_the_group_and_the_servers_reason(vllm_server: EngineInThread) -> None:
    prompt = dataclasses.replace(request_for(5).prompt, tokens=np.full(1024, 7, dtype=np.int32))
    with pytest.raises(AsyncRLError, match=r"refused request training-5 \(HTTP 400\).*1024"):
        generate(vllm_server, request_for(5, prompt=prompt))


def test_strangers_get_no_answer_from_the_server(vllm_server: EngineInThread) -> None:
    url, key = vllm_server.engine.url, authorization(vllm_server.config.network)
    routes = listed_routes(url, key)
    assert {("POST", path) for path in ("/pause", "/collective_rpc", "/update_weights", GENERATE)} <= routes
    assert answered(url, routes) == set()
    assert len(generate(vllm_server, request_for(3))[0]) == 4  # nobody has paused it


def test_a_cancelled_group_ends_on_the_server_and_no_other_does(vllm_server: EngineInThread, served: int) -> None:
    engine = vllm_server.engine

    async def until(running: int) -> None:
        async with asyncio.timeout(20):
            while (load := await engine.load()) is None or load.running != running:
                await asyncio.sleep(0.02)

    async def cancel_one() -> list[SampledReply]:
        long = {"n": 9, "max_tokens": 500, "temperature": 0.1}
        kept, cancelled = (asyncio.create_task(engine.generate(request_for(i, **long))) for i in (0, 1))
        async with asyncio.timeout(20):
            while (load := await engine.load()) is None or load.running <= 9:
                await asyncio.sleep(0.01)
        admin = VLLMAdmin(vllm_server.config, engine.url)
        await asyncio.to_thread(admin.pause, "in_place")  # from now on nothing ends by itself
        before = await engine.load()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await engine._cancelled.join()
        await asyncio.to_thread(admin.resume)
        replies = await kept
        await until(0)
        assert before is not None and before.slots == 256
        return replies

    assert len(vllm_server.run(cancel_one())) == 9


def test_an_untied_model_with_biases_has_the_logprobs_of_transformers_too(tmp_path: Path) -> None:
    needs_vllm()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(character_tokenizer()), hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.2, eos_token_id=2, pad_token_id=0,
    )).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    server = EngineInThread(server_config("vllm", tmp_path), tmp_path / "logs")
    try:
        server.run(server.engine.start(), START_S)
        groups = [request_for(i, max_tokens=30, temperature=0.7) for i in range(6)]
        assert largest_error(load_model(tmp_path), groups, generate(server, *groups)) < TOLERANCE
    finally:
        server.close()


def test_a_server_that_dies_at_start_shows_its_log_and_a_hint(vllm_model: Path, tmp_path: Path) -> None:
    needs_vllm()
    server = EngineInThread(server_config("vllm", vllm_model, server_args={"no_such_flag": 1}), tmp_path)
    with pytest.raises(ProcessDiedError) as failure:
        server.run(server.engine.start(), START_S)
    server.close()
    message = str(failure.value)
    assert "vLLM server rollout/0 ended by itself (exit code 2)" in message
    assert "A key of rollout.server_args is no flag of this vLLM" in message
    assert f"last lines of {tmp_path / 'vllm-rollout-0.log'}" in message
    assert "unrecognized arguments: --no-such-flag" in message
