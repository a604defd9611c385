"""A server whose host is lost: Ray starts it again on another host, which the run did not use at its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from async_rl.base.config import Limit
from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, RewardError, WaitTimeoutError
from async_rl.base.telemetry.status import Status
from async_rl.run.processes import actor_group, placement
from async_rl.run.processes.actor_group import ActorGroup
from async_rl.run.processes.actors import Origin
from async_rl.run.processes.placement import Host, HostDemand, Reservation
from async_rl.run.processes.signals import StopSignals
from tests.kit.configs import make_config
from tests.kit.placements import TWO_NODES


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The nodes of a Ray cluster on which the two bundles of a run are: {bundle: node}, which a test may change."""
    nodes = {0: "a", 1: "b"}
    known = [{"NodeID": node, "NodeManagerAddress": f"10.0.0.{node[0]}"} for node in ("a", "b", "b2", "c")]
    monkeypatch.setattr(ray, "nodes", lambda: known)
    monkeypatch.setattr("ray.util.placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    return nodes


@pytest.fixture
def processes(nodes: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActorGroup:
    """The processes of a run on two hosts."""
    options = SimpleNamespace(remote=lambda origin: origin)
    monkeypatch.setattr(actor_group.ray, "remote", lambda _: SimpleNamespace(options=lambda **_: options))
    monkeypatch.setattr(Reservation, "options", lambda self, process: {})
    bundles = [HostDemand(gpus_of={"buffer": 0.0, "learner/0": 0.0}), HostDemand(gpus_of={"rollout/0": 0.0})]
    reservation = Reservation(None, bundles, ["10.0.0.a", "10.0.0.b"], nodes=dict(nodes))
    return ActorGroup(tmp_path, reservation, StopSignals(), Origin(str(tmp_path), make_config()))


def test_a_reservation_keeps_the_nodes_and_the_gpus_for_which_it_was_made(
    nodes: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [Host(name=f"10.0.0.{node}", cpus=8.0, gpus=8.0) for node in (1, 2)]
    monkeypatch.setattr(placement, "ray_hosts", lambda: hosts)
    monkeypatch.setattr("ray.util.placement_group", lambda *_, **__: SimpleNamespace(wait=lambda _: True))
    reservation = placement.reserve(TWO_NODES, StopSignals())
    hosts.append(Host(name="10.0.0.3", cpus=8.0, gpus=8.0))
    assert reservation.gpus == 16 and reservation.addresses == ["10.0.0.a", "10.0.0.b"]
    assert reservation.nodes == {0: "a", 1: "b"} and not reservation.has_moved("rollout/0")


def start(processes: ActorGroup) -> Any:
    return processes.start("rollout/0", object)


def fail(processes: ActorGroup, cause: Exception) -> None:
    with processes.named_failure("rollout/0"):
        raise RayTaskError("start", "", cause)


def test_a_server_is_told_to_be_on_the_host_to_which_ray_has_moved_it(
    processes: ActorGroup, nodes: dict[int, str]
) -> None:
    start(processes)
    nodes[1] = ""  # Ray has lost the host, and has no other yet
    start(processes)
    assert processes.on_host("rollout/0") == "rollout/0 on 10.0.0.b"
    nodes[1] = "c"
    start(processes)
    assert processes.place("rollout/0", Status(doing="starts", since_s=0.0)).host == "10.0.0.c"
    assert processes.on_host("learner/0") == "learner/0 on 10.0.0.a"


@pytest.mark.parametrize("cause", [
    ConfigError("model.path model holds no tokenizer"), FileNotFoundError("words.json"),
])
@pytest.mark.parametrize("node", ["c", "b2"])  # another host, or the same anew, such as a container with an empty disk
def test_what_a_new_host_lacks_is_the_loss_of_a_server_and_no_wrong_setting(
    processes: ActorGroup, nodes: dict[int, str], node: str, cause: Exception
) -> None:
    raised = type(cause) if isinstance(cause, AsyncRLError) else AsyncRLError
    with pytest.raises(AsyncRLError, match=str(cause)) as caught:
        fail(processes, cause)
    assert type(caught.value) is raised
    nodes[1] = node
    with pytest.raises(ProcessDiedError, match=str(cause)):
        fail(processes, cause)


def test_what_the_work_of_a_moved_server_raises_is_no_loss_of_it(
    processes: ActorGroup, nodes: dict[int, str]
) -> None:
    """Else rewards that fail for good would be asked anew, by a server that starts again after every few groups."""
    nodes[1] = "c"
    with pytest.raises(RewardError, match="20 groups in a row"):
        fail(processes, RewardError("20 groups in a row"))


def test_each_failure_names_the_host_on_which_the_process_was(
    processes: ActorGroup, nodes: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed may be so with its host, which Ray replaces at once; others run where Ray has them."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.a")
    start(processes)
    nodes[1] = "c"

    def failure(error: RayError) -> str:
        with pytest.raises(ProcessDiedError) as caught, processes.named_failure("rollout/0"):
            raise error
        return str(caught.value)

    assert failure(ActorDiedError()).startswith("rollout/0 on 10.0.0.b died")
    failed = failure(ActorDiedError(RayTaskError("__init__", "", OSError("no folder"))))
    assert failed.startswith("rollout/0 on 10.0.0.c failed while it started")


def test_a_wait_that_is_too_long_names_the_host_of_the_log(
    processes: ActorGroup, nodes: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.a")
    nodes[1] = "c"

    async def silent() -> None:
        await asyncio.Event().wait()

    call: Any = silent()
    with pytest.raises(WaitTimeoutError, match=r"10\.0\.0\.c"):
        asyncio.run(processes.call("rollout/0", call, Limit(0.01, "a limit"), "the start"))
    nodes[1] = ""
    with pytest.raises(WaitTimeoutError, match=r"rollout/0: 1 CPU\n"):
        asyncio.run(processes.call("rollout/0", cast(Any, silent()), Limit(0.01, "a limit"), "the start"))
