"""Tells which servers do not answer. `probes` are, by name of a server, functions that return whether it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

PROBES = 2
"""A server that misses so many probes in a row is taken for dead; a busy one may miss a single one."""
PAUSE_S = 0.2
Probes = Mapping[str, Callable[[], bool]]


def find_silent(probes: Probes) -> tuple[str, ...]:
    """Return the names of the servers whose probe says PROBES times in a row that they do not answer."""
    silent = dict(probes)
    with ThreadPoolExecutor(max(1, len(probes))) as threads:
        for _ in range(PROBES):
            answers = list(threads.map(lambda probe: probe(), silent.values()))
            silent = {name: silent[name] for name, is_alive in zip(silent, answers, strict=True) if not is_alive}
    return tuple(silent)


def wait_for_silent(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until a server does not answer, and return the names of all that do not; () after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def wait_for_all(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until all servers answer, and return (); after `limit_s` the names of those that still do not."""
    deadline = time.monotonic() + limit_s
    while (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent
