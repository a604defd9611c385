"""Where the processes of a run are: what `placement` asks of each host, and the hosts that Ray gives.

    host_demands(config)      the CPUs and GPUs that each host must offer, and the processes that run there
    assign(demands, hosts)    a host for each demand, or an error that says what is missing
    explain(config, hosts)    the placement as text, without reserving anything (`--dry-run`)
    reserve(config)           reserves it: a Ray placement group that spreads over the hosts
    decide_placement(...)     what depends on it: the weight transport, and the share of a GPU that servers get
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from itertools import islice
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check, either
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.config.weight_sync import check_compact_transport, check_compact_type, check_staging_transport
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.base.seams import working_transports
from async_rl.run.processes.ray_start import JOIN_COMMANDS, NoClusterError, open_ray
from async_rl.run.processes.signals import StopSignals

RESERVE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host and the resources that it offers."""

    name: str
    cpus: float
    gpus: float
    resources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDemand:
    """The CPUs, GPUs and Ray resource that one host must offer, and the processes that run there."""

    gpus_of: Mapping[str, float]
    """The number of GPUs of each process. A learner rank and a server also take one CPU each, the buffer none."""
    sum_of_gpus: str = ""
    """The number of GPUs as a sum over the kinds of process, as a text for messages."""
    gpus: float = 0.0
    resource: str = ""
    paired: bool = False
    """Whether each GPU is shared by one learner rank and one server."""

    @property
    def cpus(self) -> int:
        return len(self.gpus_of) - ("buffer" in self.gpus_of)

    def fits(self, host: Host) -> bool:
        return (
            self.gpus <= host.gpus and self.cpus <= host.cpus and (not self.resource or self.resource in host.resources)
        )

    def per_gpu(self) -> list[HostDemand]:
        """Return one demand for each GPU, with the learner rank and the server that share it; [self] if none is shared.

        Without that split, Ray would put two learner ranks of one bundle on the same GPU, which NCCL refuses.
        """
        if not self.paired or self.gpus <= 1:
            return [self]
        kinds = [[name for name in self.gpus_of if name.startswith(kind)] for kind in ("buffer", "rollout", "learner")]
        pairs = [[name for kind in kinds for name in kind[gpu : gpu + 1]] for gpu in range(int(self.gpus))]
        return [replace(self, gpus_of={name: self.gpus_of[name] for name in pair}, gpus=1.0) for pair in pairs]

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"
        gpus = f", {self.gpus:g} GPU{'s' if self.gpus != 1 else ''} ({self.sum_of_gpus})" if self.gpus else ""
        resource = f", resource {self.resource}" if self.resource else ""
        return f"{compact(list(self.gpus_of))}: {cpus}{gpus}{resource}"


