"""Pushes to servers that die, refuse or leave, over real HTTP and a real process group."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.config import Limit, NetworkConfig, RolloutConfig
from async_rl.errors import AsyncRLError, WeightSyncError
from async_rl.network import authorization
from async_rl.weights import broadcast
from async_rl.weights import publisher as publisher_module
from async_rl.weights.broadcast import BroadcastPublisher
from benchmarks.weight_receiver import ReceiverProcess
from tests.kit.configs import changed
from tests.kit.publishers import CONFIG, CPU, AcceptingHandler, PausingPublisher


class RefusingHandler(AcceptingHandler):
    status = 400


@pytest.fixture
def urls() -> Iterator[dict[str, str]]:
    servers = {h.__name__: ThreadingHTTPServer(("127.0.0.1", 0), h) for h in (AcceptingHandler, RefusingHandler)}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {name: f"http://127.0.0.1:{server.server_port}" for name, server in servers.items()}
    for server in servers.values():
        server.shutdown()
        server.server_close()


def test_a_dead_server_is_removed_and_every_tensor_is_still_gathered(urls: dict[str, str]) -> None:
    publisher = PausingPublisher(CONFIG, [urls["AcceptingHandler"], "http://127.0.0.1:9"], 0, CPU)
    gathered = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            gathered.append(number)
            yield str(number), torch.zeros(1)

    assert publisher.push(gather(), 1).lost == ("rollout/1",)
    assert gathered == list(range(5))  # because the other ranks gather them too
    assert publisher.servers == {"rollout/0": urls["AcceptingHandler"]}
    report = publisher.push(gather(), 1)
    assert (report.num_bytes, report.lost) == (1, ())
    publisher.close()


def test_a_live_server_that_refuses_twice_is_an_error(urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.5)
    publisher = PausingPublisher(CONFIG, [urls["RefusingHandler"]], 0, CPU)
    assert publisher.push([("w", torch.zeros(1))], 1).repeats
    with pytest.raises(WeightSyncError, match=r"rollout/0 failed.*answered 400"):
        publisher.push([("w", torch.zeros(1))], 1)
    publisher.close()


def test_a_live_server_that_requires_the_api_key_is_not_lost(
    urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client.key_secret").write_text("secret")
    network = NetworkConfig(host="10.0.0.9", keys=str(tmp_path))
    monkeypatch.setattr(AcceptingHandler, "key", authorization(network)["Authorization"])
    config = replace(CONFIG, network=network)
    publisher = PausingPublisher(config, [urls["AcceptingHandler"], "http://127.0.0.1:9"], 0, CPU)
    assert publisher.push([("w", torch.zeros(1))], 1).lost == ("rollout/1",)
    publisher.close()


def test_a_server_that_is_dead_before_the_first_push_is_removed_with_the_reason(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "ANSWER_WITHIN_S", 0.5)
    publisher = BroadcastPublisher(CONFIG, [urls["AcceptingHandler"], "http://127.0.0.1:9"], 0, CPU, backend="gloo")
    report = publisher.connect_living()
    assert (report.lost, report.cause) == (("rollout/1",), "joining the weight group: rollout/1 did not answer")
    assert publisher.servers == {"rollout/0": urls["AcceptingHandler"]}


@pytest.mark.parametrize("loses_slow_servers", [False, True])
def test_a_server_that_stood_still_before_a_push_is_pushed_to_again_a_few_times(
    loses_slow_servers: bool, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.1)
    monkeypatch.setattr(broadcast, "wait_for_all", lambda probes, limit_s: ("rollout/0",))
    publisher = BroadcastPublisher(CONFIG, [urls["AcceptingHandler"]] * 2, 0, CPU, backend="gloo")
    publisher.loses_slow_servers = loses_slow_servers
    for _ in range(publisher_module.SILENCES):
        report = publisher.connect_living()
        assert (report.lost, report.has_failed) == ((), True)
        assert report.cause == "joining the weight group: rollout/0 did not answer"
    if loses_slow_servers:
        assert publisher.connect_living().lost == ("rollout/0",)
        assert list(publisher.servers) == ["rollout/1"]
    else:
        with pytest.raises(WeightSyncError, match="rollout/0 did not answer"):
            publisher.push([("w", torch.zeros(1))], 1)


@pytest.mark.parametrize("loses_slow_servers", [False, True])
def test_a_live_server_that_does_not_join_is_an_error_unless_slow_ones_are_lost(
    loses_slow_servers: bool, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LOST_WITHIN_S", 0.5)
    publisher = BroadcastPublisher(CONFIG, [urls["AcceptingHandler"]], 0, CPU, backend="gloo")  # it only says so
    publisher.push_limit, publisher.loses_slow_servers = Limit(1.0, "timeouts.push_s"), loses_slow_servers
    if loses_slow_servers:
        assert publisher.connect_living().lost == ("rollout/0",)
    else:
        with pytest.raises(AsyncRLError, match=r"joining the weight group: .*learner rank 0"):
            publisher.connect_living()


@pytest.mark.processes
def test_a_server_that_outlives_the_run_is_told_to_leave_the_group() -> None:
    """A server of rollout.server_url would otherwise keep a group of every run."""
    with ReceiverProcess(num_tensors=1, config=CONFIG) as receiver:
        config = replace(CONFIG, rollout=RolloutConfig(server_url=receiver.url))
        publisher = BroadcastPublisher(config, [receiver.url], 0, CPU, backend="gloo")
        publisher.push([(receiver.names[0], torch.ones(512, 512))], 1)
        group_name, admin = publisher.group_name, publisher.admin("rollout/0")
        publisher.close()
        with pytest.raises(WeightSyncError, match=rf"KeyError: '{group_name}'"):  # it has left already
            admin.leave_group(group_name)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("staging", ["none", "device"])
def test_a_push_is_repeated_without_a_receiver_that_was_killed_during_it(staging: Any) -> None:
    # The loss is noticed, not waited out.
    config = changed(CONFIG, timeouts={"push_s": 200.0}, rollout={"engine": "hf"}, weight_sync={"staging": staging})
    receivers = [ReceiverProcess(num_tensors=8, config=config) for _ in range(2)]
    publisher = BroadcastPublisher(config, [r.url for r in receivers], 0, CPU, backend="gloo")
    tensors = {name: torch.full((512, 512), float(number)) for number, name in enumerate(receivers[0].names)}

    def killing() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors.items()):
            if number == 3:
                receivers[1].process.send_signal(signal.SIGKILL)
            yield item

    try:
        publisher.push(tensors.items(), 1)
        assert publisher.push(killing(), 2).lost == ("rollout/1",)
        assert receivers[0].version() == 1
        report = publisher.push(tensors.items(), 2)
        assert report.lost == ()
        assert report.num_bytes == 8 * 2**20
        assert receivers[0].version() == 2
        assert receivers[0].checksum() == sum(t.double().sum().item() for t in tensors.values())
        receivers.append(ReceiverProcess(num_tensors=8, config=config))  # it joins late
        publisher.servers["rollout/1"] = receivers[2].url
        publisher.push(tensors.items(), 3)
        assert [receivers[0].version(), receivers[2].version()] == [3, 3]
        assert receivers[2].checksum() == receivers[0].checksum()
        publisher.close()
    finally:
        for receiver in receivers:
            receiver.close()
