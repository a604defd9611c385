"""Places the processes of a run on hosts and GPUs, by the settings of `placement`.

    host_demands        the CPUs and GPUs that each host must offer at the start, and the processes that run there
    assign              chooses a host for each demand; the error says what is missing
    explain             the placement as text, without reserving anything (`--dry-run`)
    decide_placement    the settings that depend on the placement, such as the weight transport
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from itertools import islice, zip_longest
from math import inf
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check, either
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.errors import ConfigError
from async_rl.base.seams import working_transports
from async_rl.run.processes.ray_start import JOIN_COMMANDS, NoClusterError, open_ray


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host and the resources that it offers."""

    name: str
    """The host's address."""
    cpus: float
    gpus: float
    resources: frozenset[str] = frozenset()
    node: str = ""
    """The host's node ID in Ray; empty without Ray. A host that joins again gets a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDemand:
    """A demand: the CPUs, GPUs and custom Ray resource that one host must offer, and the processes that run there."""

    gpus_of: Mapping[str, float]
    """The number of GPUs of each process. A learner rank and a server also take one CPU each, the buffer none."""
    sum_of_gpus: str = ""
    """The number of GPUs as a sum, for messages, such as `1 learner rank x 1 + 2 servers x 1`."""
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
        """Return a demand for each GPU that a learner rank and a server share. If none is shared, return [self].

        Without the split, Ray would place two learner ranks on the same GPU, which NCCL refuses.
        """
        if not self.paired or self.gpus <= 1:
            return [self]
        kinds = [[name for name in self.gpus_of if name.startswith(kind)] for kind in ("buffer", "rollout", "learner")]
        return [
            replace(self, gpus_of={name: self.gpus_of[name] for name in together if name}, gpus=1.0)
            for together in zip_longest(*kinds)
        ]

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"
        gpus = f", {self.gpus:g} GPU{'s' if self.gpus != 1 else ''} ({self.sum_of_gpus})" if self.gpus else ""
        resource = f", resource {self.resource}" if self.resource else ""
        return f"{compact(list(self.gpus_of))}: {cpus}{gpus}{resource}"


def host_demands(config: Config, gpus_there: float = 0.0) -> list[HostDemand]:
    """Return the demand on each host: first the learner's hosts, then the hosts that have only servers.

    They count the servers with which the run begins. Others may join later.

    Args:
        gpus_there: number of GPUs of all hosts together. See `gpus_per_rank`.

    Raises:
        ConfigError: there are some GPUs, but too few for the processes.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    with_learner, per_rank = rollout.nodes == 0, gpus_per_rank(config, gpus_there)
    of_policy = 0.0 if config.rollout.server_url else per_rank * rollout.tp
    pools = {
        "rollout": (rollout.fewest, of_policy), "eval": (placement.eval.servers, of_policy),
        "judge": (placement.judge.servers, per_rank * placement.judge.tp),
    }

    num_hosts = rollout.nodes or learner.nodes
    if rollout.is_elastic and rollout.nodes:
        num_hosts = min(num_hosts, sum(count for count, _ in pools.values()))
    servers = _dealt(pools, num_hosts)
    result = []
    for node in range(learner.nodes):
        ranks = range(learner.ranks * node // learner.nodes, learner.ranks * (node + 1) // learner.nodes)
        processes = {"buffer": 0.0} if node == 0 else {}
        processes |= servers[node] if with_learner else {}
        processes |= {f"learner/{r}": per_rank for r in ranks}
        result.append(_demand(processes, learner.resource, placement.colocated))
    if rollout.nodes:
        result += [_demand(of_host, rollout.resource, False) for of_host in servers]
    return result


def gpus_per_rank(config: Config, gpus_there: float) -> float:
    """Return the GPUs of each learner rank, and of each of a server's tp ranks.

    Returns 1 if every rank has its own GPU, .5 if pairs share one (placement.colocated), less if all processes share
    the only GPU, and 0 if there is none.

    Args:
        gpus_there: number of GPUs of all hosts together. Not checked if placement.learner.gpus_per_node is set.

    Raises:
        ConfigError: there are some GPUs, but too few for the processes.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    if placement.colocated:
        wanted, per_rank = max(learner.ranks, rollout.most), 0.5
    else:
        wanted, per_rank = learner.ranks + gpus_of_servers(config), 1.0
    if learner.gpus_per_node or gpus_there >= wanted:
        return per_rank
    if gpus_there == 0:
        return 0.0
    check(
        gpus_there == learner.ranks == rollout.tp == placement.judge.tp == placement.num_nodes == 1
        and not rollout.is_elastic, "placement",
        f"{learner.ranks} learner rank(s) and {placement.num_servers} server(s) of {rollout.tp} GPU(s)",
        f"what {gpus_there:g} GPU(s) have room for",
        "The GPU of a single host may be shared by one rank and all servers, several only by pairs: set "
        "placement.colocated: true. Or lower placement.learner.ranks, placement.rollout.servers or tp, "
        "placement.eval.servers or placement.judge.servers; "
        "CUDA_VISIBLE_DEVICES= runs all on the CPU.",
    )
    return int(100 / wanted) / 100


def gpus_of_servers(config: Config) -> int:
    """Return the number of GPUs of the servers with which the run begins, without those at rollout.server_urls."""
    placement = config.placement
    count = placement.rollout.fewest + placement.eval.servers
    of_policy = 0 if config.rollout.server_url else count * placement.rollout.tp
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
    """Return a different host for each demand, in the order of `wanted`.

    Demands that few hosts meet choose first, and each takes a host that meets few demands.

    Raises:
        ConfigError: the hosts can't meet the demands. The message lists both. In a run over several hosts, a host that
            Ray knows by a name or an IPv6 address does not count, because processes would listen at that address.
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
        for host in hosts:
            cpus = f"{host.cpus:g} CPUs, " if host.cpus < inf else ""
            lines.append(f"  {host.name} has {cpus}{host.gpus:g} GPUs{_named(host)}")
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
    """Deal servers to nodes like cards, so that the numbers of servers of two nodes differ by at most one.

    Each pool continues at the node where the pool before it ended. For example, 3 rollout servers and 1 evaluation
    server on 2 nodes give rollout/0, rollout/1 to the first node, and rollout/2, eval/0 to the second.

    Args:
        pools: (number of servers, GPUs of each server) of each pool, by its name.

    Returns:
        For each node, the GPUs of its servers by process name. A node's servers of one pool have successive numbers.
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
    """Return process names as a short text, such as `buffer, rollout/0..1, learner/0..7`."""
    runs: dict[str, list[str]] = {}
    for name in names:
        kind, _, number = name.partition("/")
        runs.setdefault(kind, []).append(number)
    return ", ".join(
        kind if not numbers[0] else f"{kind}/{numbers[0]}" + (f"..{numbers[-1]}" if len(numbers) > 1 else "")
        for kind, numbers in runs.items()
    )


def _named(host: Host) -> str:
    """Return the host's custom Ray resources, to end a message, such as ", resources a, b"; "" if it has none."""
    own = sorted(r for r in host.resources if r not in ("CPU", "GPU", "memory", "object_store_memory") and ":" not in r)
    return f", resources {', '.join(own)}" if own else ""


def decide_placement(config: Config, parts: Sequence[HostDemand]) -> Decided:
    """Return the settings that depend on the placement.

    Args:
        parts: the demand on each host, divided by pairs that share a GPU.

        weight_sync.transport             the transport that replaces `auto`
        rollout.gpu_memory_utilization    if servers share a GPU: the share of each

    Raises:
        ConfigError: a setting, such as the weight transport, can't work in this placement.
    """
    decided = dict[str, Any]()
    if (servers := servers_per_gpu(parts)) > 1:
        decided["rollout.gpu_memory_utilization"] = config.rollout.gpu_memory_utilization / servers
    working = _working_transports(config, parts)
    if config.weight_sync.transport == "auto":
        decided["weight_sync.transport"] = working[0]
    settings = resolve(config, decided)
    if not settings.weight_sync.is_plain:
        from async_rl.base.config.weight_sync import check_sending

        check_sending(settings, working, "cuda" if any(_shares(parts)) else "cpu")
    if settings.rollout.server_url:
        from async_rl.run.before_start.attached_server import check_server_reaches_learner

        check_server_reaches_learner(settings)
    check_sharing(settings, parts)
    return decided


def servers_per_gpu(parts: Sequence[HostDemand]) -> int:
    """Return the number of servers that share a GPU; 1 if none does."""
    shared = [part.gpus_of for part in parts if part.gpus <= 1]
    pools = ("rollout", "eval", "judge")
    counts = [sum(n.startswith(pools) and gpus > 0 for n, gpus in gpus_of.items()) for gpus_of in shared]
    return max(counts, default=1) or 1


def check_sharing(config: Config, parts: Sequence[HostDemand]) -> None:
    """Check that the placement has what the weight transport needs.

    Raises:
        ConfigError: the placement lacks GPUs, a learner rank on each server's GPU, or a separate GPU for each process.
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
    """Return the names of the transports that work in this placement. `auto` chooses the first one."""
    shares, is_known = _shares(parts), not config.rollout.server_url  # whether it is known on which GPU the server is
    return working_transports(
        config.engine_entries.values(), "cuda" if any(shares) else "cpu", own_gpus=is_known and min(shares) >= 1,
        one_device=is_known and config.network.is_on_loopback and _servers_have_ranks(config, parts),
    )


def _shares(parts: Sequence[HostDemand]) -> set[float]:
    """Return the different numbers of GPUs that learner ranks and servers have. Below 1 it is a share of a GPU."""
    return {gpus for part in parts for name, gpus in part.gpus_of.items() if name != "buffer"}


def _servers_have_ranks(config: Config, parts: Sequence[HostDemand]) -> bool:
    """Return whether each server has a learner rank on its GPU (or on its host without GPUs). cuda_ipc needs that."""
    placement = config.placement
    if placement.colocated:
        return placement.num_nodes == 1 and len(placement.ranks_of_servers) == placement.rollout.most
    return len(parts) == 1 and parts[0].gpus <= 1 and placement.learner.ranks == 1


def ray_hosts(free: bool = False) -> list[Host]:
    """Return the live hosts of the Ray cluster that this process has joined.

    Args:
        free: count only the CPUs and GPUs that no program has reserved.
    """
    import ray
    from ray._private.state import available_resources_per_node

    left = available_resources_per_node() if free else {}  # type: ignore[no-untyped-call]
    hosts = []
    for node in ray.nodes():
        if node["Alive"]:
            offered = left.get(node["NodeID"], {}) if free else node["Resources"]
            hosts.append(Host(
                name=node["NodeManagerAddress"], cpus=offered.get("CPU", 0.0), gpus=offered.get("GPU", 0.0),
                resources=frozenset(node["Resources"]), node=node["NodeID"],
            ))
    return hosts


def find_hosts(config: Config) -> list[Host]:
    """Return the hosts that the run could use: this host, or all hosts of the Ray cluster that it would join.

    If a cluster is needed but not found, the list is empty.

    Raises:
        NoClusterError: RAY_ADDRESS is set, but no cluster is found there.
    """
    if runs_here(config):
        return [Host(name="this host", cpus=inf, gpus=gpus_here())]
    try:
        with open_ray(config):
            return ray_hosts()
    except NoClusterError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        return []


def explain(config: Config, hosts: Sequence[Host]) -> list[str]:
    """Return the placement as text, one line for each host, without starting a process.

    If `hosts` is empty, the lines say what hosts must offer.

    Raises:
        ConfigError: the hosts have too few resources.
    """
    if not hosts:
        return [
            *(f"host {number}: {demand}" for number, demand in enumerate(host_demands(config), 1)),
            "not compared with any host: there is no Ray cluster here, and RAY_ADDRESS names none",
        ]
    wanted = host_demands(config, sum(host.gpus for host in hosts))
    return [f"{host.name}: {demand}" for host, demand in zip(assign(wanted, hosts), wanted, strict=True)]


def runs_here(config: Config) -> bool:
    """Return whether all processes run on this host: placement.num_nodes is 1 and RAY_ADDRESS is not set."""
    return config.placement.num_nodes == 1 and not os.environ.get("RAY_ADDRESS")


def gpus_here() -> float:
    import torch

    return float(torch.cuda.device_count())
