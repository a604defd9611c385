"""Hosts on which scripts/setup.sh must stop before it fetches the CUDA set."""

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
        ("2.31", "580.65.06", "needs glibc 2.34 or newer (Ubuntu 22.04, Debian 12, RHEL 9), here is 2.31"),
        ("2.35", "535.183.01", "needs an NVIDIA driver 580 or newer, here is 535.183.01"),
        ("2.34", "580", "installing the cuda set"),
    ],
)
def test_too_old_a_glibc_or_driver_is_told_before_anything_is_fetched(
    tmp_path: Path, glibc: str, driver: str, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "ldd", f"ldd (Ubuntu GLIBC {glibc}-0ubuntu3) {glibc}")
    program(tmp_path / "bin" / "nvidia-smi", driver)
    for name in ("bash", "sed", "sort", "head", "cat", "sha256sum", "dirname", "mkdir"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f"#!/bin/sh\n[ \"$1\" = -m ] && exit 1\nexec {sys.executable} \"$@\"\n")
    (venv / "bin" / "python").chmod(0o755)  # in place of pip it fails: nothing is fetched here
    done = subprocess.run(
        [str(shutil.which("bash")), str(SETUP)], capture_output=True, text=True, timeout=60,
        env={"PATH": str(tmp_path / "bin"), "ASYNC_RL_VENV": str(venv), "HOME": os.environ.get("HOME", "/")},
    )
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
