"""Placement of the processes: Ray reserves the resources that async_rl/run/processes/resources.py asks of each host.

    reserve(config)           reserves a Ray placement group that spreads over the hosts
    explain(config, hosts)    returns the placement as text without reserving anything (`--dry-run`)
    decide_placement(...)     decides on the weight transport, which depends on the placement
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check, either
from async_rl.base.config.compact import check_compact_transport, check_compact_type
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.config.staging import check_staging_transport
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.seams import working_transports
from async_rl.run.processes.addresses import check_server_reaches_learner
from async_rl.run.processes.ray_start import NoClusterError, open_ray
from async_rl.run.processes.resources import Host, HostDemand, assign, compact, host_demands
from async_rl.run.processes.signals import StopSignals

RESERVE_INTERVAL_S = 0.5


@dataclass(slots=True)
class Reservation:
    """A reserved Ray placement group, with the host and processes of each bundle (resources on one host)."""

    group: Any
    bundles: list[HostDemand]
    addresses: list[str]
    """The address of each bundle's host at the start of the run."""
    gpus: float = 0.0
    """The number of GPUs of all hosts of the cluster for which `bundles` was made."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """[bundle] the ID of its host in Ray at the start of the run: one that joins anew has another, at any address."""
    found: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """[bundle] (ID, address) of its host when Ray was last asked: Ray moves the bundles of a host that it has lost."""
    without_host: Set[int] = frozenset()
    """The bundles that had no host then."""

    def options(self, process: str) -> dict[str, Any]:
        """Return the arguments of `ray.remote(...).options` that start `process` in its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = self._bundle_of(process)
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        gpus = self.bundles[index].gpus_of[process]
        return {"scheduling_strategy": strategy, "num_cpus": int(process != "buffer"), "num_gpus": gpus}

    def host_of(self, process: str) -> str:
        index = self._bundle_of(process)
        return self.found[index][1] if index in self.found else self.addresses[index]

    def has_moved(self, process: str) -> bool:
        """Whether Ray has moved a process to a host where nothing was checked when the run started."""
        index = self._bundle_of(process)
        return index in self.found and self.found[index][0] != self.nodes[index]

    def follow_moves(self) -> None:
        """Ask Ray for the hosts of the bundles; a bundle without a host counts at its last one until it has another."""
        hosts = _hosts(self.group)
        self.found = {**self.found, **hosts}
        self.without_host = set(range(len(self.bundles))) - hosts.keys()

    def why_no_host(self, process: str) -> str:
        """Return what a process wants of a host, as a sentence, if Ray had none for it when last asked; else ""."""
        index = self._bundle_of(process)
        if index not in self.without_host:
            return ""
        return f". Its host is lost, and no other of the Ray cluster has free what is wanted for {self.bundles[index]}"

    def _bundle_of(self, process: str) -> int:
        return next(index for index, bundle in enumerate(self.bundles) if process in bundle.gpus_of)

    def __str__(self) -> str:
        return "; ".join(f"{a}: {compact(list(b.gpus_of))}" for a, b in zip(self.addresses, self.bundles, strict=True))


def reserve(config: Config, signals: StopSignals) -> Reservation:
    """Wait until Ray has reserved the resources that the run needs on each host; returns the reservation.

    ConfigError: the hosts do not have so much. WaitTimeoutError: it is not free within timeouts.startup_s.
    """
    import ray
    from ray.util import placement_group

    hosts = ray_hosts()
    gpus = sum(host.gpus for host in hosts)
    wanted = host_demands(config, gpus)
    parts, resources, strategy = ray_bundles(wanted, assign(wanted, hosts))
    group = placement_group(resources, strategy=strategy)
    deadline_s = time.monotonic() + config.timeouts.startup_s
    while not group.wait(RESERVE_INTERVAL_S):
        signals.check()
        if time.monotonic() < deadline_s:
            continue
        free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
        raise WaitTimeoutError(
            f"the driver waited {config.timeouts.startup_s:.0f} s (timeouts.startup_s) for Ray to set aside "
            f"{'; '.join(map(str, wanted))}. The hosts have it, but only {free or 'nothing'} is free: `ray status` "
            "shows who holds the rest: end that, or start this run later"
        )
    found = _hosts(group)
    addresses = [found[index][1] for index in range(len(parts))]
    return Reservation(group, parts, addresses, gpus, {index: node for index, (node, _) in found.items()})


def _hosts(group: Any) -> dict[int, tuple[str, str]]:
    """Return {bundle: (ID, address) of its host} of a Ray placement group, without bundles that have no host."""
    import ray
    from ray.util import placement_group_table

    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return {index: (node, address_of[node]) for index, node in nodes.items() if node in address_of}


def ray_bundles(
    wanted: Sequence[HostDemand], hosts: Sequence[Host]
) -> tuple[list[HostDemand], list[dict[str, float]], str]:
    """Return what the Ray placement group consists of: (demand of each bundle, its Ray resources, placement strategy).

    Ray chooses the hosts itself. But if learner ranks and servers share GPUs in pairs on several hosts, each pair is a
    bundle. As Ray can't be told which bundles belong on one host, each is then tied to its host in `hosts`.
    """
    parts = [(part, host) for demand, host in zip(wanted, hosts, strict=True) for part in demand.per_gpu()]
    wants = [{"CPU": float(part.cpus), "GPU": part.gpus, part.resource: 0.001} for part, _ in parts]
    resources = [{name: amount for name, amount in each.items() if name and amount} for each in wants]
    strategy = "STRICT_SPREAD" if len(wanted) > 1 else "STRICT_PACK"
    if len(parts) > len(wanted) > 1:
        strategy = "PACK"
        resources = [r | {f"node:{host.name}": 0.001} for r, (_, host) in zip(resources, parts, strict=True)]
    return [part for part, _ in parts], resources, strategy


