"""The check that torch finds the GPUs of this host; without it a run with too old a driver would train on the CPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

from async_rl.errors import ConfigError

_DEVICES, _VERSION = Path("/dev"), Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest NVIDIA driver by major version of CUDA."""


def check_gpu_driver() -> None:
    """Check that torch finds a GPU if this host has one that the user has not hidden.

    Raises:
        ConfigError: there are GPUs and torch finds none; it says which driver is needed and which one is there.
    """
    import torch

    gpus = [file.name for file in _DEVICES.glob("nvidia[0-9]*")]  # a container without GPUs has none of these files
    if not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or torch.cuda.is_available():
        return
    cpu_only = "Or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    if torch.version.cuda is None:
        raise ConfigError(
            f"this host has {len(gpus)} NVIDIA GPU(s), and this torch ({torch.__version__}) is built for CPUs. "
            f"Install the CUDA set: make venv. {cpu_only}"
        )
    found = re.search(r"Module +([0-9.]+)", _VERSION.read_text()) if _VERSION.exists() else None
    oldest = _OLDEST_DRIVER.get(int(torch.version.cuda.partition(".")[0]))
    needs = f"{oldest} or newer" if oldest else "newer"
    raise ConfigError(
        f"this host has {len(gpus)} NVIDIA GPU(s), and torch finds none: its CUDA {torch.version.cuda} wants an NVIDIA "
        f"driver {needs}, here is {found[1] if found else 'an unknown one'}. Install a newer driver. {cpu_only}"
    )
