"""Placement of the processes: Ray reserves the resources that async_rl/driver/resources.py asks of each host.

    reserve(config)           reserves a Ray placement group that spreads over the hosts
    explain(config, hosts)    returns the placement as text without reserving anything (`--dry-run`)
    resolve_placement(...)    fills in the weight transport, which depends on the placement
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.config.check import check, either
from async_rl.config.compact import check_compact_transport, check_compact_type
from async_rl.config.staging import check_staging_transport
from async_rl.driver.addresses import check_server_reaches_learner
from async_rl.driver.resources import JOIN_COMMANDS, Host, HostDemand, assign, compact, host_demands
from async_rl.driver.signals import StopSignals
from async_rl.errors import ConfigError, WaitTimeoutError
from async_rl.seams import working_transports

RESERVE_INTERVAL_S = 0.5


class NoClusterError(ConfigError):
    """No Ray cluster was found at the address of RAY_ADDRESS or, in a run over several hosts, on this host."""


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

    def first_host_of(self, process: str) -> str:
        """Return the address of the host on which a process was at the start of the run."""
        return self.addresses[self._bundle_of(process)]

    def has_moved(self, process: str) -> bool:
        """Whether Ray has moved a process to a host that got nothing of what was sent when the run started."""
        index = self._bundle_of(process)
        return index in self.found and self.found[index][0] != self.nodes[index]

    def follow_moves(self) -> None:
        """Ask Ray on which hosts the bundles are; one without a host, until it has another, counts as where it was."""
        self.found = {**self.found, **_hosts(self.group)}

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


def resolve_placement(config: Config, reservation: Reservation) -> Config:
    """Return the config with what depends on the placement: the weight transport in place of `auto`, and for servers of
    one GPU their part of rollout.mem_fraction.
    """
    parts = reservation.bundles
    if (servers := servers_per_gpu(parts)) > 1:
        config = replace(config, rollout=replace(config.rollout, mem_fraction=config.rollout.mem_fraction / servers))
    check_compact_type(config.weight_sync, config.model, "cuda" if any(_shares(parts)) else "cpu")
    if config.weight_sync.transport == "auto":
        working = _working_transports(config, parts)
        sync = replace(config.weight_sync, transport=working[0])
        check_staging_transport(sync, working)
        check_compact_transport(sync, working)
        config = replace(config, weight_sync=sync)
        check_server_reaches_learner(config)
    check_sharing(config, parts)
    return config


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


@contextlib.contextmanager
def open_ray(config: Config) -> Iterator[None]:
    """Connect to Ray within the body: to the cluster that RAY_ADDRESS names, to this host's cluster if the run spans
    hosts, else to a Ray that is started on this machine for this process alone.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, starves a run on a host with other work
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import logging

    import ray

    if ray.is_initialized():
        raise ConfigError(
            "a run starts Ray, or joins a cluster, with settings of its own, but this process is connected to Ray "
            "already, by ray.init(). Call ray.shutdown() before, or train in another process"
        )
    placement = config.placement
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS") or ("auto" if placement.num_nodes > 1 else "")
    if address:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise NoClusterError(_why_no_cluster(config, error)) from None
        except ValueError as error:
            raise ConfigError(
                f"RAY_ADDRESS must be HOST:PORT, such as 10.0.0.1:6379, got {address} ({error}). `ray start --head` "
                f"prints it. {_without_address(config)}"
            ) from None
        except RuntimeError as error:  # usually the cluster has another version of Ray or Python
            raise ConfigError(
                f"the Ray cluster at {address} can't be joined: {str(error).strip()}\nEvery host and this process must "
                "have the same versions of Python and Ray: install them anew where they differ, then `ray stop` and "
                f"start the cluster again: {JOIN_COMMANDS}"
            ) from None
    else:
        try:
            ray.init(
                address="local", include_dashboard=False, num_cpus=1 + placement.num_servers + placement.learner.ranks,
                object_store_memory=128 * 2**20,  # only reports travel through it
                **quiet,
            )
        except Exception as error:  # Ray has no class of its own for this
            if "timed out during startup" not in str(error):
                raise
            raise WaitTimeoutError(
                "the driver waited 30 s (a limit of Ray's own) for Ray's processes to start on this host. Start the "
                "run again when less else runs here; if that changes nothing, /tmp/ray/session_latest/logs says more"
            ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _why_no_cluster(config: Config, error: ConnectionError) -> str:
    if address := os.environ.get("RAY_ADDRESS"):
        found = f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error}). {_without_address(config)}"
        return f"{found} Or start one: {JOIN_COMMANDS}"
    hosts = config.placement.num_nodes
    return f"placement wants {hosts} hosts, but no Ray cluster is found ({error}). Start one: {JOIN_COMMANDS}"


def _without_address(config: Config) -> str:
    place = "on this host alone" if config.placement.num_nodes == 1 else "on the cluster that this host has joined"
    return f"To run {place}: `unset RAY_ADDRESS`."


@contextlib.contextmanager
def ray_messages_in(file: Path) -> Iterator[None]:
    """Append what Ray tells the driver, such as a page of text about each killed process, to `file` in the body.

    Otherwise Ray prints it, also with log_to_driver off; the driver says in its own words what has happened.
    """
    from ray._private import worker

    def write(data: dict[str, Any], ignore_prefix: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in data["lines"])

    printed, worker.print_to_stdstream = worker.print_to_stdstream, write
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def find_hosts(config: Config) -> list[Host]:
    """Return the hosts that the run would have: this one, or those of the Ray cluster that it would join; none: there
    is no cluster, and RAY_ADDRESS names none.
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
