"""The check that a server at rollout.server_url can get the weights."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from async_rl.config.check import check
from async_rl.config.data import RolloutConfig
from async_rl.config.network import NetworkConfig
from async_rl.config.system import WeightSyncConfig


def check_server_reaches_learner(
    rollout: RolloutConfig, sync: WeightSyncConfig, network: NetworkConfig, num_nodes: int
) -> None:
    """Check that a server at rollout.server_url gets what the transport, unless it is auto, delivers.

    It is told to connect to network.host. On several nodes that is an address that Ray knows.
    """
    url, entry = rollout.server_url, sync.transport_entry
    if not url or entry is None or entry.delivers == "folder" or num_nodes > 1:
        return
    check(
        not network.is_on_loopback or _is_on_loopback(url), "rollout.server_url", url,
        f"on loopback with network.host {network.host} and weight_sync.transport {sync.transport}",
        "The server would look for the learner on its own host. Set network.host to the address by which it reaches "
        "this host, or weight_sync.transport: disk if both read the same files.",
    )


def _is_on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
