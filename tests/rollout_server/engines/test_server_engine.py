"""The SGLang engine with a real server on CPU. The tests share one, and the last of them update its weights."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.errors import AsyncRLError, ProcessDiedError
from async_rl.network import authorization
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.engines.sglang.admin import SGLangAdmin
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import TOLERANCE, from_scratch, generate, largest_error, request_for
from tests.kit.engines.pushes import update_in_place
from tests.kit.engines.strangers import answered, listed_routes
from tests.kit.models import load_model, save_sharp_model

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    sglang_server: EngineInThread, model_folder: Path, temperature: float
) -> None:
    groups = [request_for(i, temperature=temperature, max_tokens=3 + 7 * i) for i in range(12)]
    replies = generate(sglang_server, *groups)
    assert largest_error(load_model(model_folder), groups, replies) < TOLERANCE


def test_a_group_is_n_different_samples_of_one_prompt(sglang_server: EngineInThread) -> None:
    (replies,) = generate(sglang_server, request_for(1, n=16, max_tokens=40))
    assert len({a.tokens.tobytes() for a in replies}) == 16


def test_answers_end_with_the_end_token_or_at_the_limit(sglang_server: EngineInThread) -> None:
    eos = character_tokenizer().eos_token_id
    groups = [request_for(i, n=8, max_tokens=150, temperature=3.0) for i in range(4)]
    replies = [a for group in generate(sglang_server, *groups) for a in group]
    for reply in replies:
        assert (reply.tokens[:-1] != eos).all()
        assert reply.finish_reason == ("stop" if reply.tokens[-1] == eos else "length")
        assert len(reply.tokens) == 150 or reply.finish_reason == "stop"
    assert {a.finish_reason for a in replies} == {"stop", "length"}


def test_the_longest_prompt_gets_the_longest_answer(sglang_server: EngineInThread) -> None:
    prompt = dataclasses.replace(request_for(0).prompt, tokens=np.full(512, 7, dtype=np.int32))
    group = request_for(0, n=4, prompt=prompt, max_tokens=512, temperature=0.1)  # it repeats itself
    (replies,) = generate(sglang_server, group)
    assert any(len(a.tokens) == 512 for a in replies)


def test_the_server_keeps_idle_connections_longer_than_its_clients(sglang_server: EngineInThread) -> None:
    # Otherwise it may close a connection just when a client sends the next request, and the group would be lost.
    host, port = sglang_server.engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"GET /ready HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(5.5)  # uvicorn's default is 5
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # there is nothing to read, so it is not closed
            connection.recv(1)


def test_a_token_the_model_does_not_have_is_refused_and_the_server_lives(
    sglang_server: EngineInThread
) -> None:
    size = sglang_server.engine.vocab_size
    for tokens in ([5, size], [-1, 5], []):
        prompt = dataclasses.replace(request_for(3).prompt, tokens=np.array(tokens, dtype=np.int32))
        with pytest.raises(ValueError, match=rf"prompt 3 must be one or more tokens in 0\.\.{size - 1}"):
            generate(sglang_server, request_for(3, prompt=prompt))
    assert len(generate(sglang_server, request_for(3))[0]) == 4


def test_a_refusal_names_the_group_and_the_servers_reason(sglang_server: EngineInThread) -> None:
    with pytest.raises(AsyncRLError, match=r"refused request training-5 \(HTTP 400\).*maximum context"):
        generate(sglang_server, request_for(5, max_tokens=2000))


def test_an_update_in_mid_answer_changes_versions_where_weights_changed(
    sglang_server: EngineInThread, model_folder: Path, tmp_path: Path
) -> None:
    new_folder = save_sharp_model(tmp_path / "new", seed=1)
    group = request_for(6, n=8, max_tokens=500, temperature=0.3)  # at a low temperature it rarely ends early

    async def generate_and_update() -> list[SampledReply]:
        running = asyncio.create_task(sglang_server.engine.generate(group))
        for probe in (request_for(7), request_for(8)):  # once these are answered, the group is running
            await sglang_server.engine.generate(probe)
        await asyncio.to_thread(update_in_place, sglang_server, new_folder, 1)
        return await running

    replies = sglang_server.run(generate_and_update())
    old, prompt = load_model(model_folder), group.prompt.tokens
    split = [a for a in replies if {0, 1} == set(a.versions.tolist())]
    assert split, "no reply ran over the update"
    for reply in split:
        cut = int((reply.versions == 0).sum())
        assert (np.diff(reply.versions) >= 0).all()
        error = np.abs(reply.logprobs - from_scratch(old, prompt, reply.tokens, 0.3))
        assert error[:cut].max() < TOLERANCE
        assert error[cut : cut + 20].max() > 0.1

    # The same prompt in another group, now at version 1: its KV cache must be of version 1 too. Requests of one group
    # share KV, also over updates in place; `Group.old_kv` flags their tokens.
    group = dataclasses.replace(group, group_id=100)
    (after,) = generate(sglang_server, group)
    assert {v for a in after for v in a.versions.tolist()} == {1}
    assert largest_error(load_model(new_folder), [group], [after]) < TOLERANCE


def test_strangers_learn_only_that_the_server_lives(sglang_server: EngineInThread) -> None:
    url, key = sglang_server.engine.url, authorization(sglang_server.config.network)
    routes = listed_routes(url, key)
    assert {("POST", path) for path in ("/pause_generation", "/generate", "/update_weights_from_disk")} <= routes
    open_to_all = {path for _, path in routes if path.startswith(("/health", "/ready", "/metrics"))}
    assert answered(url, [(method, path) for method, path in routes if path not in open_to_all]) == set()
    assert len(generate(sglang_server, request_for(3))[0]) == 4  # nobody has paused it


def test_requests_with_a_shared_cache_key_read_stale_kv(
    sglang_server: EngineInThread, tmp_path: Path
) -> None:
    """The counterpart of the test above: when requests share a prefix-cache key, SGLang uses the KV of old weights."""
    folder = save_sharp_model(tmp_path / "newer", seed=2)
    prompt = request_for(8).prompt.tokens

    def logprob_error() -> float:
        sampling = {"max_new_tokens": 1}
        body = {"input_ids": prompt.tolist(), "return_logprob": True, "sampling_params": sampling}
        response = SGLangAdmin(sglang_server.config, sglang_server.engine.url).ask("POST", "/generate", body)
        logprob, token, _ = response["meta_info"]["output_token_logprobs"][0]
        return abs(logprob - from_scratch(load_model(folder), prompt, np.array([token]), 1.0)[0])

    logprob_error()
    update_in_place(sglang_server, folder, version=2)
    assert logprob_error() > 100 * TOLERANCE


def save_qwen3(folder: Path) -> Path:
    """Save a model unlike Qwen2: no bias, normalised queries and keys, wide heads, untied output."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(character_tokenizer()), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=False, initializer_range=0.2, eos_token_id=2, pad_token_id=0,
    ))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [pytest.param("tiny-llama", marks=pytest.mark.nightly), "qwen3"])
