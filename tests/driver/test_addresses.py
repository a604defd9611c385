"""A server that runs already must be able to reach the learner, which is checked on the learner's host."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.run.before_start.attached_server import check_server_reaches_learner
from async_rl.run.processes.placement import decide_placement, host_demands
from tests.kit.configs import make_config


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are those of this host, which has an address beside loopback, or of another one, or of none."""
    addresses = {"here": "10.0.0.1", "there": "10.0.0.9"}
    found = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any) -> Any:
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return found(addresses.get(host, host), *arguments)

    interfaces = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth0": [SimpleNamespace(address="10.0.0.1")]}
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


def at(url: str, transport: str = "gloo", **overrides: Any) -> Config:
    sync = {"transport": transport, "on_update": "retract"}
    return make_config(rollout={"engine": "sglang", "server_urls": [url]}, weight_sync=sync, **overrides)


@pytest.mark.parametrize(
    ("url", "overrides"),
    [
        ("http://localhost:3", {}),
        ("http://[::ffff:10.0.0.1]:3", {}),
        ("http://0.0.0.0:3", {}),
        ("http://[::]:3", {}),
        ("http://here:3", {}),
        ("http://nowhere:3", {"transport": "disk"}),
        ("http://10.0.0.9:3", {"transport": "auto"}),  # what it stands for is checked later
        ("http://10.0.0.9:3", {"network": {"host": "10.0.0.1", "insecure": True}}),
    ],
)
def test_a_server_that_reaches_the_learner_or_its_files_is_accepted(url: str, overrides: dict[str, Any]) -> None:
    check_server_reaches_learner(at(url, **overrides))


def test_on_several_nodes_a_server_anywhere_is_accepted() -> None:
    placement = {"learner": {"nodes": 2, "ranks": 2}, "rollout": {"nodes": 1}}
    check_server_reaches_learner(at("http://10.0.0.9:3", placement=placement))


@pytest.mark.parametrize("url", ["http://10.0.0.9:3", "http://there:3"])
def test_a_server_that_would_look_for_the_learner_on_its_own_host_is_refused(url: str) -> None:
    message = r"^rollout\.server_urls "
    with pytest.raises(ConfigError, match=message):
        check_server_reaches_learner(at(url))
    asked = at(url, transport="auto")
    with pytest.raises(ConfigError, match=message):
        decide_placement(asked, host_demands(asked, 0))
    decided = decide_placement(asked, host_demands(asked, 2))
    assert decided["weight_sync.transport"] == "disk"
    with pytest.raises(ConfigError, match=message):
        check_server_reaches_learner(at("http://nowhere:3"))
