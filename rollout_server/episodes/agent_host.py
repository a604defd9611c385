"""The program of an agent's own process: python agent_host.py MODULE:NAME. `AgentProcess` of agents.py starts it.

It uses the standard library only, so the Python environment of the agent need not have this package. It reads lines of
JSON from standard input:

    {"call": 5, "question": {...}, "base_url": "...", "api_key": "..."}       {"cancel": 5}

and writes to standard output {"call": 5, "reward": 1.0}, {"call": 5, "no_number": "None"} or {"call": 5, "fault":
[fields of a Fault]}. The process ends when its input does. Neither the agent nor its children see these two pipes: what
they print goes to the log, and their standard input is empty.
"""

import asyncio
import importlib
import json
import math
import os
import sys
import threading
import types
from contextlib import suppress
from typing import IO, Any

if __name__ != "__main__":
    from rollout_server.episodes.user_code import Fault, GuardedCoroutine, called
else:  # a program has no package around it
    from user_code import Fault, GuardedCoroutine, called  # type: ignore[import-not-found, no-redef]

    del sys.modules["user_code"]  # the agent may have a module of this name

CANCEL_S = 2.0
"""How long agents may take to end after the worker has ended."""


class AgentHost:
    """Runs in the agent's process: reads calls from `requests`, runs many of them simultaneously, writes to `replies`.
    """

    def __init__(self, agent: Any, requests: IO[str], replies: IO[str]) -> None:
        self._agent = agent
        self._requests = requests
        self._replies = replies
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Start and cancel calls of the agent as the lines of `requests` say. Exits the process when the lines end."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_guarded_task)
        lines: asyncio.Queue[str] = asyncio.Queue()

        def read() -> None:
            for line in self._requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            # The worker has ended. Agents get a moment to end too; those that hang must not hold this process.
            ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), loop)
            with suppress(Exception):
                ending.result(CANCEL_S)
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        while True:
            self._handle(json.loads(await lines.get()))

    async def _cancel_all(self) -> None:
        """Cancel all running calls of the agent, and wait until they have ended."""
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _handle(self, request: dict[str, Any]) -> None:
        if "cancel" in request:
            if task := self._calls.get(request["cancel"]):
                task.cancel()
            return
        number = request["call"]
        task = self._calls[number] = asyncio.get_running_loop().create_task(self._call(number, request))
        task.add_done_callback(lambda _: self._calls.pop(number))

    async def _call(self, number: int, request: dict[str, Any]) -> None:
        question = types.SimpleNamespace(**request["question"])
        try:
            reward = await called(self._agent, question, base_url=request["base_url"], api_key=request["api_key"])
            reply: dict[str, Any] = {"call": number, **_told(reward)}
        except BaseException as error:  # a cancelled call has nobody who waits for its reply
            reply = {"call": number, "fault": Fault.of(error)}
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


def _told(reward: Any) -> dict[str, Any]:
    """Return what a reply says of the agent's result: {"reward": number}, or {"no_number": text} if it is not a number.
    """
    try:
        return {"reward": float(reward)}
    except OverflowError:
        return {"reward": math.inf}
    except Exception:  # as in the process of a worker, no fault of the model
        try:
            return {"no_number": repr(reward)[:200]}
        except Exception:
            return {"no_number": f"a value of the class {type(reward).__name__} that can't be shown"}


def _guarded_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(GuardedCoroutine(coroutine), loop=loop, **options)


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Return standard input and output as files that only this process has. File descriptors 0 and 1 become others.

    Input 0 is then empty, and output to 1 goes to standard error.
    """
    requests, replies = os.dup(0), os.dup(1)  # programs that are started do not inherit these
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def forget() -> None:  # a forked child inherits all; one that outlives this process would keep its pipes open
        os.dup2(nothing, requests, inheritable=False)
        os.dup2(nothing, replies, inheritable=False)

    os.register_at_fork(after_in_child=forget)
    return os.fdopen(requests, encoding="utf-8"), os.fdopen(replies, "w", encoding="utf-8")


def main() -> None:
    requests, replies = _take_pipes()
    own_folder = os.path.dirname(os.path.abspath(__file__))  # its names hide packages, such as `agents` of OpenAI's SDK
    sys.path[:] = [os.getcwd(), *(folder for folder in sys.path if folder != own_folder)]
    sys.path.sort(key=lambda folder: "py_modules_files" not in folder)  # see async_rl/base/seams/lookup.py
    module, _, name = sys.argv[1].partition(":")
    agent = getattr(importlib.import_module(module), name)
    replies.write('{"ready": true}\n')
    replies.flush()
    asyncio.run(AgentHost(agent, requests, replies).run())


if __name__ == "__main__":
    main()
