"""The ports at which sockets listen, on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.network import check_ports, open_listener, ports_of
from async_rl.base.weights.transport import open_store
from buffer.server import BufferSocket
from rollout_server.engines.server_process import free_port
from tests.kit.configs import make_config


@pytest.fixture
def own_ports() -> Iterator[range]:
    """Twelve ports of which all but the last are taken."""
    for first in range(20_000, 30_000, 12):
        ports = range(first, first + 12)
        with ExitStack() as taken:
            try:
                for port in ports:
                    listener = taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:  # by a stranger
                continue
            listener.close()
            yield ports
            return
    raise AssertionError("this host has no twelve free ports in a row")


def test_all_that_listens_finds_the_one_port_of_the_range_that_is_free(own_ports: range) -> None:
    last, text = own_ports[-1], f"{own_ports[0]}-{own_ports[-1]}"
    with open_listener("127.0.0.1", own_ports) as listener:
        assert listener.getsockname()[1] == last
        with pytest.raises(ConfigError, match=rf"^network\.ports: .*{text}.* 127\.0\.0\.1"):
            open_listener("127.0.0.1", own_ports)
    assert free_port("127.0.0.1", own_ports) == last
    config = make_config(network={"ports": text, "insecure": True})
    buffer = BufferSocket(config.network, max_message_bytes=1000)
    assert buffer.address == f"tcp://127.0.0.1:{last}"
    buffer.close()
    listener = open_listener("127.0.0.1", config.network.port_range)
    store = open_store("127.0.0.1", 0, 0, 2, timedelta(seconds=20), listener)
    assert store.port == last


def test_each_server_has_a_part_of_the_ports_that_no_other_process_takes() -> None:
    placement = {"rollout": {"servers": 2}, "eval": {"servers": 1}}
    config = make_config(network={"ports": "20000-20023"}, placement=placement, eval={"every_steps": 1})
    names = ["buffer", "learner/0", "learner/3", "rollout/0", "rollout/1", "eval/0"]
    parts = [ports_of(config, name) for name in names]
    assert parts == ["20000-20008"] * 3 + ["20009-20013", "20014-20018", "20019-20023"]
    assert ports_of(make_config(), "rollout/0") == ""


@pytest.mark.parametrize("ports", ["20000", "20000-", "80-20000", "20100-20000", "20000-70000", "2e4-20100"])
def test_a_range_of_ports_that_is_none_is_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match=rf"^network\.ports .*got .{ports}"):
        make_config(network={"ports": ports})


def test_too_few_ports_for_the_servers_are_refused() -> None:
    def check(ports: str) -> None:
        check_ports(make_config(network={"ports": ports}, placement={"rollout": {"servers": 2}}))

    check("")
    check("20000-20015")
    with pytest.raises(ConfigError, match=r"^network\.ports .* 16 ports"):
        check("20000-20014")
