"""The program that runs an SGLang server: python -m rollout_server.engines.sglang.launch <SGLang's flags>

The code outside `main` runs in SGLang's child processes too, because multiprocessing imports this file in each of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from rollout_server.engines.sglang import import_stubs

PARENT_VARIABLE = "ASYNC_RL_PARENT_PID"
"""The environment variable with the process id of the parent. If it is set, the server ends with that process."""
API_KEY_VARIABLE = "ASYNC_RL_SERVER_KEY"
"""The environment variable with the server's API key, which on the command line every user of the host could read."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL; its child processes will do the same.

    The environment variable PARENT_VARIABLE names the parent; a process without it lives on when its parent dies.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes that this one starts end with it


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler, which owns the model, with this project's changes to it."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from rollout_server.engines.sglang import cpu_backend, overlap_pause, rebuilt_weights, weight_updates

    cpu_backend.install()
    overlap_pause.install()
    weight_updates.install()
    rebuilt_weights.install()
    run_scheduler_process(*args, **kwargs)


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        key = os.environ.pop(API_KEY_VARIABLE, "")
        server_args = prepare_server_args(sys.argv[1:] + (["--api-key", key] if key else []))
        server_args.resolve_once()
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # only in processes of the server, not where this module is imported
    die_with_parent()
    import_stubs.install()

if __name__ == "__main__":
    main()
