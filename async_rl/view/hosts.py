"""Checks by which name the page is asked for, so that no page of another site can read it (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
"""An address of IPv6 in brackets, or a name or address of IPv4; then perhaps a port."""

REFUSAL = "This page is shown under localhost, or the name or an IP address of the machine that serves it, only.\n"


class HostCheck:
    """Refuses requests whose header Host is neither `localhost`, an IP address, nor one of `names`.

    A site that lets its own name point to this machine has a browser send that name. An address can't be redirected so.

    Args:
        is_loopback: whether only programs of this machine reach the page; other addresses are then refused as well.
        names: further names under which it may be asked for.
    """

    def __init__(self, app: ASGIApp, is_loopback: bool, names: Collection[str]) -> None:
        self._app = app
        self._is_loopback = is_loopback
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(Headers(scope=scope).getlist("host")):
            await self._app(scope, receive, send)
            return
        await PlainTextResponse(REFUSAL, 400)(scope, receive, send)

    def _is_allowed(self, hosts: list[str]) -> bool:
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None:
            return False
        name = (found[1] or found[2]).lower()
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return found[2] is not None and name in self._names
        return address.is_loopback or not self._is_loopback


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only programs of this machine reach a socket that listens: its address is 127.x.x.x or ::1."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def shown_name(listener: socket.socket) -> str:
    """Return the name of a socket that listens for an address in a browser: its own address, or a name that stands
    for it."""
    address = ipaddress.ip_address(listener.getsockname()[0])
    if str(address) in ("127.0.0.1", "::1"):
        return "localhost"
    if address.is_unspecified:
        return socket.gethostname()
    return f"[{address}]" if address.version == 6 else str(address)


def own_names() -> list[str]:
    """Return the names of this machine that it knows: its host name, with and without its domain."""
    names = {socket.gethostname(), socket.getfqdn()}
    with suppress(OSError):
        name, aliases, _ = socket.gethostbyname_ex(socket.gethostname())
        names |= {name, *aliases}
    return sorted(names | {name.partition(".")[0] for name in names})
