from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import TimeoutsConfig
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from async_rl.base.models_and_data.model_folder import forbidden_tokens, load_tokenizer
from rollout_server.engines.base import Purpose, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config
from tests.kit.engines.replies import (
    SUPPORT_TOLERANCE,
    TOLERANCE,
    distributions,
    largest_error,
    request_for,
    same_replies,
    with_engine,
    wrong_sets,
)
from tests.kit.engines.tags import check_supports, check_tags
from tests.kit.models import save_sharp_model, sharp_model

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"))


async def replies_of(engine: HFEngine, indices: range, **changes: object) -> list[list[SampledReply]]:
    return await asyncio.gather(*(engine.generate(request_for(i, **changes)) for i in indices))


@pytest.mark.parametrize(("name", "temperature"), [("tiny-qwen2", 1.7), ("tiny-llama", 0.6)])
def test_logprobs_equal_a_recompute_by_transformers(tmp_path: Path, name: str, temperature: float) -> None:
    config = server_config("hf", save_sharp_model(tmp_path, name))
    groups = with_engine(config, lambda engine: replies_of(engine, range(6), temperature=temperature))
    requests = [request_for(index, temperature=temperature) for index in range(6)]
    assert largest_error(sharp_model(name, seed=0).eval(), requests, groups) < TOLERANCE


def test_special_tokens_can_be_forbidden_and_logprobs_are_of_the_others(folder: Path) -> None:
    config = server_config("hf", folder, forbid_special_tokens=True)
    tokenizer, model = load_tokenizer(folder), sharp_model("tiny-qwen2", seed=0).eval()
    forbidden = forbidden_tokens(config)
    assert forbidden and tokenizer.eos_token_id not in forbidden and set(forbidden) <= set(tokenizer.all_special_ids)
    groups = with_engine(config, lambda engine: replies_of(engine, range(4), n=8, temperature=3.0))
    requests = [request_for(index, n=8, temperature=3.0) for index in range(4)]
    assert not {int(token) for group in groups for reply in group for token in reply.tokens} & set(forbidden)
    assert largest_error(model, requests, groups, forbidden) < TOLERANCE
    assert largest_error(model, requests, groups) > TOLERANCE
    assert forbidden_tokens(server_config("hf", folder)) == ()


@pytest.mark.parametrize("rules", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.1}, {"top_p": 0.95, "min_p": 0.02}])
def test_each_token_has_the_ids_it_was_drawn_from_and_its_logprob_over_them(
    folder: Path, rules: dict[str, float]
) -> None:
    wanted = {"wants_support": True, "wants_support_logprobs": True}
    asked: dict[str, Any] = {"n": 6, "temperature": 1.3, "max_tokens": 40, **wanted, **rules}
    groups = with_engine(server_config("hf", folder), lambda engine: replies_of(engine, range(6), **asked))
    requests, model = [request_for(index, **asked) for index in range(6)], sharp_model("tiny-qwen2", seed=0).eval()
    assert largest_error(model, requests, groups) < SUPPORT_TOLERANCE
    num_cut = 0
    for request, replies in zip(requests, groups, strict=True):
        for reply in replies:
            assert reply.support is not None
            whole = distributions(model, request.prompt.tokens, reply.tokens, request.temperature)
            assert wrong_sets(whole, reply.support, request.sampling) == []
            assert reply.support.logprobs is not None
            owners = np.repeat(np.arange(len(reply.tokens)), reply.support.sizes)
            inside = np.exp(whole[owners, reply.support.ids])
            mass = np.bincount(owners, inside)[owners]
            np.testing.assert_allclose(reply.support.logprobs, np.log(inside / mass), atol=SUPPORT_TOLERANCE)
            num_cut += int((reply.support.sizes < whole.shape[1]).sum())
    assert num_cut > 100


def test_only_requests_that_want_them_get_supports_also_beside_others(folder: Path) -> None:
    async def mixed(engine: HFEngine) -> list[list[SampledReply]]:
        requests = (request_for(i, max_tokens=30, top_p=0.7, wants_support=i % 2 == 0) for i in range(6))
        return await asyncio.gather(*map(engine.generate, requests))

    groups = with_engine(server_config("hf", folder), mixed)
    model = sharp_model("tiny-qwen2", seed=0).eval()
    for index, replies in enumerate(groups):
        assert [reply.support is not None for reply in replies] == [index % 2 == 0] * 4
    # Without one it is over the whole vocabulary.
    assert largest_error(model, [request_for(i) for i in range(6)], groups) < TOLERANCE


