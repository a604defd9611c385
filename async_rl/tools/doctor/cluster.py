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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.base.config import Config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub_names import absolute_paths
from async_rl.base.ports import open_listener
from async_rl.base.seams.lookup import doc_page, find_sent_modules_first
from async_rl.run.before_start.preflight import input_checks
from async_rl.run.processes.placement import HostDemand, assign, host_demands, ray_hosts
from async_rl.run.processes.ray_start import open_ray
from async_rl.tools.doctor.host import IMPORT_TIMEOUT_S, REINSTALL, Check, examine

CONNECT_TIMEOUT_S = 5.0
PACKAGES = ("torch", "transformers", "ray", "sglang")
OPEN_PORTS = (
    "open the TCP ports between the hosts of a run (firewall, security group; network.ports bounds them, see "
    f"{doc_page('how-to/two-nodes.md')}), or let Ray use another interface: `ray start --node-ip-address`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The results of the checks on one node, and its versions."""

    checks: list[Check] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of PACKAGES, which must be the same on every node."""


class Probe:
    """A Ray actor that makes the checks on one node, in the same environment as an actor of the run."""

    def __init__(self, folder: str, config: Config) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)  # as a process of the run does
        os.chdir(folder)
        find_sent_modules_first()
        self._config = config

    def examine(self) -> NodeReport:
        versions = {"python": sys.version.split()[0], **{name: _version(name) for name in PACKAGES}}
        return NodeReport(checks=list(examine(self._config, is_driver=False)), versions=versions)

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
            yield from _examine_cluster(config)
    except ConfigError as error:
        yield Check("Ray", "broken", str(error))


def _examine_cluster(config: Config) -> Iterator[Check]:
    hosts = ray_hosts()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    offers = "; ".join(f"{host.name}: {host.cpus:g} CPUs, {host.gpus:g} GPUs" for host in hosts)
    yield Check("Ray", "ok", f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {offers}")
    wanted: Sequence[HostDemand] = ()
    try:
        wanted = host_demands(config, sum(host.gpus for host in hosts))
        chosen = assign(wanted, hosts)
        yield Check("placement", "ok", "; ".join(f"{h.name}: {b}" for h, b in zip(chosen, wanted, strict=True)))
    except ConfigError as error:
        yield Check("placement", "broken", str(error))
    probe_class: Any = ray.remote(Probe)
    addresses = [node["NodeManagerAddress"] for node in nodes]
    probes = {
        address if addresses.count(address) == 1 else f"{address} ({node['NodeID'][:6]})": probe_class.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(os.getcwd(), resolve(config, absolute_paths(config)))
        for address, node in zip(addresses, nodes, strict=True)
    }
    try:
        examining = {name: probe.examine.remote() for name, probe in probes.items()}
        reports = call_all(examining, IMPORT_TIMEOUT_S + config.timeouts.silent_s)
        yield from compare(reports, spare_nodes(config, wanted, len(nodes)))
        able = {name: probe for name, probe in probes.items() if not isinstance(reports[name], Exception)}
        if len(able) > 1:
            yield _ports(able, config.timeouts.silent_s)
    finally:
        for probe in probes.values():
            ray.kill(probe)


def spare_nodes(config: Config, wanted: Sequence[HostDemand], num_nodes: int) -> dict[str, int]:
    """Return for each check, by name, how many nodes may fail it, because no process on them needs what it checks.

    Example: if one of three nodes has only the judge's servers, one node may lack model.path.

    Args:
        wanted: the hosts that the run needs, with the processes on each.
    """
    def needs(pools: tuple[str, ...]) -> int:
        return sum(any(name.startswith(pools) for name in demand.gpus_of) for demand in wanted)

    return {each.what: num_nodes - needs(each.pools) for each in input_checks(config) if each.pools}


def compare(reports: Mapping[str, NodeReport | Exception], spare: Mapping[str, int]) -> Iterator[Check]:
    """Check that every node passed its own checks, and that all nodes have the same versions. Yields the results.

    Args:
        reports: each node's report, by name, or an exception if the node could not be examined.
        spare: for each check, the number of nodes that may fail it; such a failure is a warning.
    """
    known = {}
    for name, report in reports.items():
        if isinstance(report, TimeoutError):
            mend = f"check with `ray status` that the host is alive; if so, {OPEN_PORTS}"
            yield Check(name, "broken", str(report), mend)
        elif isinstance(report, Exception):
            found = f"the checks can't run there: {_last_line(report)}"
            yield Check(name, "broken", found, f"the same environment on every host: {REINSTALL}")
        else:
            known[name] = report
    failing = [check.what for report in known.values() for check in report.checks if check.state == "broken"]
    for name, report in known.items():
        bad = [check for check in report.checks if check.state != "ok"]
        yield Check(name, "ok", f"{len(report.checks) - len(bad)} of {len(report.checks)} checks are ok")
        for check in bad:
            there = dataclasses.replace(check, what=f"{name}: {check.what}")
            if check.state == "broken" and failing.count(check.what) <= spare.get(check.what, 0):
                found = f"needed only if Ray puts a process there that uses it: {check.found}"
                there = dataclasses.replace(there, state="warn", found=found)
            yield there
    for package in ("python", *PACKAGES):
        found_on = {name: report.versions.get(package) or "none" for name, report in known.items()}
        if len(set(found_on.values())) < 2:
            yield Check(f"{package} everywhere", "ok", next(iter(found_on.values()), "no node reports it"))
            continue
        differences = "; ".join(f"{name} has {value}" for name, value in found_on.items())
        yield Check(f"{package} everywhere", "broken", differences, f"install the same on every host: {REINSTALL}")


def _ports(probes: Mapping[str, Any], timeout_s: float) -> Check:
    """Check that each node can open a TCP connection to each other node. The result names pairs that can't."""
    listening = call_all({name: probe.listen.remote() for name, probe in probes.items()}, timeout_s)
    targets = {name: place for name, place in listening.items() if not isinstance(place, Exception)}
    reached = call_all({
        name: probe.reach.remote([place for other, place in targets.items() if other != name])
        for name, probe in probes.items()
    }, timeout_s + CONNECT_TIMEOUT_S * len(probes))
    failures = [f"{n} can't listen ({_last_line(e)})" for n, e in listening.items() if isinstance(e, Exception)]
    for name, missed in reached.items():
        if isinstance(missed, Exception):
            failures.append(f"{name}: {_last_line(missed)}")
        elif missed:
            failures.append(f"{name} can't reach {', '.join(missed)}")
    if failures:
        return Check("ports", "broken", "; ".join(failures), OPEN_PORTS)
    return Check("ports", "ok", f"each of {len(probes)} nodes reaches the others on a free one")


def call_all(calls: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Wait at most `timeout_s` for all Ray calls.

    Returns by name each result, or an exception if it failed or was late.
    """
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    results: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            results[name] = ray.get(call) if call in ready else TimeoutError(f"no answer for {timeout_s:.0f} s")
        except RayTaskError as error:
            results[name] = error.cause if isinstance(error.cause, Exception) else error
        except RayError as error:
            results[name] = error
    return results


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
