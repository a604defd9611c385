"""`async-rl doctor` for a run on several nodes: checks each node and the network between them.

A probe on every node of the Ray cluster makes the checks of async_rl/tools/doctor/host.py there. Then the doctor
compares what must be equal on all nodes, and the probes try to reach each other by TCP. No weights are loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
import uuid
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
from async_rl.base.models_and_data.hub import cached_folder
from async_rl.base.models_and_data.hub_names import absolute_paths
from async_rl.base.models_and_data.model_folder import load_tokenizer
from async_rl.base.network.ports import open_listener
from async_rl.base.seams.doc_pages import doc_page
from async_rl.base.seams.user_modules import find_sent_modules_first
from async_rl.run.processes.placement import ray_hosts
from async_rl.run.processes.ray_start import open_ray
from async_rl.run.processes.resources import assign, host_demands
from async_rl.tools.doctor.host import IMPORT_TIMEOUT_S, REINSTALL, Check, examine

_PAGE = doc_page("two-nodes.md")
CONNECT_TIMEOUT_S = 5.0
PACKAGES = ("torch", "transformers", "ray", "sglang")
OPEN_PORTS = (
    "open the TCP ports between the hosts of a run (firewall, security group; network.ports bounds them, see "
    f"{_PAGE}), or let Ray use another interface: `ray start --node-ip-address`"
)
SAME_MODEL = "put model.path on a disk that all hosts share, or name a model of the hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The results of the checks on one node, and the values to compare with other nodes."""

    checks: list[Check] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    """Values that must be the same on every node: versions of packages, digests of the tokenizer and the model."""
    sees_run_dir: bool = True