def test_answers_end_at_the_eos_token_or_at_the_limit(folder: Path) -> None:
    groups = with_engine(server_config("hf", folder), lambda engine: replies_of(engine, range(40), max_tokens=30))
    eos = 2  # <eos> of the character tokenizer
    reasons = set()
    for reply in (c for group in groups for c in group):
        assert len(reply.tokens) == len(reply.logprobs) == len(reply.versions) <= 30
        assert eos not in reply.tokens[:-1]
        assert (reply.finish_reason == "stop") == (reply.tokens[-1] == eos)
        assert reply.finish_reason == "stop" or len(reply.tokens) == 30
        reasons.add(reply.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(folder: Path) -> None:
    async def alone(engine: HFEngine) -> list[list[SampledReply]]:
        return [await engine.generate(request_for(i, max_tokens=30)) for i in range(8)]

    async def staggered(engine: HFEngine) -> list[list[SampledReply]]:
        running = []
        for i in reversed(range(8)):
            running.append(asyncio.create_task(engine.generate(request_for(i, max_tokens=30))))
            await asyncio.sleep(0.004)
        return list(reversed(await asyncio.gather(*running)))

    config = server_config("hf", folder)
    separately, mixed = with_engine(config, alone), with_engine(config, staggered)
    for a, b in ((a, b) for x, y in zip(separately, mixed, strict=True) for a, b in zip(x, y, strict=True)):
        assert np.array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_an_evaluation_leaves_concurrent_training_answers_bit_equal(folder: Path) -> None:
    async def with_evaluation(engine: HFEngine) -> list[list[SampledReply]]:
        training = asyncio.create_task(replies_of(engine, range(8), max_tokens=30))
        for i in range(5):
            await asyncio.sleep(0.003)
            await engine.generate(request_for(i, purpose=Purpose.EVALUATION, max_tokens=5))
        return await training

    config = server_config("hf", folder)
    plain = with_engine(config, lambda engine: replies_of(engine, range(8), max_tokens=30))
    assert [len(replies) for replies in plain] == [4] * 8
    assert all(map(same_replies, plain, with_engine(config, with_evaluation)))


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("keep_kv", [True, False])
def test_new_weights_in_mid_answer_change_versions_and_logprobs_at_one_token(
    folder: Path, keep_kv: bool, top_p: float
) -> None:
    """With top_p also the ids that each token was drawn from."""
    models = {version: sharp_model("tiny-qwen2", seed).eval() for version, seed in enumerate((0, 5, 6))}
    request = request_for(3, n=6, max_tokens=100, top_p=top_p, wants_support=top_p < 1)

    async def update_inside(engine: HFEngine) -> list[SampledReply]:
        running = asyncio.create_task(engine.generate(request))
        for version in (1, 2):
            for _ in range(8):  # each takes one token or more
                await engine.between_tokens(lambda: None)
            await engine.pause(keep_kv=keep_kv)
            await engine.load_weights(dict(models[version].named_parameters()), version)
            engine.resume()
        return await running

    replies = with_engine(server_config("hf", folder), update_inside)
    changed = [c for c in replies if c.versions[-1] == 2]
    assert len({tuple(np.searchsorted(c.versions, [1, 2])) for c in changed}) == 1  # one boundary for all rows
    for reply in changed:
        assert set(reply.versions.tolist()) == {0, 1, 2}
        check_tags(models, request.prompt.tokens, reply, 1.0, keeps_kv=keep_kv)
        check_supports(models, request, reply, keeps_kv=keep_kv)


def test_requests_made_during_a_pause_wait_for_its_end(folder: Path) -> None:
    async def pause(engine: HFEngine) -> list[SampledReply]:
        await engine.pause(keep_kv=True)
        running = asyncio.create_task(engine.generate(request_for(0)))
        await asyncio.sleep(0.1)
        assert not running.done()
        engine.resume()
        return await running

    assert len(with_engine(server_config("hf", folder), pause)) == 4


def test_a_cancelled_request_leaves_the_others_running(folder: Path) -> None:
    async def cancel_one(engine: HFEngine) -> list[SampledReply]:
        cancelled = asyncio.create_task(engine.generate(request_for(0, max_tokens=500)))
        kept = asyncio.create_task(engine.generate(request_for(1, max_tokens=60)))
        await engine.between_tokens(lambda: None)
        cancelled.cancel()
        return await kept

    assert len(with_engine(server_config("hf", folder), cancel_one)) == 4


def test_a_model_failure_reaches_every_waiting_and_every_later_request(folder: Path) -> None:
    async def break_it(engine: HFEngine) -> list[object]:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("out of memory, say")

        engine.model.forward = fail
        at_once = (engine.generate(request_for(i)) for i in range(3))
        first = await asyncio.gather(*at_once, return_exceptions=True)
        return [*first, *await asyncio.gather(engine.generate(request_for(4)), return_exceptions=True)]

    for error in with_engine(server_config("hf", folder), break_it):
        assert isinstance(error, ProcessDiedError) and "out of memory, say" in str(error)


def test_a_wait_for_the_decode_thread_times_out_and_names_the_key(folder: Path) -> None:
    release = threading.Event()

    async def hold_up(engine: HFEngine) -> None:
        with pytest.raises(WaitTimeoutError, match=r"timeouts\.push_s"):
            await engine.between_tokens(release.wait)
        with pytest.raises(WaitTimeoutError, match=r"rollout/0 .*timeouts\.shutdown_s"):
            await engine.aclose()
        release.set()

    timeouts = TimeoutsConfig(push_s=0.2, shutdown_s=0.2)
    with_engine(dataclasses.replace(server_config("hf", folder), timeouts=timeouts), hold_up)
