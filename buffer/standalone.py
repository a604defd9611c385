"""`async-rl buffer`: runs a buffer alone, in the foreground. Clients connect to the address that it shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from async_rl.config import Config
from buffer.server import BufferServer

SHOWN = ("admitted", "trained", "running", "depth", "held", "slots_held", "refused")


def serve_alone(config: Config, show: Callable[[str], None], every_s: float) -> dict[str, float]:
    """Serve until Ctrl-C or SIGTERM; show the address, then every `every_s` seconds the counters if they changed.

    Returns:
        The final counters, in which the groups that were left are dropped as `shutdown`.

    Raises:
        ConfigError: the address can't be bound.
        StalenessError: the staleness bound or the accounting was violated; this is a bug.
    """
    server = BufferServer(config)
    stop, start_s = threading.Event(), time.monotonic()
    pool = ThreadPoolExecutor(1)
    serving = pool.submit(server.serve, stop)
    pool.shutdown(wait=False)
    last: dict[str, float] = {}
    try:
        show(f"buffer at {server.address}")
        while not wait([serving], every_s).done:
            if (counters := server.counters()) != last:
                last = counters
                values = "  ".join(f"{name} {counters[f'buffer/{name}']:.0f}" for name in SHOWN)
                show(f"{time.monotonic() - start_s:.0f} s  {values}")
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
    if wait([serving], config.timeouts.shutdown_s).done:
        serving.result()
    return server.close()
