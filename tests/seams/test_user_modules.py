"""The user's modules: which of them are refused for their names, and which a run's other hosts get."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.seams import import_object
from async_rl.base.seams.lookup import (
    OWN_PACKAGES,
    PROJECT,
    check_module_names,
    find_sent_modules_first,
    modules_to_send,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory. What is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("file", [
    *(f"{name}.py" for name in OWN_PACKAGES), "buffer/__init__.py", "learner/rows.py",
])
def test_a_module_with_the_name_of_a_package_of_ours_is_refused(folder: Path, file: str) -> None:
    check_module_names()
    (folder / "buffer").mkdir()  # of something else, such as checkpoints
    (folder / "learner").mkdir()
    (folder / "learner" / "weights.bin").touch()
    check_module_names()
    (folder / file).touch()
    with pytest.raises(ConfigError, match=str(folder / file)):
        check_module_names()


def test_a_module_elsewhere_that_hides_a_package_of_ours_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "rollout_server.py").touch()
    monkeypatch.syspath_prepend(folder / "mine")
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollout_server"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"mine/rollout_server\.py"):
        check_module_names()


def test_a_checkout_of_this_project_is_no_folder_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    check_module_names()


@pytest.mark.processes
@pytest.mark.parametrize("command", [("-m", "async_rl.cli", "doctor"), ("-c", "import async_rl; async_rl.train")])
def test_commands_and_programs_refuse_it_before_anything_else(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "buffer.py").write_text("raise AssertionError('imported')")
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | {"PYTHONPATH": PROJECT}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and f"{folder}/buffer.py" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("file", ["json.py", "json/__init__.py"])
def test_a_module_that_another_hides_is_refused(folder: Path, file: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("def is_mine(): ...")
    with pytest.raises(ConfigError, match=r"^task\.reward: .*json"):
        import_object("json:is_mine", "task.reward")


def test_modules_of_the_working_directory_are_found(folder: Path) -> None:
    (folder / "mine_words").mkdir()
    (folder / "mine_words" / "late.py").write_text("import mine_helper\nVALUE = mine_helper.VALUE + 1")
    (folder / "mine_helper.py").write_text("VALUE = 6")
    assert import_object("mine_words.late:VALUE", "task.reward") == 7


def test_other_hosts_get_files_and_packages_of_the_working_directory(folder: Path) -> None:
    for name in ("reward.py", "words/__init__.py", "data/rows.jsonl", "notes.txt", "benchmarks/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert modules_to_send() == [str(folder / name) for name in ("benchmarks", "reward.py", "words")]


def test_of_a_checkout_other_hosts_get_none_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    assert modules_to_send() == []


def test_what_the_driver_has_sent_comes_before_what_the_host_has(folder: Path) -> None:
    sent = folder / "py_modules_files" / "_ray_pkg_1"
    for place, value in ((folder, "outdated"), (sent, "sent")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "mine_sent.py").write_text(f"VALUE = {value!r}")
    sys.path[:0] = [str(folder), str(sent)]
    find_sent_modules_first()
    assert import_object("mine_sent:VALUE", "task.reward") == "sent"


@pytest.mark.processes
def test_an_agents_own_process_finds_what_was_sent_first(folder: Path) -> None:
    sent = folder / "py_modules_files" / "_ray_pkg_1"
    sent.mkdir(parents=True)
    (sent / "agent.py").write_text("def play(): ...")
    (folder / "agent.py").write_text("raise RuntimeError('an outdated file')")
    program = Path(PROJECT) / "rollout_server" / "episodes" / "agent_host.py"
    done = subprocess.run(
        [sys.executable, str(program), "agent:play"], input="", capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(sent)},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ('{"ready": true}\n', 0), done.stderr
