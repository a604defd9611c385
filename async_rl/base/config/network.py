"""The section network of the configuration: address, ports and keys of a run's sockets."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from async_rl.base.config.check import check
from async_rl.base.config.section import PathText, checked, section


def _is_one_interface(host: str) -> bool:
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def _is_range(ports: str) -> bool:
    match = re.fullmatch(r"(\d{4,5})-(\d{4,5})", ports)
    return not ports or (match is not None and 1024 <= int(match[1]) <= int(match[2]) < 2**16)


def is_server_url(url: str) -> bool:
    """Whether requests can be sent below `url`: it has no query or fragment, and no user, which can't be sent."""
    if re.search(r"[\s?#]", url):
        return False
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # the port is no number, or none that a port can have
        return False
    return is_address and parts.scheme in ("http", "https")


@section("network")
class NetworkConfig:
    """The address of a run's sockets and the keys that protect them, also from other users of the same host. In a run
    on several hosts, each process listens on the address that Ray has for its node (`ray start --node-ip-address`).
    """

    host: Annotated[str, checked(_is_one_interface, (
        "the IPv4 address of one interface, in numbers (127.0.0.1 where all processes share a host, else an address of "
        "this host that the others reach)"
    ))] = "127.0.0.1"  # fmt: skip
    """The IPv4 address that sockets bind and others reach. An address beyond loopback needs keys, or insecure."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """The port of the buffer. 0: a free one."""
    ports: Annotated[str, checked(_is_range, (
        "two ports from 1024 to 65535, such as 20000-20099, or empty"
    ))] = ""  # fmt: skip
    """The ports of all sockets of a run that other hosts connect to, FIRST-LAST, for a firewall between them: the
    buffer (unless `port` is set), the servers, and the stores that torch.distributed finds its ranks with. Each is a
    free one of these, and several runs may share a range. Ray, NCCL and gloo have settings of their own. Empty: any."""
    keys: PathText = ""
    """The folder made by `async-rl keys new`. Empty: at each start the run makes keys of its own, which it removes at
    its end. With keys, groups and batches are encrypted, the buffer accepts only clients that hold the client's key,
    and rollout servers ask for an API key made from that key."""
    insecure: bool = False
    """Make no keys, and accept that whoever reaches `host`, on loopback every user and program of this host, can read
    the training data and write into it."""

    def __post_init__(self) -> None:
        check(
            self.is_on_loopback or bool(self.keys) or self.insecure, "network.host", self.host,
            "a loopback address unless network.keys or network.insecure is set",
            "Make keys with `async-rl keys new DIR` and set network.keys: DIR.",
        )

    def ports_in(self, first: int, count: int, of: int) -> str:
        """Return `count` parts of `ports`, divided into `of`, so that processes take different ones."""
        ports = self.port_range
        part = ports[first * len(ports) // of : (first + count) * len(ports) // of]
        return f"{part[0]}-{part[-1]}" if ports else ""

    @property
    def port_range(self) -> range:
        """The ports of `ports`; empty if any will do."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if self.ports else range(0)

    @property
    def is_on_loopback(self) -> bool:
        """Whether `host` is a loopback address, so that no other host can reach the sockets."""
        return ipaddress.IPv4Address(self.host).is_loopback
