"""Addresses at which sockets listen."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil

from async_rl.base.weights.transport import open_store


def test_the_rendezvous_store_listens_at_its_address_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = open_store("127.0.0.1", port, 0, 2, timedelta(seconds=20))
    peer = open_store("127.0.0.1", port, 1, 2, timedelta(seconds=20))
    store.set("key", "value")
    assert peer.get("key") == b"value"
    sockets = psutil.Process(os.getpid()).net_connections("tcp")
    assert [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port] == ["127.0.0.1"]
