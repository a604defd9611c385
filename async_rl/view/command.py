"""`async-rl view`: serves the page of a run or a sweep from a process of its own, at low priority."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.view.library import Library

DEFAULT_PORT = 8717
"""A fixed port, so that a link to a group works for everyone who has the run directory."""
NICENESS = 10
LOOPBACK = "127.0.0.1"
SHUTDOWN_LIMIT_S = 5
END_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1


def serve(folder: Path, port: int, host: str) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigError: the folder is neither a run nor a sweep, or the port can't be opened.
    """
    library = Library(folder)
    listener = open_port(host, port)
    import uvicorn

    from async_rl.view.app import make_app
    from async_rl.view.connections import TimedConnection
    from async_rl.view.hosts import is_loopback, own_names, shown_name

    os.nice(NICENESS)  # the run needs the cores more
    is_local = is_loopback(listener)
    app = make_app(library, is_local, [] if is_local else [host, *own_names()])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, http=TimedConnection,
        timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
    )  # fmt: skip
    advice = "  (Ctrl-C ends it)" if sys.stdin.isatty() else ""
    print(f"{folder}: http://{shown_name(listener)}:{listener.getsockname()[1]}{advice}", flush=True)
    if not is_local:
        print(f"Whoever reaches {host} can read this run: there is no password.", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended in order
        server = uvicorn.Server(config)
        app.state.is_ending = lambda: server.should_exit
        server.run(sockets=[listener])


@contextmanager
def shown(run_dir: Path) -> Iterator[None]:
    """Serve the page of a run that is about to start, from a process that ends with the block or with this process.

    The port is DEFAULT_PORT, or a free one if that is taken.
    """
    try:
        open_port(LOOPBACK, DEFAULT_PORT).close()
        port = DEFAULT_PORT
    except ConfigError:
        port = 0
    command = [sys.executable, "-m", "async_rl.cli", "view", str(run_dir), "--port", str(port)]
    # A session of its own: Ctrl-C lets the run finish its step, and the page shows that.
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        print(f"async-rl view {run_dir} shows the run again", flush=True)


def _end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies. It runs in the child, before the program starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the port; 0 takes a free one.

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
        listener.listen()  # so that the address works as soon as it is printed
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port} on {host} can't be opened: {error.strerror}. Another page may be open there; take another "
            "port, or --port 0 for a free one"
        ) from None
    return listener
