"""The user's modules on a host with a copy of the driver's: that comes before what the working directory has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from async_rl.seams.own_packages import PROJECT

pytestmark = pytest.mark.processes

COPIED = {
    "reward.py": "import helper, buffer\nfrom words.deep import NAME\n\n\ndef late():\n    import folder.part\n"
                 "    return [helper.NAME, buffer.NAME, NAME, folder.part.NAME, __file__]\n",
    "helper.py": "NAME = 'copied helper'", "buffer.py": "NAME = 'copied buffer'",
    "words/__init__.py": "", "words/deep.py": "from pathlib import Path\nimport learner\n"
                                              "NAME = Path(__file__).with_name('name.txt').read_text() + learner.NAME",
    "words/name.txt": "copied data", "learner.py": "NAME = ' and learner'", "folder/part.py": "NAME = 'copied part'",
}  # fmt: skip
OUTDATED = {
    **{name: "raise RuntimeError('an outdated file')" for name in COPIED if name.endswith(".py")},
    "folder/__init__.py": "raise RuntimeError('a package that hides a folder of the copy')",
    "only_here.py": "NAME = 'of this host alone'",
}
PRINT = """
import sys
from async_rl.seams.user_modules import use_copied_modules
{before}
use_copied_modules(sys.argv[1])
from async_rl.seams import import_object
print(*import_object("reward:late", "task.reward")(), sep="; ")
from buffer.store import Store
import only_here
print(only_here.NAME, Store.__module__)
"""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def printed(folder: Path, *command: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, "PYTHONPATH": PROJECT, **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("before", [
    "", "import os; sys.path[:] = [each for each in sys.path if each] + [os.getcwd()]",
    "sys.path[:] = [each for each in sys.path if each]",
])  # fmt: skip
def test_a_copy_is_used_whatever_the_working_directory_has(tmp_path: Path, before: str) -> None:
    """Also where Python searches the working directory last, as after an installed command, or not at all."""
    copy, folder = write(tmp_path / "copy", COPIED), write(tmp_path / "work", OUTDATED)
    found, fallback = printed(folder, "-c", PRINT.format(before=before), str(copy))
    assert found == (
        f"copied helper; copied buffer; copied data and learner; copied part; {copy / 'reward.py'}"
    )
    assert fallback == "of this host alone buffer.store"


def test_a_host_without_the_modules_uses_the_copy(tmp_path: Path) -> None:
    copy, folder = write(tmp_path / "copy", COPIED), write(tmp_path / "work", {"only_here.py": "NAME = 'here'"})
    assert printed(folder, "-c", PRINT.format(before=""), str(copy))[1] == "here buffer.store"


def test_processes_that_multiprocessing_starts_find_the_copy_too(tmp_path: Path) -> None:
    copy, folder = write(tmp_path / "copy", COPIED), write(tmp_path / "work", OUTDATED)
    code = (
        "import multiprocessing, sys\nfrom async_rl.seams.user_modules import use_copied_modules\n"
        "if __name__ == '__main__':\n    use_copied_modules(sys.argv[1])\n    import reward\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(*pool.apply(reward.late))\n"
    )
    (tmp_path / "program.py").write_text(code)
    (line,) = printed(folder, str(tmp_path / "program.py"), str(copy))
    assert line.startswith("copied helper copied buffer copied data and learner")


def test_a_process_of_an_agent_imports_it_from_the_copy(tmp_path: Path) -> None:
    """It runs in an environment that need not have this package."""
    copy = write(tmp_path / "copy", {"agent.py": "import helper\n\n\ndef play(): ...", "helper.py": ""})
    folder = write(tmp_path / "work", {"agent.py": "raise RuntimeError('an outdated file')"})
    program = Path(PROJECT) / "rollout_server" / "episodes" / "user_code" / "agent_host.py"
    done = subprocess.run(
        [sys.executable, str(program), "agent:play"], cwd=folder, input="", capture_output=True, text=True, timeout=60,
        env={**os.environ, "ASYNC_RL_MODULES": str(copy)},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ('{"ready": true}\n', 0), done.stderr
