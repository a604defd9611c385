"""Environments and tools that need a package which is not installed say which one, and how to install it."""

from __future__ import annotations

import sys

import pytest

from async_rl.errors import ConfigError
from rollout_server.episodes.players.load import load_env
from rollout_server.episodes.tools.tool import load_tools

ENVIRONMENTS = "rollout_server.episodes.environments"


@pytest.mark.parametrize(
    ("package", "env", "command"),
    [
        ("skyrl_gym", f"{ENVIRONMENTS}.skyrl_gym:SkyRLGym", "pip install skyrl-gym==0.4.0"),
        ("textarena", f"{ENVIRONMENTS}.textarena:TextArena", "pip install textarena==0.7.4"),
    ],
)
def test_an_environment_names_its_package(
    package: str, env: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, env.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=command):
        load_env(env, {"name": "x"}, True)


def test_an_mcp_server_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"'mcp:python server\.py' needs the package mcp.*pip install mcp"):
        load_tools(["mcp:python server.py"])
