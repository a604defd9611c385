"""The address of a server that runs already is checked when the configuration is read."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config import Config, RolloutConfig
from async_rl.driver.placement import Reservation, resolve_placement
from async_rl.driver.resources import host_demands
from async_rl.errors import ConfigError
from tests.kit.configs import make_config


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:30000", "http://127.0.0.1:30000/", "https://there", "http://[::1]:3/below"]
)
def test_the_url_of_a_server_may_be_any_address_of_http(url: str) -> None:
    assert RolloutConfig(server_url=url).server_url == url


@pytest.mark.parametrize(
    "url",
    [
        "nonsense", "there:30000", "ftp://there", "http://", "http://127.0.0.1:abc", "http://h:99999", "http://a:b@h",
        "http://h h:3", "http://127.0.0.1:3/ ", "http://h:3\n", "http://h:3/?x=1", "http://h:3/#a", "http://h:3?",
    ],
)  # fmt: skip
def test_a_url_to_which_no_request_can_be_sent_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server_url must be empty, or http:// or https:// with a host, .*, got"):
        RolloutConfig(server_url=url)


def at(url: str, transport: str = "gloo", **overrides: Any) -> Config:
    sync = {"transport": transport, "on_update": "retract"}
    return make_config(rollout={"engine": "sglang", "server_url": url}, weight_sync=sync, **overrides)


@pytest.mark.parametrize(
    ("url", "overrides"),
    [
        ("http://localhost:3", {}),
        ("http://127.0.0.9:3", {}),
        ("http://[::1]:3", {}),
        ("http://10.0.0.9:3", {"transport": "disk"}),
        ("http://10.0.0.9:3", {"transport": "auto"}),  # what it stands for is checked later
        ("http://10.0.0.9:3", {"network": {"host": "10.0.0.1", "insecure": True}}),
        ("http://10.0.0.9:3", {"placement": {"learner": {"nodes": 2, "ranks": 2}, "rollout": {"nodes": 1}}}),
    ],
)
def test_a_server_that_reaches_the_learner_or_its_files_is_accepted(url: str, overrides: dict[str, Any]) -> None:
    assert at(url, **overrides).rollout.server_url == url


@pytest.mark.parametrize("url", ["http://10.0.0.9:3", "http://there:3"])
def test_a_server_that_would_look_for_the_learner_on_its_own_host_is_refused(url: str) -> None:
    message = r"server_url must be on loopback with network.host 127.0.0.1 and weight_sync.transport gloo, got"
    with pytest.raises(ConfigError, match=message):
        at(url)
    asked = at(url, transport="auto")
    with pytest.raises(ConfigError, match=message):
        resolve_placement(asked, Reservation(None, host_demands(asked, 0), ["127.0.0.1"]))
    resolved = resolve_placement(asked, Reservation(None, host_demands(asked, 2), ["127.0.0.1"]))
    assert resolved.weight_sync.transport == "disk"