class Probe:
    """A Ray actor that makes the checks on one node, in the environment that an actor of the run would have."""

    def __init__(self, folder: str, config: Config) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)  # as a process of the run does
        os.chdir(folder)
        find_sent_modules_first()
        self._config = config

    def examine(self, marker: str) -> NodeReport:
        """Make the checks of the probe's node; returns the node's report.

        Args:
            marker: name of a file that the driver has created in run.dir, to see whether this node shares the folder.
        """
        path = cached_folder(self._config.model.path) or Path(self._config.model.path)
        facts = {"python": sys.version.split()[0], **{name: _version(name) for name in PACKAGES}}
        facts |= {"tokenizer": _tokenizer_digest(path), "model": _model_digest(path)}
        return NodeReport(
            checks=list(examine(self._config, is_driver=False)), facts=facts,
            sees_run_dir=(Path(self._config.run.dir) / marker).exists(),
        )

    def listen(self) -> tuple[str, int]:
        """Open a port for other probes to connect to; returns (address, port)."""
        self._server = open_listener(ray.util.get_node_ip_address(), self._config.network.port_range)
        return self._server.getsockname()[:2]

    def reach(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Try to connect to each (address, port); returns `address:port (reason)` for each that was not reached."""
        failed = []
        for address, port in others:
            try:
                socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
            except OSError as error:
                failed.append(f"{address}:{port} ({error})")
        return failed


def examine_nodes(config: Config) -> Iterator[Check]:
    """Yield the checks of all nodes of the Ray cluster that the run would join, each as soon as it is made."""
    try:
        with open_ray(config):
            yield from _examine_cluster(config)
    except ConfigError as error:
        yield Check("Ray", "broken", str(error))


def _examine_cluster(config: Config) -> Iterator[Check]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    offers = "; ".join(f"{host.name}: {host.cpus:g} CPUs, {host.gpus:g} GPUs" for host in ray_hosts())
    yield Check("Ray", "ok", f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {offers}")
    yield _placement(config)
    probe_class: Any = ray.remote(Probe)
    addresses = [node["NodeManagerAddress"] for node in nodes]
    probes = {
        address if addresses.count(address) == 1 else f"{address} ({node['NodeID'][:6]})": probe_class.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(os.getcwd(), resolve(config, absolute_paths(config)))
        for address, node in zip(addresses, nodes, strict=True)
    }
    marker = Path(config.run.dir) / f".doctor-{uuid.uuid4().hex}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        timeout_s = IMPORT_TIMEOUT_S + config.timeouts.silent_s
        examining = {name: probe.examine.remote(marker.name) for name, probe in probes.items()}
        reports = call_all(examining, timeout_s)
        yield from compare(reports, unshared=_unshared_nodes(config))
        able = {name: probe for name, probe in probes.items() if not isinstance(reports[name], Exception)}
        if len(able) > 1:
            yield _ports(able, config.timeouts.silent_s)
    finally:
        marker.unlink(missing_ok=True)
        for probe in probes.values():
            ray.kill(probe)


def _placement(config: Config) -> Check:
    """Return the check of CPUs and GPUs: broken if the nodes have too few for the run, warn if too few are free."""
    hosts = ray_hosts()
    try:
        wanted = host_demands(config, sum(host.gpus for host in hosts))
        chosen = assign(wanted, hosts)
    except ConfigError as error:
        return Check("placement", "broken", str(error))
    free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
    asked = {"CPU": float(sum(b.cpus for b in wanted)), "GPU": sum(b.gpus for b in wanted)}
    if short := [f"{asked[key]:g} {key}s wanted, {free[key]:g} free" for key in asked if free[key] < asked[key]]:
        return Check("placement", "warn", "; ".join(short), "`ray status` shows who holds the rest; end it, or wait")
    return Check("placement", "ok", "; ".join(f"{h.name}: {b}" for h, b in zip(chosen, wanted, strict=True)))


def _unshared_nodes(config: Config) -> int:
    """Return how many nodes may have a run.dir of their own: nodes of rollout servers, unless weights go by files."""
    transport = config.weight_sync.transport_entry
    return 0 if transport and transport.writes_files else config.placement.rollout.nodes


def compare(reports: Mapping[str, NodeReport | Exception], unshared: int = 0) -> Iterator[Check]:
    """Yield the checks that every node passed its own checks and that versions, model and run.dir are equal on all.

    Args:
        reports: [node] the node's report, or an exception if the node could not be examined.
        unshared: the number of nodes that need not share run.dir.
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
            bad = [check for check in report.checks if check.state != "ok"]
            yield Check(name, "ok", f"{len(report.checks) - len(bad)} of {len(report.checks)} checks are ok")
            yield from (dataclasses.replace(check, what=f"{name}: {check.what}") for check in bad)
    for fact in ("python", *PACKAGES, "tokenizer", "model"):
        found_on = {name: report.facts.get(fact) or "none" for name, report in known.items()}
        if len(set(found_on.values())) < 2:
            yield Check(f"{fact} everywhere", "ok", next(iter(found_on.values()), "no node reports it"))
            continue
        differences = "; ".join(f"{name} has {value}" for name, value in found_on.items())
        mend = SAME_MODEL if fact in ("tokenizer", "model") else f"install the same on every host: {REINSTALL}"
        yield Check(f"{fact} everywhere", "broken", differences, mend)
    blind = [name for name, report in known.items() if not report.sees_run_dir]
    yield Check(
        "run.dir everywhere", "broken" if len(blind) > unshared else "warn" if blind else "ok",
        f"not the driver's folder on {', '.join(blind)}" if blind else "the same folder",
        "set run.dir to a folder on a disk that all hosts share: checkpoints and logs go there. Only hosts of rollout "
        "servers may have another: name those of the learner by placement.learner.resource, and start the run there",
    )


def _ports(probes: Mapping[str, Any], timeout_s: float) -> Check:
    """Return the check that each node can open a TCP connection to each other one; it names those that can't."""
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
    """Wait for all Ray `calls`, at most `timeout_s`; returns {name: result, or exception if it failed or was late}."""
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


def _tokenizer_digest(path: Path) -> str:
    """Return a digest of the tokenizer's vocabulary and chat template, or "" if the tokenizer can't be loaded."""
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError:
        return ""
    return _digest(json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]))


def _model_digest(path: Path) -> str:
    """Return a digest of config.json and of names and sizes of the weight files, or "" if they can't be read."""
    try:
        weights = sorted((file.name, file.stat().st_size) for file in path.glob("*.safetensors"))
        return _digest((path / "config.json").read_text() + json.dumps(weights))
    except OSError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
