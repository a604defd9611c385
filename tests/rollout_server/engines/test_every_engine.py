"""What every engine must do: what it samples, what it refuses, and whom its server answers."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from async_rl.base.errors import AsyncRLError
from async_rl.base.network import authorization
from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from tests.kit.configs import server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.replies import (
    SUPPORT_TOLERANCE,
    TOLERANCE,
    distributions,
    generate,
    largest_error,
    request_for,
    wrong_sets,
)
from tests.kit.engines.servers import Server, on_all, on_both
from tests.kit.engines.strangers import answered, listed_routes
from tests.kit.engines.vllm import START_S, vllm
from tests.kit.models import load_model, save_sharp_model

pytestmark = pytest.mark.e2e


@on_all
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    server: EngineInThread, served: PreTrainedModel
) -> None:
    """Without supports they are those of all tokens also where top_p excludes some."""
    groups = [request_for(i, temperature=0.7, top_p=0.8, max_tokens=3 + 7 * i) for i in range(12)]
    replies = generate(server, *groups)
    assert largest_error(served, groups, replies) < TOLERANCE
    assert len({reply.tokens.tobytes() for reply in replies[-1]}) == 4, "samples of one prompt differ"


RULES: list[tuple[bool, dict[str, float]]] = [
    (False, {"top_p": 0.8}), (False, {"top_k": 7}), (True, {"min_p": 0.1, "top_p": 0.97}),
]
"""Whether tokens are forbidden, and the rules by which others are left out."""


@pytest.mark.parametrize("server", ["hf", "sglang"], indirect=True)
@pytest.mark.parametrize(("forbids", "rules"), RULES)
def test_each_token_has_the_ids_it_was_drawn_from_and_its_logprob_over_them(
    server: EngineInThread, served: PreTrainedModel, forbids: bool, rules: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_server = server.config.rollout.engine != "hf"  # the hf engine's settings can't be changed later
    forbidden = list(range(3, server.engine.vocab_size, 3)) if forbids and has_server else []
    monkeypatch.setattr(server.engine, "forbidden", forbidden, raising=False)
    monkeypatch.setattr(server.engine, "support_ids", server.engine.vocab_size, raising=False)
    asked: dict[str, Any] = {"n": 6, "temperature": 0.9, "max_tokens": 30, "wants_support": True, **rules}
    requests = [request_for(i, wants_support_logprobs=i % 2 == 0, **asked) for i in range(6)]
    groups = generate(server, *requests, request_for(6, top_p=0.7))
    assert largest_error(served, requests, groups[:-1], forbidden) < SUPPORT_TOLERANCE
    assert groups[-1][0].support is None
    num_cut = 0
    for request, replies in zip(requests, groups, strict=False):
        for reply in replies:
            support = reply.support
            assert support is not None
            whole = distributions(served, request.prompt.tokens, reply.tokens, request.temperature, forbidden)
            assert wrong_sets(whole, support, request.sampling) == []
            num_cut += int((support.sizes < whole.shape[1]).sum())
            assert (support.logprobs is not None) == request.wants_support_logprobs
            if support.logprobs is not None:
                owners = np.repeat(np.arange(len(reply.tokens)), support.sizes)
                inside = np.exp(whole[owners, support.ids].numpy())
                expected = np.log(inside / np.bincount(owners, inside)[owners])
                np.testing.assert_allclose(support.logprobs, expected, atol=SUPPORT_TOLERANCE)
    assert num_cut > 100


@on_all
def test_a_temperature_near_zero_takes_the_most_probable_token(
    server: EngineInThread, served: PreTrainedModel
) -> None:
    request = request_for(1, n=2, temperature=1e-4)
    (replies,) = generate(server, request)
    assert largest_error(served, [request], [replies]) < 1e-3
    assert replies[0].tokens.tolist() == replies[1].tokens.tolist()
    assert abs(replies[0].logprobs).max() < 1e-3


@on_all
def test_answers_end_with_the_end_token_or_at_the_limit(server: EngineInThread, served: PreTrainedModel) -> None:
    eos = character_tokenizer().eos_token_id
    groups = [request_for(i, n=8, max_tokens=150, temperature=2.0) for i in range(4)]
    replies = [a for group in generate(server, *groups) for a in group]
    for reply in replies:
        assert len(reply.tokens) == len(reply.logprobs) == len(reply.versions)
        assert (reply.tokens[:-1] != eos).all()
        assert reply.finish_reason == ("stop" if reply.tokens[-1] == eos else "length")
        assert len(reply.tokens) == 150 or reply.finish_reason == "stop"
    assert {a.finish_reason for a in replies} == {"stop", "length"}


@on_both
def test_the_longest_prompt_gets_the_longest_answer(
    server: Server, served: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.let_replies_go_on(monkeypatch)
    prompt = dataclasses.replace(request_for(0).prompt, tokens=np.full(512, 7, np.int32))
    request = request_for(0, n=1, prompt=prompt, max_tokens=512)
    ((reply,),) = generate(server, request)
    assert len(reply.tokens) == 512
    assert largest_error(served, [request], [[reply]]) < TOLERANCE


@pytest.mark.nightly
@on_both
def test_the_server_keeps_idle_connections_longer_than_its_clients(server: Server) -> None:
    # Otherwise it may close a connection just when a client sends the next request, and the group would be lost.
    host, port = server.engine.url.removeprefix("http://").split(":")
    headers = {"Host": host, **authorization(server.config.network)}
    lines = ["GET /v1/models HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.settimeout(5.5)  # uvicorn's default is 5
        with pytest.raises(TimeoutError):  # there is nothing to read, so it is not closed
            while connection.recv(65536):
                pass


@on_all
def test_a_token_the_model_does_not_have_is_refused_and_the_server_lives(server: EngineInThread) -> None:
    size = server.engine.vocab_size
    for tokens in ([5, size], [-1, 5], []):
        prompt = dataclasses.replace(request_for(3).prompt, tokens=np.array(tokens, dtype=np.int32))
        with pytest.raises(ValueError, match=rf"prompt 3 .*{size - 1}"):
            generate(server, request_for(3, prompt=prompt))
    assert len(generate(server, request_for(3))[0]) == 4


@pytest.mark.parametrize(
    ("server", "num_tokens", "max_tokens", "reason"),
    [("sglang", 10, 2000, "maximum context"), ("sglang", 1024, 12, "1024"), vllm(1024, 12, "1024")],
    indirect=["server"],
)
def test_a_refusal_names_the_group_and_the_servers_reason(
    server: Server, num_tokens: int, max_tokens: int, reason: str
) -> None:
    prompt = dataclasses.replace(request_for(5).prompt, tokens=np.full(num_tokens, 7, dtype=np.int32))
    with pytest.raises(AsyncRLError, match=rf"training-5 .*400.*{reason}"):
        generate(server, request_for(5, prompt=prompt, max_tokens=max_tokens))


@on_both
def test_strangers_learn_only_that_the_server_lives(server: Server) -> None:
    url, key = server.engine.url, authorization(server.config.network)
    routes = listed_routes(url, key)
    assert {("POST", path) for path in server.control_routes} <= routes
    assert answered(url, [route for route in routes if not route[1].startswith(server.open_routes)]) == set()
    assert len(generate(server, request_for(3))[0]) == 4  # nobody has paused it


@on_both
def test_a_cancelled_group_ends_on_the_server_and_no_other_does(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine
    server.let_replies_go_on(monkeypatch)

    async def unfinished() -> int:
        return await asyncio.to_thread(server.num_unfinished)

    async def cancel_one() -> list[SampledReply]:
        requests = (request_for(i, n=9, max_tokens=900) for i in (0, 1))
        kept, cancelled = (asyncio.create_task(engine.generate(request)) for request in requests)
        while await unfinished() <= 9:
            assert not (kept.done() or cancelled.done())
        load = await engine.load()
        assert load is not None and 0 < load.running <= 18 and load.slots == 256 and load.kv_tokens > 1000
        await asyncio.to_thread(server.admin.pause, "retract")  # from now on nothing ends by itself
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await engine.cancelled.join()
        await asyncio.to_thread(server.admin.resume)
        while await unfinished() > 9:  # it updates its counts with the first tokens after the pause
            assert not kept.done()
        return await kept

    assert [len(reply.tokens) for reply in server.run(cancel_one())] == [900] * 9


@pytest.mark.nightly
def test_another_family_has_the_logprobs_of_transformers_too(tmp_path: Path) -> None:
    """It is served from the start, without a push."""
    folder = save_sharp_model(tmp_path, "tiny-llama")
    server = EngineInThread(server_config("sglang", folder), tmp_path / "logs")
    try:
        server.run(server.engine.start(), START_S)
        groups = [request_for(i, max_tokens=30, temperature=0.7) for i in range(6)]
        assert largest_error(load_model(folder), groups, generate(server, *groups)) < TOLERANCE
    finally:
        server.close()