def host_demands(config: Config, gpus_there: float = 0.0) -> list[HostDemand]:
    """Return the demand on each host: the learner's hosts first, then the servers' if these have hosts of their own.

    Args:
        gpus_there: number of GPUs of all hosts together. If placement.learner.gpus_per_node is not set, they are used
            if each process can have its own, if pairs of processes share them, or if all processes share the only one.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    with_learner, per_rank = rollout.nodes == 0, gpus_per_rank(config, gpus_there)
    of_policy = 0.0 if config.rollout.server_url else per_rank * rollout.tp
    pools = {
        "rollout": (rollout.servers, of_policy), "eval": (placement.eval.servers, of_policy),
        "judge": (placement.judge.servers, per_rank * placement.judge.tp),
    }

    servers = _dealt(pools, rollout.nodes or learner.nodes)
    result = []
    for node in range(learner.nodes):
        ranks = range(learner.ranks * node // learner.nodes, learner.ranks * (node + 1) // learner.nodes)
        processes = {"buffer": 0.0} if node == 0 else {}
        processes |= servers[node] if with_learner else {}
        processes |= {f"learner/{r}": per_rank for r in ranks}
        result.append(_demand(processes, learner.resource, placement.colocated))
    for node in range(rollout.nodes):
        result.append(_demand(servers[node], rollout.resource, False))
    return result


def gpus_per_rank(config: Config, gpus_there: float) -> float:
    """Return the number of GPUs, 1 or less, of each learner rank and of each of a server's tp ranks; 0 on the CPU.

    ConfigError: there are some GPUs, but too few for the processes.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    if placement.colocated:
        wanted, per_rank = max(learner.ranks, rollout.servers), 0.5
    else:
        wanted, per_rank = learner.ranks + gpus_of_servers(config), 1.0
    if learner.gpus_per_node or gpus_there >= wanted:
        return per_rank
    if gpus_there == 0:
        return 0.0
    check(
        gpus_there == learner.ranks == rollout.tp == placement.judge.tp == placement.num_nodes == 1, "placement",
        f"{learner.ranks} learner rank(s) and {placement.num_servers} server(s) of {rollout.tp} GPU(s)",
        f"what {gpus_there:g} GPU(s) have room for",
        "The GPU of a single host may be shared by one rank and all servers, several only by pairs: set "
        "placement.colocated: true. Or lower placement.learner.ranks, placement.rollout.servers or tp, "
        "placement.eval.servers or placement.judge.servers; "
        "CUDA_VISIBLE_DEVICES= runs all on the CPU.",
    )
    return int(100 / wanted) / 100


def gpus_of_servers(config: Config) -> int:
    """Return the number of GPUs of the servers that the run starts: not of one that rollout.server_url names."""
    placement = config.placement
    of_policy = 0 if config.rollout.server_url else len(config.server_names) * placement.rollout.tp
    return of_policy + placement.judge.servers * placement.judge.tp


def _demand(gpus_of: Mapping[str, float], resource: str, colocated: bool) -> HostDemand:
    parts = []
    nouns = {"learner": "learner rank", "rollout": "server", "eval": "evaluation server", "judge": "judge server"}
    for kind, noun in nouns.items():
        of_kind = [gpus for name, gpus in gpus_of.items() if name.startswith(kind)]
        if of_kind:
            parts.append(f"{len(of_kind)} {noun}{'s' if len(of_kind) != 1 else ''} x {of_kind[0]:g}")
    gpus = round(sum(gpus_of.values()), 2)
    if colocated and gpus:
        gpus = float(max(sum(n.startswith(kind) for n in gpus_of) for kind in ("learner", "rollout")))
    return HostDemand(
        gpus_of=gpus_of, sum_of_gpus=" + ".join(parts), gpus=gpus, resource=resource, paired=colocated
    )


def assign(wanted: Sequence[HostDemand], hosts: Sequence[Host]) -> list[Host]:
    """Return a host for each demand, in the order of the demands; no host gets two.

    Demands that fewer hosts meet choose first, and each takes a host that meets few others.

    Raises:
        ConfigError: the hosts can't meet the demands; the message lists both. Or the run needs several hosts, and Ray
            knows one that it needs by a name or an IPv6 address, where its processes would listen.
    """
    without_ipv4 = [
        host for host in hosts
        if len(wanted) > 1 and not _is_ipv4(host.name) and any(demand.fits(host) for demand in wanted)
    ]
    hosts = [host for host in hosts if host not in without_ipv4]
    free = sorted(hosts, key=lambda host: sum(demand.fits(host) for demand in wanted))
    host_of: dict[int, Host] = {}
    for index in sorted(range(len(wanted)), key=lambda index: sum(wanted[index].fits(host) for host in hosts)):
        if host := next((host for host in free if wanted[index].fits(host)), None):
            host_of[index] = host
            free.remove(host)
    if len(host_of) < len(wanted) and without_ipv4:
        raise ConfigError(
            "a run over several hosts uses the addresses by which Ray knows them, which must be IPv4; Ray knows "
            f"{', '.join(host.name for host in without_ipv4)}. On each of these hosts `ray stop`, then start it again "
            "with `ray start --node-ip-address=<IPv4 address>`"
        )
    if len(host_of) < len(wanted):
        lines = [f"  wanted of {'one host' if len(wanted) == 1 else 'a host of its own'}: {b}" for b in wanted]
        lines += [f"  {host.name} has {host.cpus:g} CPUs, {host.gpus:g} GPUs{_named(host)}" for host in hosts]
        raise ConfigError(
            f"placement does not fit: {_shortfall(wanted, hosts)}\n" + "\n".join(lines)
            + "\nLower placement.learner or placement.rollout, or add hosts: " + JOIN_COMMANDS
        )
    return [host_of[index] for index in range(len(wanted))]


