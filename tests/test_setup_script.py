"""The script scripts/setup.sh before it fetches the CUDA set: hosts that it refuses, an environment made anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SETUP = Path(__file__).parents[1] / "scripts" / "setup.sh"


def program(file: Path, says: str) -> None:
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("glibc", "driver", "said"),
    [
        ("2.31", "580.65.06", "here is 2.31"),
        ("2.35", "535.183.01", "here is 535.183.01"),
        ("2.34", "580", "installing the cuda set"),
        ("", "", "installing the cuda set"),
    ],
)
def test_too_old_a_glibc_or_driver_is_told_before_anything_is_fetched(
    tmp_path: Path, glibc: str, driver: str, said: str
) -> None:
    done = set_up(tmp_path, glibc, driver, torch="2.13.0")
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(("torch", "driver", "is_anew"), [
    ("2.13.0+cpu", "580", True), ("2.13.0", "580", False), ("2.13.0+cpu", "535", False), ("", "580", False),
])
def test_an_environment_of_a_host_without_gpu_is_made_anew_where_there_is_one(
    tmp_path: Path, torch: str, driver: str, is_anew: bool
) -> None:
    done = set_up(tmp_path, "2.35", driver, torch)
    assert (tmp_path / "made").exists() == is_anew, done.stdout


def set_up(
    folder: Path, glibc: str, driver: str, torch: str, has_uv: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the script on a host with that glibc and driver, with an environment that has that torch and no pip.

    Where it would make an environment, the file `made` appears in `folder`; where it calls uv, the file `uv`.
    """
    (folder / "bin").mkdir()
    if glibc:
        program(folder / "bin" / "ldd", f"ldd (Ubuntu GLIBC {glibc}-0ubuntu3) {glibc}")
    if driver:
        program(folder / "bin" / "nvidia-smi", driver)
    for name in ("bash", "sed", "sort", "head", "cat", "sha256sum", "dirname", "mkdir"):
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    metadata = folder / "packages" / f"torch-{torch}.dist-info" / "METADATA"
    if torch:
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Name: torch\nVersion: {torch}\n")
    started = f"PYTHONPATH={folder}/packages exec {sys.executable} -S \"$@\""
    python, maker = venv / "bin" / "python", folder / "bin" / "python3"
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -m ] && exit 1\n{started}\n")  # for pip: nothing is fetched here
    maker.write_text(f"#!/bin/sh\n[ \"$1\" = -m ] && echo > {folder}/made && exit 1\n{started}\n")
    uv = folder / "bin" / "uv"
    if has_uv:
        uv.write_text(f'#!/bin/sh\necho "$1 $2 $3 $4 $UV_FIND_LINKS" > {folder}/uv; exit 1\n')
    for file in (python, maker, *[uv] * has_uv):
        file.chmod(0o755)
    return subprocess.run(
        [str(shutil.which("bash")), str(SETUP)], capture_output=True, text=True, timeout=240,
        env={"PATH": str(folder / "bin"), "ASYNC_RL_VENV": str(venv), "HOME": os.environ.get("HOME", "/"),
             "PIP_FIND_LINKS": "/some/wheels", "ASYNC_RL_SET": "" if driver else "cuda"},
    )
