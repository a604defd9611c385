"""`async-rl doctor` for a run on several nodes: checks each node and the network between them.

A probe on every node of the Ray cluster makes the checks of async_rl/tools/doctor/host.py there. Then the doctor
compares the versions of all nodes, and the probes try to reach each other by TCP. No weights are loaded.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.base.config import Config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import absolute_paths
from async_rl.base.network import open_listener
from async_rl.base.seams.lookup import doc_page, find_sent_modules_first
from async_rl.run.processes.placement import assign, host_demands, ray_hosts
from async_rl.run.processes.ray_start import open_ray
from async_rl.tools.doctor.host import IMPORT_TIMEOUT_S, REINSTALL, Check, examine

CONNECT_TIMEOUT_S = 5.0
PACKAGES = ("torch", "transformers", "ray", "sglang")
OPEN_PORTS = (
    "open the TCP ports between the hosts of a run (firewall, security group; network.ports bounds them, see "
    f"{doc_page('how-to/two-nodes.md')}), or let Ray use another interface: `ray start --node-ip-address`"
)


class Probe:
    """A Ray actor that makes the checks on one node, in the same environment as an actor of the run."""

    def __init__(self, folder: str, config: Config) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)  # as a process of the run does
        os.chdir(folder)
        find_sent_modules_first()
        self._config = config

    def examine(self) -> tuple[list[Check], dict[str, str]]:
        """Return the results of the checks on this node, and the versions of Python and of PACKAGES."""
        versions = {"python": sys.version.split()[0]}
        for name in PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return list(examine(self._config, is_driver=False)), versions

    def listen(self) -> tuple[str, int]:
        """Open a port for other probes to connect to; returns (address, port)."""
        self._server = open_listener(ray.util.get_node_ip_address(), self._config.network.port_range)
        return self._server.getsockname()[:2]

    def reach(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Try to connect to each (address, port). Returns `address:port (reason)` for each failure."""
        failed = []
        for address, port in others:
            try:
                socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
            except OSError as error:
                failed.append(f"{address}:{port} ({error})")
        return failed


def examine_nodes(config: Config) -> Iterator[Check]:
    """Check all nodes of the Ray cluster that the run would join. Yields each result as soon as it is known."""
    try:
        with open_ray(config):
            hosts = ray_hosts()
            offers = "; ".join(f"{host.name}: {host.cpus:g} CPUs, {host.gpus:g} GPUs" for host in hosts)
            yield Check("Ray", "ok", offers)
            wanted = host_demands(config, sum(host.gpus for host in hosts))
            chosen = assign(wanted, hosts)
            yield Check("placement", "ok", "; ".join(f"{h.name}: {b}" for h, b in zip(chosen, wanted, strict=True)))
            yield from _examine_cluster(config)
    except (ConfigError, RayError) as error:
        yield Check("Ray", "broken", str(error))


def _examine_cluster(config: Config) -> Iterator[Check]:
    probe_class: Any = ray.remote(Probe)
    probes = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": probe_class.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(os.getcwd(), resolve(config, absolute_paths(config)))
        for node in ray.nodes() if node["Alive"]
    }
    limit_s = config.timeouts.silent_s
    try:
        found = answers({name: each.examine.remote() for name, each in probes.items()}, IMPORT_TIMEOUT_S + limit_s)
        yield from compare(found)
        able = {name: probes[name] for name, answer in found.items() if not isinstance(answer, str)}
        places = answers({name: probe.listen.remote() for name, probe in able.items()}, limit_s)
        missed = [f"{name} can't listen ({place})" for name, place in places.items() if isinstance(place, str)]
        open_places = {name: place for name, place in places.items() if not isinstance(place, str)}
        reached = answers({
            name: probe.reach.remote([place for other, place in open_places.items() if other != name])
            for name, probe in able.items()
        }, limit_s + CONNECT_TIMEOUT_S * len(able))
        missed += [f"{name} can't reach {others}" for name, others in reached.items() if others]
        reaching = Check("ports", "ok", f"each of {len(able)} nodes reaches the others on a free one")
        yield Check("ports", "broken", "; ".join(missed), OPEN_PORTS) if missed else reaching
    finally:
        for probe in probes.values():
            ray.kill(probe)


def compare(found: Mapping[str, Any]) -> Iterator[Check]:
    """Check that every node passed its own checks, and that all nodes have the same versions. Yields the results.

    `found` has for each node the answer of `Probe.examine`, or as text why there is none.
    """
    known = {name: answer for name, answer in found.items() if not isinstance(answer, str)}
    for name, why in found.items():
        if isinstance(why, str):
            yield Check(name, "broken", why, f"the same environment on every host: {REINSTALL}; or {OPEN_PORTS}")
    for name, (checks, _) in known.items():
        bad = [check for check in checks if check.state != "ok"]
        yield Check(name, "ok", f"{len(checks) - len(bad)} of {len(checks)} checks are ok")
        yield from (dataclasses.replace(check, what=f"{name}: {check.what}") for check in bad)
    for package in ("python", *PACKAGES):
        versions = {name: of_node.get(package, "none") for name, (_, of_node) in known.items()}
        differ = "; ".join(f"{name} has {value}" for name, value in versions.items())
        if len(set(versions.values())) > 1:
            yield Check(f"{package} everywhere", "broken", differ, f"install the same on every host: {REINSTALL}")


def answers(calls: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Wait at most `limit_s` for all Ray calls. Returns by name each result, or as text why there is none."""
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = ray.get(call, timeout=0)
        except RayError as error:
            found[name] = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
    return found
