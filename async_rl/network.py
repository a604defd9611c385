"""What leaving loopback asks for: the right network interface, and an API key on the rollout servers."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config import NetworkConfig
from async_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def use_interface(host: str) -> None:
    """Make torch.distributed and NCCL, here and in child processes, talk over the interface that has address `host`.

    Left to themselves they take the one that the host's name resolves to. What the user has set is kept.
    """
    for variable in _INTERFACE_VARIABLES:
        os.environ.setdefault(variable, interface_of(host))


def open_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Where the ranks of a torch.distributed group find each other. Rank 0 serves it, at `address` and nowhere else:
    torch by itself listens on every interface.
    """
    from torch.distributed import TCPStore

    if rank:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    listener = socket.create_server((address, port))
    return TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def interface_of(host: str) -> str:
    """
    Raises:
        ConfigError: no interface has this address; lists those there are.
    """
    import psutil

    addresses = {
        address.address: name for name, of_interface in psutil.net_if_addrs().items() for address in of_interface
    }
    if ipaddress.IPv4Address(host).is_loopback:
        return addresses["127.0.0.1"]
    if host not in addresses:
        found = ", ".join(f"{name} {a}" for a, name in addresses.items() if a.count(".") == 3)
        raise ConfigError(
            f"network.host must be an address of this host, got {host}; it has {found}. Where Ray chose it: "
            "`ray start --node-ip-address` names another"
        )
    return addresses[host]


def api_key(network: NetworkConfig) -> str:
    """Of the rollout servers of a run; who may talk to the buffer may talk to them. Empty: none is asked for.

    Raises:
        ConfigError: network.keys has no client key.
    """
    if not network.keys or ipaddress.IPv4Address(network.host).is_loopback:
        return ""
    file = Path(network.keys) / "client.key_secret"
    try:
        return hashlib.sha256(b"rollout server" + file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"network.keys: {file} can't be read ({error.strerror}): see `async-rl keys new`") from None


def authorization(network: NetworkConfig) -> dict[str, str]:
    """HTTP headers for requests to the run's rollout servers."""
    key = api_key(network)
    return {"Authorization": f"Bearer {key}"} if key else {}
