"""The CPUs and GPUs that `placement` asks of each host, and the processes that run there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from itertools import islice

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError
from async_rl.base.seams.doc_pages import doc_page

TOKEN_PAGE = doc_page("two-nodes.md")
JOIN_COMMANDS = (
    "on the first host `ray start --head`, on each other one `ray start --address=<first host>:6379`, "
    f"then async-rl on any of them, all with RAY_AUTH_MODE=token and the same token: {TOKEN_PAGE}"
)


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
