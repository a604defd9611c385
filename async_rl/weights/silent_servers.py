"""Tells which servers do not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

PROBES = 2
"""A server that misses so many probes in a row is taken for dead; a busy one may miss a single one."""


def find_silent(probes: Mapping[str, Callable[[], bool]]) -> tuple[str, ...]:
    """Return the names of the servers whose probe says PROBES times in a row that they do not answer.

    Args:
        probes: by name of a server, a function that returns whether it answers.
    """
    silent = dict(probes)
    with ThreadPoolExecutor(max(1, len(probes))) as threads:
        for _ in range(PROBES):
            answers = list(threads.map(lambda probe: probe(), silent.values()))
            silent = {name: silent[name] for name, is_alive in zip(silent, answers, strict=True) if not is_alive}
    return tuple(silent)
