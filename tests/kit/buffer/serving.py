"""Buffers that serve in a thread, until their end or a crash."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from async_rl.base.config import Config
from buffer.server import BufferServer


@contextlib.contextmanager
def serving(config: Config) -> Iterator[BufferServer]:
    """A buffer with its loop in a thread; closing it checks the accounting."""
    server = BufferServer(config)
    stop, crashes = threading.Event(), []

    def serve() -> None:
        try:
            server.serve(stop)
        except BaseException as error:
            crashes.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10)
        server.close()
        assert not crashes, crashes


@contextlib.contextmanager
def serving_until_a_crash(config: Config) -> Iterator[BufferServer]:
    """Serve, and end as when the process is killed: without a last commit to the journal."""
    server = BufferServer(config)
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10)
        with tempfile.TemporaryDirectory() as folder:
            killed = shutil.copytree(config.run_dir, Path(folder) / "killed")
            server.close()
            shutil.rmtree(config.run_dir)
            shutil.move(killed, config.run_dir)
