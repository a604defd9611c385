"""Pushes in buckets over gloo to a real receiver: their memory, their overlap of gathering and sending, failures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from async_rl.base.weights.transport import BroadcastTransport, open_gloo
from tests.kit.configs import make_config
from tests.kit.engines.forked_receiver import ForkedReceiver
from tests.kit.publishers import publisher_for

pytestmark = pytest.mark.processes

MB = 2**20
CONFIG = make_config(rollout={"engine": "hf"}, weight_sync={"bucket_bytes": 4 * MB}, timeouts={"push_s": 20.0})


@pytest.fixture(scope="module")
def receiver() -> Iterator[ForkedReceiver]:
    """A receiver of 32 tensors of 1 MB each, which fill eight buckets."""
    with ForkedReceiver(num_tensors=32, config=CONFIG) as receiver:
        yield receiver


def gathered(receiver: ForkedReceiver, value: float) -> Iterator[tuple[str, Tensor]]:
    """Create each tensor when it is requested, like a gather of a sharded parameter."""
    for name in receiver.names:
        yield name, torch.full((512, 512), value)


def test_a_push_holds_two_buckets_and_the_tensor_that_is_gathered(receiver: ForkedReceiver) -> None:
    publisher = publisher_for(CONFIG, [receiver.url], open_gloo)
    publisher.transport.connect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        report = publisher.push(gathered(receiver, 2.0), 1)
    publisher.close()
    assert report.num_bytes == 32 * MB
    assert receiver.checksum() == 2.0 * 32 * MB / 4
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak_bytes = max(itertools.accumulate(size for _, size in changes))
    # 2 buckets of 4 MB, the gathered tensor that is copied, and the one before it until it is replaced.
    assert 8 * MB <= peak_bytes <= 10 * MB + 2**16


def test_the_next_bucket_is_gathered_while_one_is_broadcast(receiver: ForkedReceiver) -> None:
    next_began = [threading.Event() for _ in range(9)]

    class EventTransport(BroadcastTransport):
        num_sent = 0

        def broadcast(self, data: Tensor, filled: torch.cuda.Event | None) -> None:
            self.num_sent += 1
            assert next_began[self.num_sent].wait(10)  # fails if the gather waits for the broadcast
            super().broadcast(data, filled)

    def watched() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(gathered(receiver, 3.0)):
            next_began[number // 4].set()
            yield item
        next_began[8].set()

    publisher = publisher_for(CONFIG, [receiver.url], partial(EventTransport, backend="gloo"))
    publisher.push(watched(), 2)
    publisher.close()
    assert publisher.transport.num_sent == 8  # type: ignore[attr-defined]
    assert receiver.checksum() == 3.0 * 32 * MB / 4


def test_a_push_that_breaks_off_overwrites_no_weights_in_use(receiver: ForkedReceiver) -> None:
    publisher = publisher_for(CONFIG, [receiver.url], open_gloo)

    def breaking_off() -> Iterator[tuple[str, Tensor]]:
        yield from itertools.islice(gathered(receiver, -1.0), 20)
        raise ArithmeticError

    for version in range(4, 8):  # buffers of replaced weights are used again
        publisher.push(gathered(receiver, float(version)), version)
        with pytest.raises(ArithmeticError):
            publisher.push(breaking_off(), version + 1)
        assert receiver.version() == version
        assert receiver.checksum() == version * 32 * MB / 4
    publisher.close()
