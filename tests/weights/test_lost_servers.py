"""Pushes to servers that are dead, require a key, or outlive the run, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from async_rl.base.config import NetworkConfig
from async_rl.base.errors import WeightSyncError
from async_rl.base.network import authorization
from async_rl.base.weights.transport import BroadcastTransport, open_gloo
from tests.kit.configs import changed
from tests.kit.engines.forked_receiver import ForkedReceiver
from tests.kit.publishers import CONFIG, AcceptingHandler, answering, names, publisher_for

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a server that accepts whatever it is asked."""
    with answering() as url:
        yield url


def test_a_dead_server_is_removed_and_every_tensor_is_still_gathered(url: str) -> None:
    publisher = publisher_for(CONFIG, [url, DEAD])
    gathered = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            gathered.append(number)
            yield str(number), torch.zeros(1)

    assert names(publisher.push(gather(), 1).lost) == ("rollout/1",)
    assert gathered == list(range(5))  # because the other ranks gather them too
    assert [member.url for member in publisher.members.current] == [url]
    report = publisher.push(gather(), 1)
    assert (report.num_bytes, report.lost) == (1, ())
    publisher.close()


def test_a_live_server_that_requires_the_api_key_is_not_lost(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client.key_secret").write_text("secret")
    network = NetworkConfig(host="10.0.0.9", keys=str(tmp_path))
    monkeypatch.setattr(AcceptingHandler, "key", authorization(network)["Authorization"])
    publisher = publisher_for(changed(CONFIG, network=network), [url, DEAD])
    assert names(publisher.push([("w", torch.zeros(1))], 1).lost) == ("rollout/1",)
    publisher.close()


@pytest.mark.processes
def test_a_server_that_outlives_the_run_is_told_to_leave_the_group() -> None:
    """A server of rollout.server_url would otherwise keep a group of every run."""
    with ForkedReceiver(num_tensors=1, config=CONFIG) as receiver:
        publisher = publisher_for(changed(CONFIG, rollout={"server_urls": [receiver.url]}), [receiver.url], open_gloo)
        publisher.push([(receiver.names[0], torch.ones(512, 512))], 1)
        assert isinstance(publisher.transport, BroadcastTransport)
        group_name, admin = publisher.transport.group_name, publisher.members.admin("rollout/0")
        publisher.close()
        with pytest.raises(WeightSyncError, match=group_name):  # it has left already
            admin.leave_group(group_name)
