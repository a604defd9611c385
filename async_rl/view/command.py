"""`async-rl view`: serves the page of a run or a sweep from a process of its own, at low priority."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.view.library import Library

NICENESS = 10
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SHUTDOWN_LIMIT_S = 1


def serve(folder: Path, port: int, host: str) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigError: the folder is neither a run nor a sweep, or the port can't be opened.
    """
    library = Library(folder)
    listener = open_port(host, port)
    import uvicorn

    from async_rl.view.app import make_app

    os.nice(NICENESS)  # the run needs the cores more
    is_loopback = host in LOOPBACK
    config = uvicorn.Config(
        make_app(library, is_loopback), log_level="warning", access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
    )  # fmt: skip
    shown_host = "localhost" if is_loopback else socket.gethostname()
    print(f"{folder}: http://{shown_host}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
    if not is_loopback:
        print(f"Whoever reaches {host} can read this run: there is no password.", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[listener])


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the port; 0 takes a free one.

    Raises:
        ConfigError: the port is out of range or taken, or this machine does not have the address.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {port}; 0 takes a free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host must be an address of this machine, got {host!r}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port} on {host} can't be opened: {error.strerror}. Another page may be open there; take another "
            "port, or --port 0 for a free one"
        ) from None
    return listener
