from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.config import TimeoutsConfig
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from rollout_server.engines.base import Purpose, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config
from tests.kit.engines.replies import (
    SUPPORT_TOLERANCE,
    over_updates,
    request_for,
    same_replies,
    with_engine,
)
from tests.kit.engines.tags import check_supports, check_tags
from tests.kit.models import sharp_model

pytestmark = pytest.mark.processes  # together they compute for long


async def replies_of(engine: HFEngine, indices: range, **changes: object) -> list[list[SampledReply]]:
    return await asyncio.gather(*(engine.generate(request_for(i, **changes)) for i in indices))


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(model_folder: Path) -> None:
    async def alone(engine: HFEngine) -> list[list[SampledReply]]:
        return [await engine.generate(request_for(i, max_tokens=30)) for i in range(8)]

    async def staggered(engine: HFEngine) -> list[list[SampledReply]]:
        running = []
        for i in reversed(range(8)):
            running.append(asyncio.create_task(engine.generate(request_for(i, max_tokens=30))))
            await asyncio.sleep(0.004)
        return list(reversed(await asyncio.gather(*running)))

    config = server_config("hf", model_folder)
    separately, mixed = with_engine(config, alone), with_engine(config, staggered)
    for a, b in ((a, b) for x, y in zip(separately, mixed, strict=True) for a, b in zip(x, y, strict=True)):
        assert np.array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_an_evaluation_leaves_concurrent_training_answers_bit_equal(model_folder: Path) -> None:
    async def with_evaluation(engine: HFEngine) -> list[list[SampledReply]]:
        training = asyncio.create_task(replies_of(engine, range(8), max_tokens=30))
        for i in range(5):
            await asyncio.sleep(0.003)
            await engine.generate(request_for(i, purpose=Purpose.EVALUATION, max_tokens=5))
        return await training

    config = server_config("hf", model_folder)
    plain = with_engine(config, lambda engine: replies_of(engine, range(8), max_tokens=30))
    assert [len(replies) for replies in plain] == [4] * 8
    assert all(map(same_replies, plain, with_engine(config, with_evaluation)))


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("keep_kv", [True, False])
def test_new_weights_in_mid_answer_change_versions_and_logprobs_at_one_token(
    model_folder: Path, keep_kv: bool, top_p: float
) -> None:
    """With top_p also the ids that each token was drawn from."""
    models = {version: sharp_model("tiny-qwen2", seed).eval() for version, seed in enumerate((0, 5, 6))}
    request = request_for(3, n=6, max_tokens=100, top_p=top_p, wants_support=top_p < 1)

    replies = over_updates(server_config("hf", model_folder), request, models, keep_kv)
    changed = [c for c in replies if c.versions[-1] == 2]
    assert len({tuple(np.searchsorted(c.versions, [1, 2])) for c in changed}) == 1  # one boundary for all rows
    for reply in changed:
        assert set(reply.versions.tolist()) == {0, 1, 2}
        check_tags(models, request.prompt.tokens, reply, 1.0, keeps_kv=keep_kv, tolerance=SUPPORT_TOLERANCE)
        check_supports(models, request, reply, keeps_kv=keep_kv)


def test_a_cancelled_request_leaves_the_others_running(model_folder: Path) -> None:
    async def cancel_one(engine: HFEngine) -> list[SampledReply]:
        cancelled = asyncio.create_task(engine.generate(request_for(0, max_tokens=500)))
        kept = asyncio.create_task(engine.generate(request_for(1, max_tokens=60)))
        await engine.between_tokens(lambda: None)
        cancelled.cancel()
        return await kept

    assert len(with_engine(server_config("hf", model_folder), cancel_one)) == 4


def test_a_model_failure_reaches_every_waiting_and_every_later_request(model_folder: Path) -> None:
    async def break_it(engine: HFEngine) -> list[object]:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("out of memory, say")

        engine.model.forward = fail
        at_once = (engine.generate(request_for(i)) for i in range(3))
        first = await asyncio.gather(*at_once, return_exceptions=True)
        return [*first, *await asyncio.gather(engine.generate(request_for(4)), return_exceptions=True)]

    for error in with_engine(server_config("hf", model_folder), break_it):
        assert isinstance(error, ProcessDiedError) and "out of memory, say" in str(error)


def test_a_wait_for_the_decode_thread_times_out_and_names_the_key(model_folder: Path) -> None:
    release = threading.Event()

    async def hold_up(engine: HFEngine) -> None:
        with pytest.raises(WaitTimeoutError, match=r"timeouts\.push_s"):
            await engine.between_tokens(release.wait)
        with pytest.raises(WaitTimeoutError, match=r"rollout/0 .*timeouts\.shutdown_s"):
            await engine.aclose()
        release.set()

    timeouts = TimeoutsConfig(push_s=0.2, shutdown_s=0.2)
    with_engine(dataclasses.replace(server_config("hf", model_folder), timeouts=timeouts), hold_up)
