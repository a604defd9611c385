"""Runs a command with NVIDIA's MPS, by which kernels of several processes run on one GPU at the same time.

    python -m benchmarks.under_mps async-rl train configs/sweep_gpu.yaml staleness.max=2

Without MPS the processes of a GPU take time slices: a learner and a server that share one then gain only what each
leaves idle by itself. The daemon of MPS is started for the command, with files of its own, and ended after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
END_TIMEOUT_S = 30.0


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run the daemon of MPS, and yield the environment variables with which a process uses it.

    Raises:
        OSError, subprocess.CalledProcessError: the daemon can't be started.
    """
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # its path must be short: it holds sockets
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        everything = {**os.environ, **environment}
        subprocess.run([CONTROL, "-d"], env=everything, check=True)
        try:
            yield environment
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, env=everything, timeout=END_TIMEOUT_S, check=False)


def main(command: Sequence[str]) -> int:
    """Run `command` with MPS, and return its exit code; 2: there is no command, or no MPS."""
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    if not shutil.which(CONTROL):
        print(f"under_mps: there is no {CONTROL}, which comes with NVIDIA's driver", file=sys.stderr)
        return 2
    with mps() as environment:
        return subprocess.run(list(command), env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
