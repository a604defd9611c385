"""Who runs where: from `placement` to Ray bundles, one for each host the run needs.

    bundles(config)          what each host must offer, and the processes it gets
    assign(bundles, hosts)   a host for each, or the arithmetic of why not
    reserve(...)             the same by Ray: a placement group, STRICT_SPREAD over the hosts

Ray makes the choice; `assign` explains it beforehand (`--dry-run`) and says what is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_rl.config import Config
from async_rl.errors import ConfigError, WaitTimeoutError

JOIN_COMMANDS = (
    "on the first host `ray start --head`, on each other one `ray start --address=<first host>:6379`, "
    "then async-rl on any of them"
)


class NoClusterError(ConfigError):
    """No Ray cluster is where one was looked for."""


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

    @property
    def cpus(self) -> int:
        return len(self.gpus_of) - ("buffer" in self.gpus_of)

    def fits(self, host: Host) -> bool:
        return (
            self.gpus <= host.gpus and self.cpus <= host.cpus and (not self.resource or self.resource in host.resources)
        )

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"
        gpus = f", {self.gpus:g} GPU{'s' if self.gpus != 1 else ''} ({self.sum_of_gpus})" if self.gpus else ""
        resource = f", resource {self.resource}" if self.resource else ""
        return f"{_compact(list(self.gpus_of))}: {cpus}{gpus}{resource}"


def bundles(config: Config, gpus_there: float = 0.0) -> list[Bundle]:
    """One for each host: the learner's first, then those of the servers if they have their own.

    Args:
        gpus_there: of the hosts together. Where the config does not ask for GPUs in numbers, they are used if there
            are enough for all, or shared by all if there is one host.
    """
    placement = config.placement
    learner, rollout = placement.learner, placement.rollout
    with_learner = rollout.nodes == 0
    wanted = learner.ranks + rollout.servers * rollout.tp
    if learner.gpus_per_node or gpus_there >= wanted:
        share = 1.0
    else:
        share = int(100 * gpus_there / wanted) / 100 if placement.num_nodes == 1 else 0.0
    if placement.colocated:
        share = 0.5 if learner.gpus_per_node or gpus_there >= learner.ranks else 0.0
    result = []
    for node in range(learner.nodes):
        ranks = _part(learner.ranks, learner.nodes, node)
        servers = _part(rollout.servers, learner.nodes, node) if with_learner else range(0)
        processes = {"buffer": 0.0} if node == 0 else {}
        processes |= {f"rollout/{i}": share * rollout.tp for i in servers}
        processes |= {f"learner/{r}": share for r in ranks}
        result.append(_bundle(processes, learner.resource, placement.colocated))
    for node in range(rollout.nodes):
        servers = _part(rollout.servers, rollout.nodes, node)
        result.append(_bundle({f"rollout/{i}": share * rollout.tp for i in servers}, rollout.resource, False))
    return result


def _bundle(gpus_of: Mapping[str, float], resource: str, colocated: bool) -> Bundle:
    parts = []
    for kind, noun in (("learner", "learner rank"), ("rollout", "server")):
        of_kind = [gpus for name, gpus in gpus_of.items() if name.startswith(kind)]
        if of_kind:
            parts.append(f"{len(of_kind)} {noun}{'s' if len(of_kind) != 1 else ''} x {of_kind[0]:g}")
    gpus = round(sum(gpus_of.values()), 2)
    if colocated and gpus:
        gpus = float(max(sum(n.startswith(kind) for n in gpus_of) for kind in ("learner", "rollout")))
    return Bundle(gpus_of=gpus_of, sum_of_gpus=" + ".join(parts), gpus=gpus, resource=resource)


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


@dataclass(slots=True)
class Reservation:
    """A Ray placement group and where its parts are."""

    group: Any
    bundles: list[Bundle]
    addresses: list[str]
    """Of each bundle's host."""
    bundle_of: dict[str, int] = field(default_factory=dict)

    def options(self, process: str) -> dict[str, Any]:
        """For `ray.remote(...).options`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = self.bundle_of[process]
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        gpus = self.bundles[index].gpus_of[process]
        return {"scheduling_strategy": strategy, "num_cpus": int(process != "buffer"), "num_gpus": gpus}

    def host_of(self, process: str) -> str:
        return self.addresses[self.bundle_of[process]]

    def __str__(self) -> str:
        return "; ".join(f"{a}: {_compact(list(b.gpus_of))}" for a, b in zip(self.addresses, self.bundles, strict=True))


def reserve(config: Config) -> Reservation:
    """Have Ray set aside a host, or part of one, for each bundle.

    Raises:
        ConfigError: the hosts can't offer it.
        WaitTimeoutError: they could, but others hold it, for longer than timeouts.join_s.
    """
    import ray
    from ray.util import placement_group, placement_group_table

    hosts = ray_hosts()
    wanted = bundles(config, sum(host.gpus for host in hosts))
    assign(wanted, hosts)
    group = placement_group(
        [_ray_resources(bundle) for bundle in wanted], strategy="STRICT_SPREAD" if len(wanted) > 1 else "STRICT_PACK"
    )
    if not group.wait(config.timeouts.join_s):
        free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
        raise WaitTimeoutError(
            f"the driver waited {config.timeouts.join_s:.0f} s (timeouts.join_s) for Ray to set aside "
            f"{'; '.join(map(str, wanted))}. The hosts have it, but only {free or 'nothing'} is free: `ray status` "
            "shows who holds the rest"
        )
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = [address_of[nodes[index]] for index in range(len(wanted))]
    bundle_of = {name: index for index, bundle in enumerate(wanted) for name in bundle.gpus_of}
    return Reservation(group, wanted, addresses, bundle_of)


def settle(config: Config, reservation: Reservation) -> Config:
    """The config with what only the placement could decide: the transport that `auto` stands for, keys for the run.

    gloo on CPU; NCCL where learner ranks and servers have GPUs of their own, as it refuses two ranks on one device.
    """
    if config.weight_sync.transport == "auto":
        transport: Any = _transport(config, reservation.bundles)
        config = replace(config, weight_sync=replace(config.weight_sync, transport=transport))
    network = config.network
    if config.placement.num_nodes > 1 and not (network.keys or network.insecure):
        from buffer.keys import new_keys

        keys = config.run_dir / "keys"
        if not (keys / "client.key_secret").is_file():  # a resumed run has them
            new_keys(keys)
        config = replace(config, network=replace(network, keys=str(keys)))
    return config


def _transport(config: Config, parts: Sequence[Bundle]) -> str:
    shares = {gpus for part in parts for name, gpus in part.gpus_of.items() if name != "buffer"}
    if shares == {0.0}:
        return "gloo"
    if min(shares) >= 1:
        return "nccl"
    on_one_gpu = len(parts) == 1 and parts[0].gpus <= 1 and config.placement.learner.ranks == 1
    return "cuda_ipc" if on_one_gpu and config.rollout.engine == "sglang" and config.network.is_on_loopback else "disk"


def _ray_resources(bundle: Bundle) -> dict[str, float]:
    wanted = {"CPU": float(bundle.cpus), "GPU": bundle.gpus, bundle.resource: 0.001}
    return {name: amount for name, amount in wanted.items() if name and amount}


def ray_hosts() -> list[Host]:
    """Of the Ray cluster this process has joined."""
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
    """A private Ray on this machine, or the cluster: the one RAY_ADDRESS names, or this host's if the run spans hosts.

    Raises:
        NoClusterError: there is no cluster to join.
        ConfigError: this process can't join it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import logging

    import ray

    placement = config.placement
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS") or ("auto" if placement.num_nodes > 1 else "")
    if address:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise NoClusterError(
                f"placement wants {placement.num_nodes} hosts, but no Ray cluster is found ({error}). "
                f"Start one: {JOIN_COMMANDS}"
            ) from None
        except RuntimeError as error:  # of another version of Ray or Python, above all
            raise ConfigError(
                f"the Ray cluster at {address} can't be joined: {str(error).strip()}\nEvery host and this process must "
                "have the same versions of Python and Ray: install them anew where they differ, then `ray stop` and "
                f"start the cluster again: {JOIN_COMMANDS}"
            ) from None
    else:
        ray.init(
            address="local", include_dashboard=False, num_cpus=1 + placement.rollout.servers + placement.learner.ranks,
            object_store_memory=128 * 2**20,  # only reports travel through it
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def explain(config: Config) -> list[str]:
    """Who would land where, one line a host; starts nothing, but looks at the Ray cluster that the run would join.

    Raises:
        ConfigError: it can't fit, or the cluster can't be joined.
    """
    if runs_here(config):
        hosts = [Host(name="this host", cpus=float("inf"), gpus=gpus_here())]
    else:
        try:
            with open_ray(config):
                hosts = ray_hosts()
        except NoClusterError:
            if os.environ.get("RAY_ADDRESS"):
                raise
            return [
                *(f"host {number}: {bundle}" for number, bundle in enumerate(bundles(config), 1)),
                "not held against any host: there is no Ray cluster here, and RAY_ADDRESS names none",
            ]
    wanted = bundles(config, sum(host.gpus for host in hosts))
    return [f"{host.name}: {bundle}" for host, bundle in zip(assign(wanted, hosts), wanted, strict=True)]


def runs_here(config: Config) -> bool:
    """Whether every process will be on this host."""
    return config.placement.num_nodes == 1 and not os.environ.get("RAY_ADDRESS")


def gpus_here() -> float:
    import torch

    return float(torch.cuda.device_count())


def _part(count: int, parts: int, index: int) -> range:
    return range(count * index // parts, count * (index + 1) // parts)


def _compact(names: list[str]) -> str:
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
