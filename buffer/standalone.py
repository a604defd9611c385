"""The buffer alone, in the foreground: `async-rl buffer`. Its clients are whoever is told its address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from async_rl.config import Config
from buffer.server import BufferServer

SHOWN = ("admitted", "trained", "running", "depth", "held", "slots_held", "refused")


def serve_alone(config: Config, show: Callable[[str], None], every_s: float) -> dict[str, float]:
    """Serves until Ctrl-C or SIGTERM; shows the address, then the counters whenever they changed, every `every_s`.

    Returns:
        The final account: what was left is dropped as `shutdown`.

    Raises:
        ConfigError: the address can't be bound.
        StalenessError: the bound or the account was violated: a bug.
    """
    server = BufferServer(config)
    stop = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="serve")
    thread.start()
    start_s = time.monotonic()
    last: dict[str, float] = {}
    try:
        show(f"buffer at {server.address}")
        while thread.is_alive():
            thread.join(every_s)
            if (counters := server.counters()) != last:
                last = counters
                show(_line(time.monotonic() - start_s, counters))
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        thread.join(config.timeouts.shutdown_s)
    if failures:
        raise failures[0]
    return server.close()


def _line(seconds: float, counters: dict[str, float]) -> str:
    return f"{seconds:.0f} s  " + "  ".join(f"{name} {counters[f'buffer/{name}']:.0f}" for name in SHOWN)
