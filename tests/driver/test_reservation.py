"""Where Ray places the learner and each server, at the start and after a host has come or left."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.state import state

from async_rl.base.config import Config
from async_rl.run.processes import reservation as reservations
from async_rl.run.processes.placement import Host
from async_rl.run.processes.reservation import NODE, Reservation, reserve
from async_rl.run.processes.signals import StopSignals
from tests.kit.configs import make_config

TWO_SERVERS = {"nodes": 2, "servers": 2}
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"}
ELASTIC = {"nodes": 1, "servers": {"min": 1, "max": 3}}


class Cluster:
    """A Ray cluster of named hosts. A group that may be on several hosts takes one where no other group is."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: dict[str, Host] = {}
        for name in hosts:
            self.add(name)
        self.leaving: dict[str, float] = {}
        self.groups: list[Any] = []

    def add(self, name: str) -> None:
        self.hosts[name] = Host(name=ADDRESSES[name], cpus=8.0, gpus=8.0, node=name)

    def placement_group(
        self, wants: list[dict[str, float]], strategy: str, bundle_label_selector: list[dict[str, str]]
    ) -> Any:
        group = SimpleNamespace(wants=wants, selector=bundle_label_selector, node="")
        group.wait = lambda _: bool(self._node_of(group))
        self.groups.append(group)
        return group

    def remove(self, group: Any) -> None:
        self.groups.remove(group)

    def table(self, group: Any) -> dict[str, Any]:
        node = self._node_of(group)
        return {"bundles_to_node_id": {0: node}, "state": "CREATED" if node else "PENDING"}

    def _node_of(self, group: Any) -> str:
        if (pin := group.selector[0].get(NODE)) in self.hosts:
            group.node = pin
        if not group.node:
            taken = {other.node for other in self.groups} | self.leaving.keys()
            free = [node for node in self.hosts if node not in taken and _allows(group.selector[0], node)]
            group.node = free[0] if free else ""
        return str(group.node)


def _allows(selector: dict[str, str], node: str) -> bool:
    found = re.fullmatch(r"(!?)in\((.*)\)", selector.get(NODE, "!in()"))
    return found is not None and (node in found[2].split(",")) != bool(found[1])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Host a of the learner, and hosts b and c of servers."""
    cluster = Cluster("a", "b", "c")
    monkeypatch.setattr("ray.util.placement_group", cluster.placement_group)
    monkeypatch.setattr("ray.util.remove_placement_group", cluster.remove)
    monkeypatch.setattr("ray.util.placement_group_table", cluster.table)
    monkeypatch.setattr(reservations, "ray_hosts", lambda free=False: list(cluster.hosts.values()))
    monkeypatch.setattr(reservations, "leaving_nodes", lambda: cluster.leaving)
    monkeypatch.setattr(reservations, "PLACE_INTERVAL_S", 0.01)
    return cluster


def config_of(rollout: dict[str, Any], **learner: Any) -> Config:
    return make_config(placement={"rollout": rollout, "learner": learner})


def find(reservation: Reservation, server: str, limit_s: float = 30.0) -> str:
    """The host that a server finds; "" if there is none."""
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(reservation.find_place(server), limit_s))
        return reservation.host_of(server)
    return ""


def test_at_the_start_each_server_has_a_placement_group_of_its_own(cluster: Cluster) -> None:
    reservation = reserve(config_of(TWO_SERVERS, gpus_per_node=2), StopSignals())
    of_learner, *of_servers = cluster.groups
    assert (of_learner.wants, of_learner.selector) == ([{"CPU": 2.0, "GPU": 2.0}], [{NODE: "a"}])
    assert [group.wants for group in of_servers] == [[{"CPU": 1.0, "GPU": 1.0}]] * 2
    hosts = {name: reservation.host_of(name) for name in ("learner/1", "rollout/0", "rollout/1")}
    assert hosts == {"learner/1": "10.0.0.1", "rollout/0": "10.0.0.2", "rollout/1": "10.0.0.3"}
    assert reservation.gpus == 24.0 and reservation.seconds_left() == {}


def test_servers_that_share_gpus_with_ranks_in_pairs_are_in_the_group_of_the_learner(cluster: Cluster) -> None:
    config = make_config(placement={
        "learner": {"nodes": 2, "gpus_per_node": 2}, "rollout": {"servers": 4}, "colocated": True,
    })  # fmt: skip
    reservation = reserve(config, StopSignals())
    (group,) = cluster.groups
    assert group.wants == [{"CPU": 2.0, "GPU": 1.0}] * 4 and [pin[NODE] for pin in group.selector] == list("aabb")
    assert find(reservation, "rollout/3") == "10.0.0.2" and reservation.has_host("rollout/3")
    options = [reservation.options(name) for name in ("rollout/3", "learner/3")]
    assert [each["scheduling_strategy"].placement_group_bundle_index for each in options] == [3, 3]
    assert [each["num_gpus"] for each in options] == [0.5, 0.5]


def test_a_server_that_starts_again_stays_on_its_host(cluster: Cluster) -> None:
    reservation = reserve(config_of(TWO_SERVERS), StopSignals())
    groups = [*cluster.groups]
    assert find(reservation, "rollout/1") == "10.0.0.3" and cluster.groups == groups


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_server_whose_host_is_lost_or_leaves_gets_another_but_none_of_the_learner(
    is_lost: bool, cluster: Cluster
) -> None:
    reservation = reserve(config_of(TWO_SERVERS), StopSignals())
    if is_lost:
        del cluster.hosts["c"]
    else:
        cluster.leaving["c"] = 12.0
    assert reservation.seconds_left() == ({} if is_lost else {"rollout/1": 12.0})
    assert not reservation.has_host("rollout/1") and reservation.has_host("rollout/0")
    assert find(reservation, "rollout/1", 0.1) == "", "the learner's host is not for servers"
    cluster.add("d")
    assert find(reservation, "rollout/1") == "10.0.0.4" and len(cluster.groups) == 3
    assert reservation.seconds_left() == {}


def test_a_host_that_leaves_without_a_deadline_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `ray drain-node` without --deadline-remaining-seconds: Ray says 0."""
    monkeypatch.setattr(state, "_connect_and_get_accessor", lambda: None)
    monkeypatch.setattr(state, "get_draining_nodes", lambda: {"b": 0, "c": round(1e3 * (time.time() + 60))})
    left_s = reservations.leaving_nodes()
    assert left_s["b"] == inf and 0 < left_s["c"] <= 60.1


def test_an_elastic_run_begins_with_one_host_of_servers_and_takes_more(cluster: Cluster) -> None:
    del cluster.hosts["c"]
    reservation = reserve(config_of(ELASTIC), StopSignals())
    assert find(reservation, "rollout/0") == "10.0.0.2" and find(reservation, "rollout/1", 0.1) == ""
    assert reservation.host_of("rollout/1") == "no host" and not reservation.has_host("rollout/1")
    cluster.add("d")
    assert find(reservation, "rollout/1") == "10.0.0.4"
    assert reservation.options("rollout/1") | {"scheduling_strategy": 0} == {
        "scheduling_strategy": 0, "num_cpus": 1, "num_gpus": 1.0,
    }
    reservation.release("rollout/1")
    assert find(reservation, "rollout/2") == "10.0.0.4"


def test_servers_of_the_learners_hosts_stay_there(cluster: Cluster) -> None:
    reservation = reserve(config_of({"servers": {"min": 1, "max": 2}}), StopSignals())
    find(reservation, "rollout/1", 0.05)
    assert [group.selector[0][NODE] for group in cluster.groups] == ["a", "a", "in(a)"]
