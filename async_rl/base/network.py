"""Network interfaces, the ports of a run's sockets, and the API key of rollout servers."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from async_rl.base.config import Config, NetworkConfig
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError

_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "=", "TP_SOCKET_IFNAME": ""}
"""Variables that name an interface, each with the prefix of its value: without `=` NCCL also takes eth10 for eth1."""
_NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""The values that SGLang sets in its servers. All ranks of a group on a host must agree; NCCL itself has both on."""
PORTS_PER_PROCESS = 4
"""The ports of a server, which uses one or two of them; another run may have taken some."""
OWN_PARTS = 2
"""Buffer and learner rank 0 together get the ports of this many servers: one for the buffer, one for the store of all
ranks, and three each for the stores of the weight groups of rollout and evaluation servers. A group that fails while
its servers join leaves its port taken for up to timeouts.push_s, and the next attempt needs another."""


def use_interface(host: str) -> None:
    """Make torch.distributed and NCCL, in this and child processes, use the interface with address `host`.

    By default they use the interface to which the host's name resolves. Environment variables already set are kept.
    """
    for variable, before in _INTERFACE_VARIABLES.items():
        os.environ.setdefault(variable, before + interface_of(host))


def agree_on_nccl() -> None:
    """Make NCCL, in this and child processes, share memory as SGLang's servers do.

    Call it before torch opens a group. Environment variables already set are kept, also by SGLang.
    """
    for variable, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(variable, value)


def interface_of(host: str) -> str:
    """Return the name of the network interface with address `host`.

    Raises:
        ConfigError: no interface has this address; the message lists the interfaces that exist.
    """
    addresses = {each.address: name for name, found in psutil.net_if_addrs().items() for each in found}
    if ipaddress.IPv4Address(host).is_loopback:
        return addresses["127.0.0.1"]
    if host not in addresses:
        own = ", ".join(f"{name} {a}" for a, name in addresses.items() if a.count(".") == 3)
        raise ConfigError(
            f"network.host must be an address of this host, got {host}; it has {own}. If Ray chose it, start "
            "Ray with `ray start --node-ip-address` and another one"
        )
    return addresses[host]


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


def api_key(network: NetworkConfig) -> str:
    """Return the API key of a run's rollout servers, derived from the clients' key; "" without network.keys.

    Raises:
        ConfigError: the folder network.keys has no readable client key.
    """
    if not network.keys:
        return ""
    file = Path(network.keys) / "client.key_secret"
    try:
        return hashlib.sha256(b"rollout server" + file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"network.keys: {file} can't be read ({error.strerror}): see `async-rl keys new`") from None


def authorization(network: NetworkConfig) -> dict[str, str]:
    """Return the HTTP headers for requests to the run's rollout servers; {} without an API key."""
    key = api_key(network)
    return {"Authorization": f"Bearer {key}"} if key else {}
