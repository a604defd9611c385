"""A user's files beside their configuration may have the names of our packages, and neither hides the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.seams import import_object
from async_rl.seams.own_packages import OWN_PACKAGES, PROJECT
from async_rl.telemetry.metrics import read_metrics

COMMAND = (str(Path(sys.executable).with_name("async-rl")),)
MODULE = (sys.executable, "-m", "async_rl.cli")
"""Python searches the working directory first."""
REWARD = """
def seven(question, response):
    return 7.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of all our packages' names but async_rl."""
    for package in OWN_PACKAGES[1:]:
        (tmp_path / f"{package}.py").write_text(REWARD)
    return tmp_path


def train(program: Sequence[str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*program, "train", *words, "rollout.engine=hf"]
    environment = os.environ | {"PYTHONPATH": PROJECT}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.processes
@pytest.mark.parametrize("program", [COMMAND, pytest.param(MODULE, marks=pytest.mark.nightly)])
def test_a_dry_run_takes_a_reward_from_a_file_with_the_name_of_our_package(
    folder: Path, smoke_yaml: Path, program: Sequence[str]
) -> None:
    done = train(program, folder, str(smoke_yaml), "task.reward=buffer:seven", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "reward: buffer:seven" in done.stdout


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_run_trains_in_a_folder_with_files_of_our_packages_names(folder: Path, smoke_yaml: Path) -> None:
    """Ray's workers search the working directory first."""
    done = train(COMMAND, folder, str(smoke_yaml), "task.reward=learner:seven", "run.dir=runs", "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(folder / "runs" / "smoke" / "metrics.jsonl")
    assert [step["reward/mean"] for step in metrics if step["step"] > 0] == [7, 7]


@pytest.mark.nightly
@pytest.mark.processes
def test_a_program_may_import_its_own_modules_of_these_names_first(folder: Path) -> None:
    (folder / "program.py").write_text(
        f"import {', '.join(OWN_PACKAGES[1:])}\nmine = buffer, learner, benchmarks, rollout_server\n"
        "import async_rl\nfrom buffer.store import Store\nimport benchmarks.engines, rollout_server.question\n"
        "print(*[module.seven(0, 0) for module in mine])"
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=os.environ | {"PYTHONPATH": PROJECT}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("7.0 7.0 7.0 7.0\n", 0), done.stderr


@pytest.mark.parametrize("file", ["json.py", "json/__init__.py"])
def test_a_module_of_the_working_directory_is_the_one_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("def is_mine(): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_json", raising=False)
    found = import_object("json:is_mine", "task.reward")
    assert found is import_object("json:is_mine", "task.reward")
    assert sys.modules["user_json"].__file__ == str(tmp_path / file)
    assert hasattr(sys.modules["json"], "dumps")


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as working directory, with a package `buffer` in place of buffer.py."""
    (folder / "buffer.py").unlink()
    (folder / "buffer").mkdir()
    (folder / "buffer" / "__init__.py").write_text("from . import words\nMINE = 1\n")
    (folder / "buffer" / "words.py").write_text("import learner\ndef score(q, r):\n    return learner.seven(q, r)\n")
    (folder / "buffer" / "more.py").write_text("MORE = 2\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "mine")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("import learner\nVALUE = learner.seven(0, 0)", 7),
        ("from learner import seven\nVALUE = seven(0, 0)", 7),
        ("import buffer.words as words\nVALUE = words.score(0, 0)", 7),
        ("import buffer.more\nVALUE = buffer.MINE + buffer.more.MORE", 3),
        ("from buffer import more\nVALUE = more.MORE", 2),
        ("from buffer.more import MORE as VALUE", 2),
        ("import mine_too\nVALUE = mine_too.late()", 7),
        ("from learner.run_limit import RunLimit\nVALUE = RunLimit.__name__", "RunLimit"),
        ("from rollout_server.question import Question\nVALUE = Question.__name__", "Question"),
        ("from buffer import staleness\nVALUE = staleness.__name__", "buffer.staleness"),
    ],
)
def test_a_users_module_imports_their_own_modules_of_our_packages_names(
    project: Path, code: str, value: object
) -> None:
    """Also by way of another module of theirs, within a function, and what only our package has."""
    (project / "mine_too.py").write_text("def late():\n    from learner import seven\n    return seven(0, 0)\n")
    (project / "mine.py").write_text(code)
    assert import_object("mine:VALUE", "task.reward") == value
    import buffer.staleness

    assert buffer.__file__ == str(Path(PROJECT, "buffer", "__init__.py"))


def test_packages_of_an_environment_in_the_folder_import_what_python_finds(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = project / ".venv" / "site-packages"
    (packages / "mine_installed").mkdir(parents=True)
    (packages / "mine_installed" / "__init__.py").write_text("import buffer, learner\nFILE = buffer.__file__\n")
    monkeypatch.setattr(sys, "prefix", str(project / ".venv"))
    monkeypatch.syspath_prepend(packages)
    assert import_object("mine_installed:FILE", "task.reward") == str(Path(PROJECT, "buffer", "__init__.py"))


def test_a_module_of_a_users_package_and_one_of_ours_can_be_named(project: Path) -> None:
    assert import_object("buffer.words:score", "task.reward")(0, 0) == 7
    assert import_object("buffer.staleness:__name__", "task.reward") == "buffer.staleness"
    with pytest.raises(ConfigError, match=r"task\.reward 'buffer\.none:score' can't be imported.*'buffer\.none'"):
        import_object("buffer.none:score", "task.reward")


@pytest.mark.processes
def test_an_agents_own_process_finds_its_file_with_the_name_of_our_package(folder: Path) -> None:
    program = Path(PROJECT, "rollout_server", "episodes", "user_code", "agent_host.py")
    done = subprocess.run(
        [sys.executable, program, "learner:seven"], cwd=folder, env=os.environ | {"PYTHONPATH": PROJECT}, input="",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ('{"ready": true}\n', 0), done.stderr
