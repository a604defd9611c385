"""Reserves the resources of a run at Ray: a placement group for the learner, and one for each server.

A server has a placement group of its own, so that it can come and go. Ray places the group as soon as a host has room.
Servers that share GPUs with learner ranks in pairs are the exception: they are in the learner's group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.run.processes.placement import Host, HostDemand, assign, compact, host_demands, ray_hosts
from async_rl.run.processes.signals import StopSignals

RESERVE_INTERVAL_S = 0.5
PLACE_INTERVAL_S = 1.0
"""The time between two checks whether a server has got a host."""
NODE = "ray.io/node-id"
"""The label of a host with its node ID. Ray gives it to each host."""


class Reservation:
    """The resources of a run that Ray has reserved: for the learner, and for each server by itself.

    Args:
        config: the configuration of the run.
        wanted: the demand on each host at the start.
        hosts: the host of each of the first demands. The servers of the others may run on any host for servers.
        gpus: the number of GPUs of all hosts of the cluster at the start.
    """

    def __init__(self, config: Config, wanted: Sequence[HostDemand], hosts: Sequence[Host], gpus: float = 0.0) -> None:
        self.gpus = gpus
        self.parts = [part for demand in wanted for part in demand.per_gpu()]
        """The demand on each host at the start, divided by pairs that share a GPU."""
        self._config = config
        self._bundles = [
            (replace(part, gpus_of=own), host) for demand, host in zip(wanted, hosts, strict=False)
            for part in demand.per_gpu() if (own := _of_learner(part))
        ]
        """The bundles of the learner's placement group: the processes of each, and its host."""
        self._servers = {
            name: (gpus_of_server, hosts[index] if index < len(hosts) else None) for index, demand in enumerate(wanted)
            for name, gpus_of_server in demand.gpus_of.items() if name not in _of_learner(demand)
        }
        """For each server with a placement group of its own: its GPUs, and its host at the start, if that is chosen."""
        self._group: Any = None
        """The placement group of the learner."""
        self._groups: dict[str, Any] = {}
        """The placement groups of servers, by process name."""
        self._hosts: dict[str, str] = {}
        """The address of the host of each server's newest placement."""

    def begin(self) -> list[Any]:
        """Ask Ray for the resources of the start, and return the placement groups, which may still be pending."""
        from ray.util import placement_group

        wants = [_resources(part.gpus_of, part.resource) for part, _ in self._bundles]
        pins = [{NODE: host.node} for _, host in self._bundles]
        self._group = placement_group(wants, strategy="PACK", bundle_label_selector=pins)
        for name, (_, host) in self._servers.items():
            self._ask(name, host.node if host else "")
            self._hosts[name] = host.name if host else ""
        return [self._group, *self._groups.values()]

    def note_hosts(self) -> None:
        """Note the hosts that Ray has chosen for the servers of the start."""
        for server in self._groups:
            self._is_placed(server)

    async def find_place(self, server: str) -> None:
        """Wait until a host has room for a server. There is no time limit.

        If the host of its last start is there and does not leave, the server stays on it.
        """
        if any(server in part.gpus_of for part, _ in self._bundles):
            return
        if server in self._groups and not self._is_placed(server):
            self.release(server)
        if server not in self._groups:
            self._ask(server)
        while not self._is_placed(server):
            await asyncio.sleep(PLACE_INTERVAL_S)

    def has_host(self, server: str) -> bool:
        """Return whether the host of a server's last start is there and does not leave."""
        return server not in self._groups or self._is_placed(server)

    def release(self, server: str) -> None:
        """Give the resources of a server back to Ray, which ends its process."""
        from ray.util import remove_placement_group

        if server in self._groups:
            remove_placement_group(self._groups.pop(server))

    def seconds_left(self) -> dict[str, float]:
        """Return {server: seconds until its host leaves} of the servers on hosts whose leave Ray has announced."""
        if not (leaving := leaving_nodes()):
            return {}
        nodes = {server: _node_of(group) for server, group in self._groups.items()}
        return {server: leaving[node] for server, node in nodes.items() if node in leaving}

    def options(self, process: str) -> dict[str, Any]:
        """Return the Ray actor options that start `process` where its resources are."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if process in self._groups:
            strategy = PlacementGroupSchedulingStrategy(self._groups[process], placement_group_bundle_index=0)
            return {"scheduling_strategy": strategy, "num_cpus": 1, "num_gpus": self._gpus_of(process)}
        index, part = next((i, part) for i, (part, _) in enumerate(self._bundles) if process in part.gpus_of)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {
            "scheduling_strategy": strategy, "num_cpus": int(process != "buffer"), "num_gpus": part.gpus_of[process],
        }

    def host_of(self, process: str) -> str:
        """Return the address of the host of a process; of a server without a host: of its last one, or "no host"."""
        of_learner = next((host.name for part, host in self._bundles if process in part.gpus_of), "")
        return of_learner or self._hosts.get(process) or "no host"

    def _ask(self, server: str, node: str = "") -> None:
        """Ask Ray for the resources of a server: on host `node`, or on any host where servers may run."""
        from ray.util import placement_group

        placed, learners = self._config.placement.rollout, ",".join(host.node for _, host in self._bundles)
        where = node or (f"!in({learners})" if placed.nodes else f"in({learners})")
        anywhere = placed.is_elastic and placed.nodes and placed.resource and not node
        wants = _resources({server: self._gpus_of(server)}, placed.resource if placed.nodes else "")
        self._groups[server] = placement_group(
            [wants], strategy="PACK", bundle_label_selector=[{} if anywhere else {NODE: where}]
        )

    def _is_placed(self, server: str) -> bool:
        """Return whether a server has a host that is there and does not leave, and note its address."""
        node = _node_of(self._groups[server])
        if not node or node in leaving_nodes():
            return False
        address = next((host.name for host in ray_hosts() if host.node == node), "")
        self._hosts[server] = address or self._hosts.get(server, "")
        return bool(address)

    def _gpus_of(self, server: str) -> float:
        """Return the GPUs of a server. A rollout server that joins later gets as many as the first one."""
        like = server if server in self._servers else "rollout/0"
        return self._servers[like][0]

    def __str__(self) -> str:
        processes: dict[str, list[str]] = {}
        for part, host in self._bundles:
            processes.setdefault(host.name, []).extend(part.gpus_of)
        for name in self._servers:
            processes.setdefault(self.host_of(name), []).append(name)
        return "; ".join(f"{address}: {compact(names)}" for address, names in processes.items())


def _of_learner(part: HostDemand) -> dict[str, float]:
    """Return the GPUs of the processes that get the learner's placement group, with servers only if they share GPUs."""
    servers = () if part.paired else ("rollout/", "eval/", "judge/")
    return {name: gpus for name, gpus in part.gpus_of.items() if not name.startswith(servers)}


