"""The ports of a run's sockets: each process's part of network.ports, and free ports in it."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError

PORTS_PER_PROCESS = 4
"""The ports of a server, which uses one or two of them; another run may have taken some."""
OWN_PARTS = 2
"""Buffer and learner rank 0 together get the ports of this many servers: one for the buffer, one for the store of all
ranks, and three each for the stores of the weight groups of rollout and evaluation servers. A group that fails while
its servers join leaves its port taken for up to timeouts.push_s, and the next attempt needs another."""


def ports_of(config: Config, process: str) -> str:
    """Return a process's part of network.ports, as FIRST-LAST.

    Args:
        process: a name in Config.server_names or Config.judge_names. Buffer and learner ranks share OWN_PARTS.
    """
    servers = (*config.server_names, *config.judge_names)
    of = OWN_PARTS + len(servers)
    if process in servers:
        return config.network.ports_in(OWN_PARTS + servers.index(process), 1, of)
    return config.network.ports_in(0, OWN_PARTS, of)


def check_ports(config: Config) -> None:
    """Raise ConfigError unless network.ports has enough ports for each process."""
    servers = config.placement.num_servers
    least = PORTS_PER_PROCESS * (OWN_PARTS + servers)
    check(
        not config.network.ports or len(config.network.port_range) >= least, "network.ports", config.network.ports,
        f"at least {least} ports for {servers} server(s), buffer and learner",
    )


def open_listener(host: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens at `host`, on a free port of `ports`, or on any free port if `ports` is empty.

    Raises:
        ConfigError: all ports are taken, or this host has no such address.
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
    """Return the ports in random order, so that runs with common ports rarely try the same one first."""
    return random.SystemRandom().sample(ports, len(ports))
