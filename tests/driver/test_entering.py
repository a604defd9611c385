"""The start of a process on a host with copies of the driver's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.driver.entering import Origin, enter
from async_rl.errors import ConfigError
from async_rl.seams.own_packages import PROJECT
from async_rl.storage.file_sources import MODULES
from tests.kit.configs import make_config

ENTER = """
import dataclasses, os, pickle, sys
from async_rl.driver.entering import Origin, enter
config = pickle.load(open(sys.argv[1], "rb"))
folder, copy = os.getcwd(), sys.argv[2]
os.chdir("/")
places = {("modules", folder): copy, ("task.params", "table.json"): copy + "/table.json"}
told = os.dup(1)
config = enter(Origin(folder, places=places), config, "rollout/0")
from async_rl.seams import find_entry, import_object
import mine
os.write(told, f"{mine.__file__} {config.task.params} {config.rollout.settings.depth} {os.getcwd()}".encode())
"""
WRITE_CONFIG = """
import pickle, sys
from tests.kit.configs import make_config
config = make_config(
    rollout={"engine": "mine:ENGINE", "params": {"depth": 7}}, weight_sync={"transport": "gloo"},
    task={"name": "mine:Task", "params": {"table": "table.json"}}, run={"dir": sys.argv[2]},
)
pickle.dump(config, open(sys.argv[1], "wb"))
"""
MINE = """
from async_rl.config.section import section
from async_rl.seams import EngineEntry


@section("rollout.params")
class Settings:
    depth: int = 5


ENGINE = EngineEntry(open="mine:open", open_admin="mine:open", update_policies=("in_place",), receives=("gloo",),
                     settings=Settings)
"""


@pytest.mark.processes
def test_the_configuration_is_checked_by_the_copied_modules(tmp_path: Path) -> None:
    """The settings of an engine of one's own are declared in its module, which this host has in the copy alone."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "work"
    for folder in (copy, elsewhere):
        folder.mkdir()
    (copy / "mine.py").write_text(MINE)
    file = str(tmp_path / "config.pickle")

    def run(folder: Path, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": PROJECT}
        done = subprocess.run(
            [sys.executable, "-c", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(copy, WRITE_CONFIG, file, str(tmp_path / "runs"))
    table = {"table": f"{copy}/table.json"}
    assert run(elsewhere, ENTER, file, str(copy)) == f"{copy}/mine.py {table} 7 {elsewhere}"


def test_a_host_without_the_copy_of_the_modules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    origin = Origin(str(tmp_path), places={(MODULES, str(tmp_path)): f"{tmp_path}/copy"})
    with pytest.raises(ConfigError, match=r"^rollout/0 needs the copy .*/copy, which is not on its host: .* --resume "):
        enter(origin, make_config(run={"dir": tmp_path}), "rollout/0")
