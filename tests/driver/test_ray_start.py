"""A Ray that does not start in time, a RAY_ADDRESS at which there is none, and hosts without IPv4, are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

from async_rl.base.errors import ConfigError, WaitTimeoutError
from async_rl.run.processes.placement import Host, assign, host_demands
from async_rl.run.processes.ray_start import NoClusterError, open_ray
from tests.kit.configs import make_config
from tests.kit.placements import TWO_NODES, placed_on


def test_a_ray_that_does_not_start_in_time_is_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise Exception("The current node timed out during startup. This")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(WaitTimeoutError), open_ray(make_config()):
        pytest.fail("Ray has not started")


def test_a_process_that_is_connected_to_ray_already_is_asked_to_end_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"ray\.shutdown\(\)"), open_ray(make_config()):
        pytest.fail("Ray is that of the program")


def test_an_address_without_a_port_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself refuses it, before it starts or reaches anything."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS "), open_ray(make_config()):
        pytest.fail("Ray has taken the address")


@pytest.mark.parametrize(
    ("address", "nodes", "said"),
    [
        ("10.0.0.9:6379", 1, r"^RAY_ADDRESS is 10\.0\.0\.9:6379.*\(gone\)"),
        ("10.0.0.9:6379", 2, r"^RAY_ADDRESS is 10\.0\.0\.9:6379.*\(gone\)"), ("", 2, r"^placement .*\(gone\)"),
    ],
)
def test_an_address_at_which_no_cluster_is_any_more_is_named(
    address: str, nodes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.init", fail)
    config = make_config(placement={"learner": {"nodes": nodes - 1 or 1}, "rollout": {"nodes": nodes - 1}})
    with pytest.raises(NoClusterError, match=said), open_ray(config):
        pytest.fail("there is no cluster")


@pytest.mark.parametrize(
    ("of_ray", "mode", "said"),
    [
        (ConnectionError("gone"), "", r"RAY_AUTH_MODE"),
        (AuthenticationError("no token"), "token", r"no token.*RAY_AUTH_MODE"),
    ],
)
def test_a_cluster_that_asks_for_another_token_is_told_of(
    of_ray: Exception, mode: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise of_ray

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(ConfigError, match=said), open_ray(make_config()):
        pytest.fail("the cluster lets nobody in")


USES_RAY_TOO = """
import os, ray
from async_rl.run.processes.ray_start import open_ray
from tests.kit.configs import make_config

def answers():
    return ray.get(ray.remote(lambda: 3).remote(), timeout=240) == 3

with open_ray(make_config()):
    assert answers()
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0), "actors have the niceness of the driver"
    assert ray.get(ray.remote(lambda: os.environ["RAY_AUTH_MODE"]).remote()) == os.environ["RAY_AUTH_MODE"] == "token"
assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys()
assert not os.path.exists(os.path.expanduser("~/.ray"))  # a later `ray start --head` would ask for the token there
ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
assert answers()
ray.shutdown()
with open_ray(make_config()):
    assert answers()
print("all answered")
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_a_program_may_use_ray_itself_before_and_after_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    environment = os.environ | {"HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", USES_RAY_TOO], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert "all answered" in ran.stdout, ran.stderr[-3000:]


@pytest.mark.parametrize(("asked", "shown"), [("-1", ""), ("NoDevFiles", ""), ("", ""), ("1,0", "1,0")])
def test_gpus_that_are_hidden_in_any_way_are_hidden_from_ray(
    asked: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts a GPU for -1."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    seen: list[str] = []
    monkeypatch.setattr("ray.init", lambda **_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    with open_ray(make_config()):
        assert seen == [shown]


@pytest.mark.parametrize("name", ["fd00::1", "node1.site"])  # ray start --node-ip-address takes anything
def test_a_host_that_ray_knows_by_no_ipv4_address_is_refused_where_the_run_needs_it(name: str) -> None:
    hosts = [Host(name=name, cpus=8, gpus=8) for name in (name, "10.0.0.2", "10.0.0.3")]
    assert [host.name for host in assign(host_demands(TWO_NODES), hosts)] == ["10.0.0.2", "10.0.0.3"]
    with pytest.raises(ConfigError, match=rf"{name}.*--node-ip-address"):
        assign(host_demands(TWO_NODES), hosts[:2])
    assert len(assign(host_demands(placed_on()), hosts[:1])) == 1, "the processes of one host listen on loopback"
