"""Divides the GPUs, or without any the cores, of this host among cells of a sweep that run at the same time."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.driver.resources import gpus_of_servers


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The part of this host that a cell may use: GPUs, as CUDA_VISIBLE_DEVICES names them, and cores. (): all."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the run's processes get."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def __str__(self) -> str:
        parts = [f"{name} {','.join(map(str, ids))}" for name, ids in (("GPU", self.gpus), ("core", self.cores)) if ids]
        return ", ".join(parts) or "the whole host"


def cells_at_once(config: Config, num_gpus: int, num_cores: int) -> int:
    """Return how many cells with this configuration this host holds, so that none shares a GPU with another, or a core.

    On GPUs each learner rank and each server has its own (as many as its tp), or a pair of both has one with
    placement.colocated; a host with fewer GPUs holds one cell, which shares them. Without GPUs each process has a core.
    """
    placement = config.placement
    ranks, servers = placement.learner.ranks, placement.num_servers
    if num_gpus:
        apart = 0 if placement.colocated else gpus_of_servers(config)
        return max(1, num_gpus // (ranks + apart))
    return max(1, num_cores // (ranks + servers))


def divide(count: int, gpus: Sequence[str], cores: Sequence[int]) -> list[CellPlace]:
    """Return `count` places with equally many GPUs and cores; what is left over stays unused.

    Raises:
        ConfigError: there are fewer GPUs or cores than places.
    """
    if count == 1:
        return [CellPlace()]
    check(not gpus or count <= len(gpus), "--parallel", count, f"at most {len(gpus)}, the GPUs of this host")
    check(count <= len(cores), "--parallel", count, f"at most {len(cores)}, the cores of this host")

    def part(ids: Sequence[str] | Sequence[int], index: int) -> tuple[str | int, ...]:
        size = len(ids) // count
        return tuple(ids[index * size : (index + 1) * size])

    return [CellPlace(part(gpus, i), part(cores, i)) for i in range(count)]  # type: ignore[arg-type]


def places_here(configs: Collection[Config], parallel: int | None) -> list[CellPlace]:
    """Return the places of this host: `parallel` of them, or if it is None as many as hold any of the cells.

    Raises:
        ConfigError: there are fewer GPUs or cores than places, or cells would run on a Ray cluster, where a place of
            this host means nothing.
    """
    if parallel == 1:
        return [CellPlace()]
    gpus, cores = _gpus_here(), sorted(os.sched_getaffinity(0))
    count = parallel or min(cells_at_once(config, len(gpus), len(cores)) for config in configs)
    _check_all_here(configs, count)
    return divide(count, gpus, cores)


def _check_all_here(configs: Collection[Config], count: int) -> None:
    """Raise ConfigError if one of several cells at once would run on a Ray cluster, where nothing keeps them apart."""
    address, nodes = os.environ.get("RAY_ADDRESS"), max(config.placement.num_nodes for config in configs)
    where = f"with RAY_ADDRESS={address}" if address else f"with cells of {nodes} nodes"
    advice = "Unset RAY_ADDRESS to run them on this host alone, or" if address else "To use a cluster,"
    check(
        count == 1 or (not address and nodes == 1), "--parallel", count, f"1 {where}",
        f"Ray chooses the GPUs there, so that cells at once would not have their own. {advice} run one cell at a time.",
    )


def _gpus_here() -> list[str]:
    from async_rl.driver.placement import gpus_here

    count = int(gpus_here())
    names = filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    named = list(takewhile(lambda name: name != "-1", names))  # CUDA reads no further
    # Of several MIG instances a process sees only one, but each may be that of a cell.
    return (named or [str(index) for index in range(count)]) if count else []
