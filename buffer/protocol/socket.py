"""Opens the buffer's socket: a ROUTER at network.host, which admits only clients with the keys of network.keys."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from async_rl.config import NetworkConfig
from async_rl.errors import ConfigError
from async_rl.network.ports import shuffled
from buffer.protocol.keys import CurveAuthenticator

BIND_S = 10.0
"""Seconds that a port may take to become free: Ray ends an earlier buffer that does not respond only after 5 s."""
FREE_PORTS = (61000, 65536)
"""Range of ports for the buffer without network.ports, above those that Linux gives to outgoing connections, which
could take the buffer's port while it restarts."""
MAX_UNREAD = 1000
"""The most replies that are kept for a client that does not read them. It loses further ones, and nothing else: clients
repeat a request without a reply."""


class BufferSocket:
    """Opens the buffer's ROUTER socket at network.host and network.port (0: a free one of network.ports).

    `address` is its address.

    Raises ConfigError if the address can't be bound, or network.keys holds no keys.
    """

    def __init__(self, network: NetworkConfig, max_message_bytes: int) -> None:
        self._context = zmq.Context()
        self._authenticator: CurveAuthenticator | None = None
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.router.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        try:
            if network.keys:
                self._authenticator = CurveAuthenticator(self.router, Path(network.keys))
            self.address = _bind(self.router, network)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        self.router.close(linger=0)
        if self._authenticator:
            self._authenticator.stop()
        self._context.term()


def _bind(router: zmq.Socket[bytes], network: NetworkConfig) -> str:
    """Bind the socket to network.port, or to a free one of network.ports, and return its address."""
    until_s = time.monotonic() + BIND_S
    ports = [network.port] if network.port else shuffled(network.port_range or range(*FREE_PORTS))
    while True:
        for port in ports:
            try:
                router.bind(address := f"tcp://{network.host}:{port}")
                return address
            except zmq.ZMQError as error:
                failure = error
                if error.errno != zmq.EADDRINUSE:
                    break
        if failure.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
            raise ConfigError(
                f"network.host = {network.host}, network.port = {network.port}: the buffer can't bind it ({failure}). "
                "Set network.host to an address of this host, network.port to a free port or 0"
                + (f", network.ports (its part is {network.ports}) to more ports" if network.ports else "")
            ) from None
        time.sleep(0.1)
