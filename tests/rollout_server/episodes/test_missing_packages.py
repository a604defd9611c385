"""Environments and tools that need a package which is not installed say which one, and how to install it."""

from __future__ import annotations

import sys

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.players.load import load_env
from rollout_server.episodes.tools.tool import load_tools

ENVIRONMENTS = "rollout_server.episodes.environments"


@pytest.mark.parametrize(("package", "requirement", "env"), [
    ("skyrl_gym", "skyrl-gym", f"{ENVIRONMENTS}.skyrl_gym:SkyRLGym"),
    ("textarena", "textarena", f"{ENVIRONMENTS}.textarena:TextArena"),
])
def test_an_environment_names_its_package(
    package: str, requirement: str, env: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, env.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=f"pip install {requirement}"):
        load_env(env, {"name": "x"}, True)


def test_an_mcp_server_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"'mcp:python server\.py' .*pip install mcp"):
        load_tools(["mcp:python server.py"])