def test_other_families_have_the_logprobs_of_transformers_too(family: str, tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path) if family == "qwen3" else save_sharp_model(tmp_path, family)
    server = EngineInThread(server_config("sglang", folder), tmp_path / "logs")
    try:
        server.run(server.engine.start())
        groups = [request_for(i, max_tokens=30, temperature=0.7) for i in range(6)]
        assert largest_error(load_model(folder), groups, generate(server, *groups)) < TOLERANCE
    finally:
        server.close()


@pytest.mark.nightly
def test_garbage_collection_skips_objects_from_before_the_first_request(model_folder: Path, tmp_path: Path) -> None:
    server = EngineInThread(server_config("sglang", model_folder, server_args={"log_level": "debug"}), tmp_path)
    try:
        server.run(server.engine.start())
    finally:
        server.close()
    log = (tmp_path / "sglang-rollout-0.log").read_text()
    assert "Freezing GC in Scheduler process" in log
    assert "Freezing GC in Tokenizer Manager process" in log


def test_a_server_that_dies_at_start_shows_its_log_and_a_hint(model_folder: Path, tmp_path: Path) -> None:
    server = EngineInThread(server_config("sglang", model_folder, server_args={"no_such_flag": 1}), tmp_path)
    with pytest.raises(ProcessDiedError) as failure:
        server.run(server.engine.start())
    server.close()
    message = str(failure.value)
    assert "SGLang server rollout/0 ended by itself (exit code 2)" in message
    assert "A key of rollout.server_args is no flag of this SGLang" in message
    assert f"last lines of {tmp_path / 'sglang-rollout-0.log'}" in message
    assert "unrecognized arguments: --no-such-flag 1" in message