def _resources(gpus_of: Mapping[str, float], resource: str) -> dict[str, float]:
    """Return the Ray resources of processes on one host. Pairs of a learner rank and a server need one GPU together."""
    gpus, cpus = round(sum(gpus_of.values()), 2), len(gpus_of) - ("buffer" in gpus_of)
    wants = {"CPU": float(cpus), "GPU": gpus, resource: 0.001}
    return {name: amount for name, amount in wants.items() if name and amount}


def _node_of(group: Any) -> str:
    """Return the node ID of the host of a placement group with one bundle; "" if it has none."""
    from ray.util import placement_group_table

    placed = placement_group_table(group)
    return str(placed["bundles_to_node_id"].get(0) or "") if placed["state"] == "CREATED" else ""


def leaving_nodes() -> dict[str, float]:
    """Return {node ID: seconds left} of the hosts whose leave Ray has announced; inf for one without a deadline."""
    from ray._private.state import state

    state._connect_and_get_accessor()  # type: ignore[no-untyped-call]
    draining, now_s = state.get_draining_nodes(), time.time()
    return {node: deadline_ms / 1e3 - now_s if deadline_ms else inf for node, deadline_ms in draining.items()}


def reserve(config: Config, signals: StopSignals) -> Reservation:
    """Wait until Ray has reserved the resources with which the run begins, and return the reservation.

    Raises:
        ConfigError: the hosts do not have the resources.
        WaitTimeoutError: the resources were not free within timeouts.startup_s.
        KeyboardInterrupt: after Ctrl-C or SIGTERM.
    """
    import ray

    hosts = ray_hosts()
    gpus = sum(host.gpus for host in hosts)
    wanted = host_demands(config, gpus)
    of_hosts = wanted[: config.placement.learner.nodes] if config.placement.rollout.is_elastic else wanted
    try:
        chosen = assign(of_hosts, ray_hosts(free=True))
    except ConfigError:
        chosen = assign(of_hosts, hosts)
    reservation = Reservation(config, wanted, chosen, gpus)
    groups = reservation.begin()
    deadline_s = time.monotonic() + config.timeouts.startup_s
    while not all(group.wait(RESERVE_INTERVAL_S) for group in groups):
        signals.check()
        if time.monotonic() < deadline_s:
            continue
        free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
        raise WaitTimeoutError(
            f"the driver waited {config.timeouts.startup_s:.0f} s (timeouts.startup_s) for Ray to set aside "
            f"{'; '.join(map(str, wanted))}. The hosts have it, but only {free or 'nothing'} is free: `ray status` "
            "shows who holds the rest: end that, or start this run later"
        )
    reservation.note_hosts()
    return reservation
