"""The ports of a run's sockets: those of network.ports for each process, and a free one of them."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from async_rl.config import Config, NetworkConfig
from async_rl.config.check import check
from async_rl.errors import ConfigError

PORTS_PER_PROCESS = 4
"""Ports for a server, which takes one or two, while another run may have taken some; and for buffer and learner rank 0
together: those of the buffer, of the store of all ranks, of that of a weight group, and of that of the group that
replaces it."""


def network_of(config: Config, process: str) -> NetworkConfig:
    """Return the network section for a process of the run, with its part of network.ports.

    Args:
        process: a name of Config.server_names or Config.judge_names; buffer and learner ranks share one part.
    """
    servers = (*config.server_names, *config.judge_names)
    number = servers.index(process) + 1 if process in servers else 0
    return config.network.with_part(number, of=1 + len(servers))


def check_ports(config: Config) -> None:
    """Check that network.ports gives each part of `network_of` enough ports. Raises ConfigError if not."""
    servers = config.placement.num_servers
    least = PORTS_PER_PROCESS * (1 + servers)
    check(
        not config.network.ports or len(config.network.port_range) >= least, "network.ports", config.network.ports,
        f"at least {least} ports for {servers} server(s), buffer and learner",
    )


def open_listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens at `host`, on a free one of `ports`; if those are empty on any free one.

    Raises:
        ConfigError: all of them are taken, or this host has no such address.
    """
    if not ports:
        return socket.create_server((host, 0))
    for port in shuffled(ports):
        try:
            return socket.create_server((host, port))
        except OSError as error:
            failure = error
    raise ConfigError(f"network.ports: none of {ports[0]}-{ports[-1]} is free on {host} ({failure}). Give more ports")


def shuffled(ports: Sequence[int]) -> list[int]:
    """Return the ports in an order that is another each time, so that runs that share them seldom try the same."""
    return random.SystemRandom().sample(ports, len(ports))
