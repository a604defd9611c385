"""Network interfaces, torch.distributed stores, and the API key of rollout servers."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from async_rl.base.config import NetworkConfig
from async_rl.base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "=", "TP_SOCKET_IFNAME": ""}
"""Variables that name an interface, each with the prefix of its value: without `=` NCCL also takes eth10 for eth1."""
_NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""The values that SGLang sets in its servers. All ranks of a group on a host must agree; NCCL itself has both on."""


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


def open_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta,
    listener: socket.socket | None = None,
) -> TCPStore:
    """Return the store through which the ranks of a torch.distributed group find each other.

    Rank 0 serves the store only at `address` (torch's default is every interface). Other ranks connect to it.

    Args:
        port: 0 on rank 0: a free one.
        timeout: how long other ranks try to connect.
        listener: a socket of rank 0 that listens there already.
    """
    from torch.distributed import TCPStore

    if rank:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    listener = listener or socket.create_server((address, port))
    return TCPStore(
        address, listener.getsockname()[1], world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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