def decide_placement(config: Config, reservation: Reservation) -> Decided:
    """Return what depends on the placement: the weight transport in place of `auto`, and for servers that share a GPU
    their part of rollout.gpu_memory_utilization.
    """
    parts, decided = reservation.bundles, dict[str, Any]()
    if (servers := servers_per_gpu(parts)) > 1:
        decided["rollout.gpu_memory_utilization"] = config.rollout.gpu_memory_utilization / servers
    check_compact_type(config.weight_sync, config.model, "cuda" if any(_shares(parts)) else "cpu")
    if config.weight_sync.transport == "auto":
        working = _working_transports(config, parts)
        decided["weight_sync.transport"] = working[0]
        settings = resolve(config, decided)
        check_staging_transport(settings.weight_sync, working)
        check_compact_transport(settings.weight_sync, working)
        check_server_reaches_learner(settings)
    check_sharing(resolve(config, decided), parts)
    return decided


def servers_per_gpu(parts: Sequence[HostDemand]) -> int:
    """Return how many of the servers that the run starts share a GPU; 1: none does."""
    shared = [part.gpus_of for part in parts if part.gpus <= 1]
    pools = ("rollout", "eval", "judge")
    counts = [sum(n.startswith(pools) and gpus > 0 for n, gpus in gpus_of.items()) for gpus_of in shared]
    return max(counts, default=1) or 1


def check_sharing(config: Config, parts: Sequence[HostDemand]) -> None:
    """Raise ConfigError if the weight transport requires that each server shares its GPU with a learner rank, or that
    none shares one, and the placement has it otherwise.
    """
    asked, entry, gpus = config.weight_sync.transport, config.weight_sync.transport_entry, sum(p.gpus for p in parts)
    if entry is None:
        return
    allowed = either(["auto", *_working_transports(config, parts)])
    check(
        not entry.needs_one_device or gpus == 0 or _servers_have_ranks(config, parts), "weight_sync.transport", asked,
        f"{allowed} where servers are on GPUs without a learner rank; these are on {gpus:g} GPUs",
        "Or set placement.colocated: true, on one host, with no more servers than learner ranks.",
    )
    check(
        not entry.needs_own_gpus or bool(config.rollout.server_url) or min(_shares(parts)) >= 1,
        "weight_sync.transport", asked, f"{allowed} where learner ranks and servers do not have a GPU each",
        "Or set placement.colocated: false, with a GPU for each.",
    )


def _working_transports(config: Config, parts: Sequence[HostDemand]) -> list[str]:
    """Return the names of the transports that work in this placement; the first is the choice of auto."""
    shares, is_known = _shares(parts), not config.rollout.server_url  # whether it is known on which GPU the server is
    return working_transports(
        config.engine_entries.values(), "cuda" if any(shares) else "cpu", own_gpus=is_known and min(shares) >= 1,
        one_device=is_known and config.network.is_on_loopback and _servers_have_ranks(config, parts),
    )


def _shares(parts: Sequence[HostDemand]) -> set[float]:
    """Return the numbers of GPUs that learner ranks and servers have; below 1 is a part of one."""
    return {gpus for part in parts for name, gpus in part.gpus_of.items() if name != "buffer"}


def _servers_have_ranks(config: Config, parts: Sequence[HostDemand]) -> bool:
    """Whether each server shares its GPU, or a host without GPUs, with a learner rank, which can give it weights there.
    """
    placement = config.placement
    if placement.colocated:
        return placement.num_nodes == 1 and len(placement.ranks_of_servers) == placement.rollout.servers
    return len(parts) == 1 and parts[0].gpus <= 1 and placement.learner.ranks == 1


def ray_hosts() -> list[Host]:
    """Return the live hosts of the Ray cluster that this process has joined."""
    import ray

    return [
        Host(
            name=node["NodeManagerAddress"], cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0), resources=frozenset(node["Resources"]),
        )
        for node in ray.nodes() if node["Alive"]
    ]


def find_hosts(config: Config) -> list[Host]:
    """Return the hosts that the run would have: this one, or the hosts of the Ray cluster that it would join; none:
    there is no cluster, and RAY_ADDRESS names none.
    """
    if runs_here(config):
        return [Host(name="this host", cpus=float("inf"), gpus=gpus_here())]
    try:
        with open_ray(config):
            return ray_hosts()
    except NoClusterError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        return []


def explain(config: Config, hosts: Sequence[Host]) -> list[str]:
    """Return the placement on `hosts` as text, one line for each, without starting a process. If there are none, the
    lines say only what hosts must offer.

    ConfigError: they have too few resources.
    """
    if not hosts:
        return [
            *(f"host {number}: {demand}" for number, demand in enumerate(host_demands(config), 1)),
            "not compared with any host: there is no Ray cluster here, and RAY_ADDRESS names none",
        ]
    wanted = host_demands(config, sum(host.gpus for host in hosts))
    return [f"{host.name}: {demand}" for host, demand in zip(assign(wanted, hosts), wanted, strict=True)]


def runs_here(config: Config) -> bool:
    """Whether every process of the run will be on this host: placement.num_nodes is 1 and RAY_ADDRESS is not set."""
    return config.placement.num_nodes == 1 and not os.environ.get("RAY_ADDRESS")


def gpus_here() -> float:
    import torch

    return float(torch.cuda.device_count())
