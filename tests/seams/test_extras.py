"""The extras of the package: where one is missing, the error names it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from async_rl.base.errors import ConfigError
from async_rl.base.seams.lookup import EXTRAS
from async_rl.cli import main
from rollout_server.tasks.base import open_task
from tests.kit.configs import make_config
from tests.kit.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_extras_are_those_of_the_package_and_none_of_their_packages_is_required() -> None:
    offered = PROJECT["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        assert [Requirement(text).name.replace("-", "_") for text in offered[extra]] == list(modules)
    required = {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]}
    assert not required & {module for modules in EXTRAS.values() for module in modules}
    assert offered["all"] == [f"async-rl[{','.join(EXTRAS)}]"]
    assert "async-rl[all]" in offered["dev"]


@pytest.mark.parametrize(
    ("command", "user"), [(["view", "runs/none"], "async-rl view"), (["train", "none.yaml", "--view"], "--view")]
)
def test_the_page_without_its_packages_names_the_extra(
    command: list[str], user: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert user in error and "async-rl[page]" in error


def test_a_reasoning_gym_task_without_the_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"^task\.name .*async-rl\[reasoning-gym"):
        open_task(make_config(tmp_path), None)