def _is_ipv4(name: str) -> bool:
    try:
        return bool(IPv4Address(name))
    except ValueError:
        return False


def _shortfall(wanted: Sequence[HostDemand], hosts: Sequence[Host]) -> str:
    if len(wanted) > len(hosts):
        return f"{len(wanted)} hosts wanted, {len(hosts)} there"
    for unit in ("gpus", "cpus"):
        asked, offered = sum(getattr(b, unit) for b in wanted), sum(getattr(h, unit) for h in hosts)
        if asked > offered:
            return f"{asked:g} {unit[:-1].upper()}s wanted, {offered:g} there"
    return "no choice of hosts has enough on each"


def _dealt(pools: Mapping[str, tuple[int, float]], nodes: int) -> list[dict[str, float]]:
    """Deal servers like cards, each pool on from where the one before has ended: nodes differ by one server at most.

    Args:
        pools: [pool] (number of its servers, GPUs of each).

    Returns:
        [node] the GPUs of each of its servers. The servers of a pool have successive numbers.
    """
    result: list[dict[str, float]] = [{} for _ in range(nodes)]
    begun = 0
    for pool, (count, gpus) in pools.items():
        numbers = iter(range(count))
        for node, servers in enumerate(result):
            size = len(range((node - begun) % nodes, count, nodes))
            servers.update({f"{pool}/{number}": gpus for number in islice(numbers, size)})
        begun += count
    return result


def compact(names: list[str]) -> str:
    """Return a short text for the process names, such as `buffer, rollout/0..1, learner/0..7`."""
    runs: dict[str, list[str]] = {}
    for name in names:
        kind, _, number = name.partition("/")
        runs.setdefault(kind, []).append(number)
    return ", ".join(
        kind if not numbers[0] else f"{kind}/{numbers[0]}" + (f"..{numbers[-1]}" if len(numbers) > 1 else "")
        for kind, numbers in runs.items()
    )


def _named(host: Host) -> str:
    """Return ", resources a, b", the names of the host's custom Ray resources, to end a message; "" if it has none."""
    own = sorted(r for r in host.resources if r not in ("CPU", "GPU", "memory", "object_store_memory") and ":" not in r)
    return f", resources {', '.join(own)}" if own else ""


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
        if settings.rollout.server_url:
            from async_rl.run.before_start.attached_server import check_server_reaches_learner

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
    """Raise ConfigError if the placement lacks what the weight transport needs: GPUs at all, a learner rank on each
    server's GPU, or a GPU of its own for each process.
    """
    asked, entry, gpus = config.weight_sync.transport, config.weight_sync.transport_entry, sum(p.gpus for p in parts)
    if entry is None:
        return
    allowed = either(["auto", *_working_transports(config, parts)])
    check(gpus > 0 or "cpu" in entry.devices, "weight_sync.transport", asked, f"{allowed} on a host without GPUs")
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
    """Whether each server has a learner rank on its GPU, or on its host without GPUs, as cuda_ipc needs it."""
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
    """Return the hosts that the run would use: this one, or all of the Ray cluster that it would join.

    The list is empty if there is no cluster and RAY_ADDRESS is not set.
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
