"""Weights that a server receives while it samples with the old ones, until a pause swaps them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from rollout_server.engines.base import SampledReply
from tests.kit.engines.pushes import MODELS, connected, new_version, push, pushing
from tests.kit.engines.replies import TOLERANCE, generate, largest_error, request_for
from tests.kit.engines.servers import Server
from tests.kit.engines.tags import check_tags
from tests.kit.engines.vllm import vllm

pytestmark = pytest.mark.e2e

TEMPERATURE = 0.3
WAYS = [
    ("sglang", "in_place", "device"), ("sglang", "retract", "host"),
    vllm("in_place", "device"), vllm("retract", "host"),
]
"""Engine, weight_sync.on_update, weight_sync.double_buffer."""


@pytest.mark.parametrize(("server", "on_update", "staging"), WAYS, indirect=["server"])
def test_tokens_that_are_sampled_while_weights_travel_are_of_the_old_version(
    server: Server, on_update: str, staging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups are answered between two tensors of one push, and one group runs from before it until after it."""
    config, url = pushing(server, tmp_path, on_update, "gloo", staging), server.engine.url
    first = push(config, url)
    server.let_replies_go_on(monkeypatch)
    version, publisher = new_version(config), connected(config, url)
    models = {number: MODELS[number] for number in (first, version)}
    spanning = request_for(6, n=4, max_tokens=900, temperature=TEMPERATURE, group_id=first)
    short = [request_for(i, temperature=TEMPERATURE, group_id=version + i) for i in (1, 2, 3)]
    answered: list[list[SampledReply]] = []

    def travelling() -> Iterator[tuple[str, Tensor]]:
        named = list(MODELS[version].named_parameters())
        gaps = dict(zip((len(named) // 2, len(named) - 2, len(named) - 1), short, strict=True))
        for number, item in enumerate(named):
            if number in gaps:
                answered.append(server.run(server.engine.generate(gaps[number])))
            yield item

    async def generate_over_the_push() -> list[SampledReply]:
        group = asyncio.create_task(server.engine.generate(spanning))
        async with asyncio.timeout(30):
            while (load := await server.engine.load()) is None or load.running < 4:
                await asyncio.sleep(0.02)
        report = await asyncio.to_thread(publisher.push, travelling(), version)
        assert report.pause_s < report.seconds
        return await group

    replies = server.run(generate_over_the_push())
    publisher.close()
    assert len(answered) == 3
    for request, group in zip(short, answered, strict=True):
        for reply in group:
            assert set(reply.versions.tolist()) == {first}
            check_tags(models, request.prompt.tokens, reply, TEMPERATURE, keeps_kv=False)
    for reply in replies:
        assert set(reply.versions.tolist()) == {first, version}
        assert (reply.versions == first).sum() > 3 * short[0].max_tokens  # as many as each other group got meanwhile
        check_tags(models, spanning.prompt.tokens, reply, TEMPERATURE, keeps_kv=on_update == "in_place")
    (last,) = generate(server, request_for(4, group_id=version + 9))
    assert {v for reply in last for v in reply.versions.tolist()} == {version}


@pytest.mark.parametrize("server", ["sglang", vllm()], indirect=True)
def test_a_staged_push_that_breaks_off_changes_nothing(server: Server, tmp_path: Path) -> None:
    config, url = pushing(server, tmp_path, "in_place", "gloo", "device"), server.engine.url
    first = push(config, url)
    version, publisher = new_version(config), connected(config, url)

    def breaking_off() -> Iterator[tuple[str, Tensor]]:
        named = list(MODELS[version].named_parameters())
        yield from itertools.islice(named, len(named) - 1)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        publisher.push(breaking_off(), version)
    request = request_for(5, group_id=version)
    for _ in range(2):  # before and after the learner has left
        (replies,) = generate(server, request)
        assert {v for reply in replies for v in reply.versions.tolist()} == {first}
        assert largest_error(MODELS[first], [request], [replies]) < TOLERANCE
        publisher.close()
    push(config, url)
