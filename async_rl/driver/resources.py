"""What each host of a run must offer, from `placement`: one bundle for each, with the processes it gets.

    bundles(config)          what each host must offer
    assign(bundles, hosts)   a host for each, or the arithmetic of why not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.errors import ConfigError

JOIN_COMMANDS = (
    "on the first host `ray start --head`, on each other one `ray start --address=<first host>:6379`, "
    "then async-rl on any of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a host has to offer."""

    name: str
    cpus: float
    gpus: float
    resources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one host must offer, and the processes that run there."""

    gpus_of: Mapping[str, float]
    """Each process with its GPUs. A learner rank and a server take a CPU as well, the buffer none."""
    sum_of_gpus: str = ""
    """How the number of GPUs comes about."""
    gpus: float = 0.0
    resource: str = ""
    paired: bool = False
    """A learner rank and a server share each GPU."""

    @property
    def cpus(self) -> int:
        return len(self.gpus_of) - ("buffer" in self.gpus_of)

    def fits(self, host: Host) -> bool:
        return (
            self.gpus <= host.gpus and self.cpus <= host.cpus and (not self.resource or self.resource in host.resources)
        )

    def per_gpu(self) -> list[Bundle]:
        """A bundle for each pair: in one for all, Ray would fill a GPU, with two of a kind, before it begins the next;
        and NCCL refuses two learner ranks on one device.
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


def bundles(config: Config, gpus_there: float = 0.0) -> list[Bundle]:
    """One for each host: the learner's first, then those of the servers if they have their own.

    Args:
        gpus_there: of the hosts together. Where the config does not ask for GPUs in numbers, they are used if there
            are enough for all, or the only one is shared by all, or pairs share them.

    Raises:
        ConfigError: there are GPUs, but not so many.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    with_learner, share = rollout.nodes == 0, _share(config, gpus_there)
    of_server = share * _gpus_of_servers(config) / rollout.servers
    result = []
    for node in range(learner.nodes):
        ranks = _part(learner.ranks, learner.nodes, node)
        servers = _part(rollout.servers, learner.nodes, node) if with_learner else range(0)
        processes = {"buffer": 0.0} if node == 0 else {}
        processes |= {f"rollout/{i}": of_server for i in servers}
        processes |= {f"learner/{r}": share for r in ranks}
        result.append(_bundle(processes, learner.resource, placement.colocated))
    for node in range(rollout.nodes):
        servers = _part(rollout.servers, rollout.nodes, node)
        result.append(_bundle({f"rollout/{i}": of_server for i in servers}, rollout.resource, False))
    return result


def _share(config: Config, gpus_there: float) -> float:
    """GPUs of a learner rank, and of a server for each of its tp; 0 on CPU."""
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    if placement.colocated:
        wanted, share = max(learner.ranks, rollout.servers), 0.5
    else:
        wanted, share = learner.ranks + _gpus_of_servers(config), 1.0
    if learner.gpus_per_node or gpus_there >= wanted:
        return share
    if gpus_there == 0 or placement.num_nodes > 1:
        return 0.0
    check(
        gpus_there == learner.ranks == rollout.tp == 1, "placement",
        f"{learner.ranks} learner rank(s) and {rollout.servers} server(s) of {rollout.tp} GPU(s)",
        f"what {gpus_there:g} GPU(s) have room for",
        "One GPU may be shared by one rank and all servers, several only by pairs: set placement.colocated: true. Or "
        "lower placement.learner.ranks, placement.rollout.servers or tp; CUDA_VISIBLE_DEVICES= runs all on the CPU.",
    )
    return int(100 / wanted) / 100


def _gpus_of_servers(config: Config) -> int:
    """Of those that the run starts: rollout.server_url has its GPUs already."""
    return 0 if config.rollout.server_url else config.placement.rollout.servers * config.placement.rollout.tp


def _bundle(gpus_of: Mapping[str, float], resource: str, colocated: bool) -> Bundle:
    parts = []
    for kind, noun in (("learner", "learner rank"), ("rollout", "server")):
        of_kind = [gpus for name, gpus in gpus_of.items() if name.startswith(kind)]
        if of_kind:
            parts.append(f"{len(of_kind)} {noun}{'s' if len(of_kind) != 1 else ''} x {of_kind[0]:g}")
    gpus = round(sum(gpus_of.values()), 2)
    if colocated and gpus:
        gpus = float(max(sum(n.startswith(kind) for n in gpus_of) for kind in ("learner", "rollout")))
    return Bundle(
        gpus_of=gpus_of, sum_of_gpus=" + ".join(parts), gpus=gpus, resource=resource, paired=colocated
    )


def assign(wanted: Sequence[Bundle], hosts: Sequence[Host]) -> list[Host]:
    """A host of its own for each bundle, in order.

    Raises:
        ConfigError: there is no such choice; gives what is wanted beside what there is.
    """
    taken: dict[int, int] = {}  # host -> bundle

    def place(bundle: int, seen: set[int]) -> bool:
        for host, offer in enumerate(hosts):
            if host not in seen and wanted[bundle].fits(offer):
                seen.add(host)
                if host not in taken or place(taken[host], seen):
                    taken[host] = bundle
                    return True
        return False

    for bundle in range(len(wanted)):
        if not place(bundle, set()):
            lines = [f"  wanted of {'one host' if len(wanted) == 1 else 'a host of its own'}: {b}" for b in wanted]
            lines += [f"  {host.name} has {host.cpus:g} CPUs, {host.gpus:g} GPUs{_named(host)}" for host in hosts]
            raise ConfigError(
                f"placement does not fit: {_shortfall(wanted, hosts)}\n" + "\n".join(lines)
                + "\nLower placement.learner or placement.rollout, or add hosts: " + JOIN_COMMANDS
            )
    return [hosts[host] for host, _ in sorted(taken.items(), key=lambda pair: pair[1])]


def _shortfall(wanted: Sequence[Bundle], hosts: Sequence[Host]) -> str:
    if len(wanted) > len(hosts):
        return f"{len(wanted)} hosts wanted, {len(hosts)} there"
    for unit in ("gpus", "cpus"):
        asked, offered = sum(getattr(b, unit) for b in wanted), sum(getattr(h, unit) for h in hosts)
        if asked > offered:
            return f"{asked:g} {unit[:-1].upper()}s wanted, {offered:g} there"
    return "no choice of hosts has enough on each"


def _part(count: int, parts: int, index: int) -> range:
    return range(count * index // parts, count * (index + 1) // parts)


def compact(names: list[str]) -> str:
    """`buffer, rollout/0..1, learner/0..7`"""
    runs: dict[str, list[str]] = {}
    for name in names:
        kind, _, number = name.partition("/")
        runs.setdefault(kind, []).append(number)
    return ", ".join(
        kind if not numbers[0] else f"{kind}/{numbers[0]}" + (f"..{numbers[-1]}" if len(numbers) > 1 else "")
        for kind, numbers in runs.items()
    )


def _named(host: Host) -> str:
    """The resources a user gave a name to."""
    own = sorted(r for r in host.resources if r not in ("CPU", "GPU", "memory", "object_store_memory") and ":" not in r)
    return f", resources {', '.join(own)}" if own else ""
