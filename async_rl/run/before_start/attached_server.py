"""Checks of servers that the run does not start: those at rollout.server_urls."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import psutil

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError


def check_server_reaches_learner(config: Config) -> None:
    """Check that the servers at rollout.server_urls can reach the learner at network.host, if the transport needs that.

    Nothing is checked for weight_sync.transport auto, or on several nodes, where Ray's addresses are used.

    Raises:
        ConfigError: the server is on another host but network.host is on loopback; or a server's name is unknown.
    """
    transport, entry = config.weight_sync.transport, config.weight_sync.transport_entry
    if entry is None or entry.delivers == "folder" or config.placement.num_nodes > 1:
        return
    for url in config.rollout.server_urls:
        check(
            not config.network.is_on_loopback or _is_here(url), "rollout.server_urls", url,
            f"on this host with network.host {config.network.host} and weight_sync.transport {transport}",
            "The server would look for the learner on its own host. Set network.host to the address by which it "
            "reaches this host, or weight_sync.transport: disk if both read the same files. If it is on this host, "
            "write 127.0.0.1 in the URL.",
        )


def _is_here(url: str) -> bool:
    """Whether the host in `url`, a name or an address, is this host.

    0.0.0.0, where servers listen, counts as this host.
    """
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"rollout.server_urls must have a host that can be found, got {url!r}: {error}. Correct the name, or write "
            "the host's address"
        ) from None
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    addresses = [_plain(str(address[0])) for *_, address in found]
    return any(str(each) in own or each.is_loopback or each.is_unspecified for each in addresses)


def _plain(text: str) -> IPv4Address | IPv6Address:
    """Parse an IP address. IPv4 in the form of IPv6, such as ::ffff:127.0.0.1, becomes IPv4."""
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
