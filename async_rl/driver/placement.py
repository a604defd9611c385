"""Who runs where: Ray sets aside what async_rl/driver/resources.py asks of each host.

    reserve(config)    a placement group, STRICT_SPREAD over the hosts
    explain(config)    the same without Ray's part, beforehand (`--dry-run`)
    resolve_placement(...)        what only the placement could decide
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.driver.resources import JOIN_COMMANDS, Bundle, Host, assign, bundles, compact
from async_rl.errors import ConfigError, WaitTimeoutError
from async_rl.seams import choose_transport


class NoClusterError(ConfigError):
    """No Ray cluster is where one was looked for."""


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
        return "; ".join(f"{a}: {compact(list(b.gpus_of))}" for a, b in zip(self.addresses, self.bundles, strict=True))


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
    parts, resources, strategy = ray_bundles(wanted, assign(wanted, hosts))
    group = placement_group(resources, strategy=strategy)
    if not group.wait(config.timeouts.join_s):
        free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU"))
        raise WaitTimeoutError(
            f"the driver waited {config.timeouts.join_s:.0f} s (timeouts.join_s) for Ray to set aside "
            f"{'; '.join(map(str, wanted))}. The hosts have it, but only {free or 'nothing'} is free: `ray status` "
            "shows who holds the rest"
        )
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = [address_of[nodes[index]] for index in range(len(parts))]
    bundle_of = {name: index for index, part in enumerate(parts) for name in part.gpus_of}
    return Reservation(group, parts, addresses, bundle_of)


def ray_bundles(wanted: Sequence[Bundle], hosts: Sequence[Host]) -> tuple[list[Bundle], list[dict[str, float]], str]:
    """(what Ray is asked for, piece by piece, the resources of each, how it is to place them). Ray chooses the hosts;
    but where pairs share the GPUs of several, it can't be told which pieces belong together, only where: on `hosts`.
    """
    parts = [(part, host) for bundle, host in zip(wanted, hosts, strict=True) for part in bundle.per_gpu()]
    resources = [_ray_resources(part) for part, _ in parts]
    strategy = "STRICT_SPREAD" if len(wanted) > 1 else "STRICT_PACK"
    if len(parts) > len(wanted) > 1:
        strategy = "PACK"
        resources = [r | {f"node:{host.name}": 0.001} for r, (_, host) in zip(resources, parts, strict=True)]
    return [part for part, _ in parts], resources, strategy


def resolve_placement(config: Config, reservation: Reservation) -> Config:
    """The config with what only the placement could decide: the transport that `auto` stands for, keys for the run.

    gloo on CPU; NCCL where learner ranks and servers have GPUs of their own, as it refuses two ranks on one device.

    Raises:
        ConfigError: the transport does not fit the placement.
    """
    if config.weight_sync.transport == "auto":
        transport = _transport(config, reservation.bundles)
        config = replace(config, weight_sync=replace(config.weight_sync, transport=transport))
    check_ipc(config, reservation.bundles)
    network = config.network
    if config.placement.num_nodes > 1 and not (network.keys or network.insecure):
        from buffer.protocol.keys import new_keys

        keys = config.run_dir / "keys"
        if not (keys / "client.key_secret").is_file():  # a resumed run has them
            new_keys(keys)
        config = replace(config, network=replace(network, keys=str(keys)))
    return config


def check_ipc(config: Config, parts: Sequence[Bundle]) -> None:
    """A process maps memory of its own device only: of another, which for the sender has the same number, it can't.

    Raises:
        ConfigError: weights are to go by cuda_ipc, and learner and servers will not be on one GPU.
    """
    asked, entry, gpus = config.weight_sync.transport, config.weight_sync.transport_entry, sum(p.gpus for p in parts)
    needs_one_device = entry is not None and entry.needs_one_device
    check(
        not needs_one_device or gpus == 0 or _on_one_gpu(config, parts), "weight_sync.transport", asked,
        f"auto, nccl or disk where learner and servers are not on one GPU, but on {gpus:g}",
        "Or set placement.colocated: true with one learner rank and one server.",
    )


def _transport(config: Config, parts: Sequence[Bundle]) -> str:
    shares = {gpus for part in parts for name, gpus in part.gpus_of.items() if name != "buffer"}
    is_known = not config.rollout.server_url  # on which GPU the server is
    one_device = is_known and config.network.is_on_loopback and _on_one_gpu(config, parts)
    device_type = "cpu" if shares == {0.0} else "cuda"
    own_gpus = is_known and min(shares) >= 1
    return choose_transport(config.rollout.engine_entry, device_type, one_device=one_device, own_gpus=own_gpus)


def _on_one_gpu(config: Config, parts: Sequence[Bundle]) -> bool:
    return len(parts) == 1 and parts[0].gpus <= 1 and config.placement.learner.ranks == 1


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
