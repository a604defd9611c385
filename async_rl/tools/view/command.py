"""`async-rl view`: serves the page of one or several runs from a separate process with low priority."""

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

from async_rl.base.errors import ConfigError

DEFAULT_PORT = 8717
"""A fixed port, so that a link to a group works for everyone who has the run directory."""
NICENESS = 10
LOOPBACK = "127.0.0.1"
"""The only address. There is no password, so only programs on this machine may reach the page."""
SHUTDOWN_LIMIT_S = 5
END_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1


def serve(folder: Path, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigError: the folder has no run, or the port can't be opened.
    """
    from async_rl.tools.view.runs import Runs

    runs = Runs(folder)
    listener = open_port(port)
    import uvicorn

    from async_rl.tools.view.app import make_app

    os.nice(NICENESS)  # the run needs the cores more
    config = uvicorn.Config(
        make_app(runs), log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_LIMIT_S
    )
    advice = "  (Ctrl-C ends it)" if sys.stdin.isatty() else ""
    print(f"{folder}: http://localhost:{listener.getsockname()[1]}{advice}", flush=True)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended in order
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def shown(run_dir: Path) -> Iterator[None]:
    """A context that serves the page of a run that is about to start, from a process.

    The process ends with the block or with this process. Its port is DEFAULT_PORT, or a free one if that is taken.
    """
    try:
        open_port(DEFAULT_PORT).close()
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
            process.wait()
        print(f"async-rl view {run_dir} shows the run again", flush=True)


def _end_with_parent() -> None:
    """Make Linux end this process when its parent dies. Called in the child process before the program starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def open_port(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine; 0: a free one.

    Raises:
        ConfigError: the port is out of range or taken.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in 0..65535, got {port}; 0 takes a free port")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()  # so that the address works as soon as it is printed
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port} can't be opened: {error.strerror}. Another page may be open there; take another port, or "
            "--port 0 for a free one"
        ) from None
    return listener
