"""Describes the machine, the installed versions and the commit, for sweeps and the programs in benchmarks/."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from async_rl.base.host import usable_cores

PACKAGES = ("torch", "sglang", "transformers", "ray")


def describe_machine() -> dict[str, str]:
    """Return descriptions by name: processor, cores, memory, GPUs, system, package versions, this checkout's commit."""
    found = {
        "processor": _processor(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpus": _gpus() or "none",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "commit": _commit(),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str:
    """Return the commit of this checkout, or the version of the installed package.

    An installed package may be inside the checkout of another project, whose commit must not be used.
    """
    git, file = ("git", "-C", str(Path(__file__).parent)), Path(__file__).name
    if _output(*git, "ls-files", "--error-unmatch", file):
        return _output(*git, "describe", "--always", "--dirty")
    with suppress(PackageNotFoundError):
        return f"async-rl {version('async-rl')}"
    return ""


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> str:
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _output(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""
