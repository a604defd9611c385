"""The program of an agent process: python agent_host.py MODULE:NAME. It uses the standard library only.

So the environment of the agent need not have this package. Lines of JSON come by the pipe that is standard input:

    {"call": 5, "question": {...}, "base_url": "...", "api_key": "..."}       {"cancel": 5}

and go to the one that is standard output: {"call": 5, "reward": 1.0}, {"call": 5, "no_number": "None"} or {"call": 5,
"fault": [fields of a Fault]}. The process ends when its input does. Neither the agent nor its children see these pipes:
what they print goes to the log, and where they read standard input, it is empty.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
import threading
import types
from contextlib import suppress
from typing import IO, Any

if __name__ != "__main__":
    from rollout_server.episodes.user_code.faults import CodeExitError, Fault, GuardedCoroutine
else:  # a program has no package around it
    from faults import CodeExitError, Fault, GuardedCoroutine  # type: ignore[import-not-found, no-redef]

    del sys.modules["faults"]  # the agent may have a module of this name

CANCEL_S = 2.0
"""How long agents may take to end once the worker has ended."""


class AgentHost:
    """Calls the agent for many questions at once, as the lines of `requests` ask, and writes its rewards."""

    def __init__(self, agent: Any, requests: IO[str], replies: IO[str]) -> None:
        self._agent = agent
        self._requests = requests
        self._replies = replies
        self._calls: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Start and cancel calls of the agent as the requests ask; end the process when they end."""
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
        """Cancel all running calls of the agent, and return once they have ended."""
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
            reward = await _result(self._agent, question, base_url=request["base_url"], api_key=request["api_key"])
            reply: dict[str, Any] = {"call": number, **_told(reward)}
        except BaseException as error:  # a cancelled call has nobody who waits for its reply
            reply = {"call": number, "fault": Fault.of(error)}
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


def _told(reward: Any) -> dict[str, Any]:
    """Return the field of a reply that tells a reward: the number, or the text of what is none."""
    try:
        return {"reward": float(reward)}
    except OverflowError:
        return {"reward": math.inf}
    except Exception:  # as in the process of a worker, no fault of the model
        try:
            return {"no_number": repr(reward)[:200]}
        except Exception:
            return {"no_number": f"a value of the class {type(reward).__name__} that can't be shown"}


async def _result(agent: Any, *args: Any, **options: Any) -> Any:
    if inspect.iscoroutinefunction(agent):
        return await agent(*args, **options)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            outcome, value = future.set_result, agent(*args, **options)
        except BaseException as error:
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future can hold these
            outcome, value = future.set_exception, error if is_plain else CodeExitError(error)
        loop.call_soon_threadsafe(lambda: None if future.done() else outcome(value))

    threading.Thread(target=work, daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result


def _guarded_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(GuardedCoroutine(coroutine), loop=loop, **options)


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Return standard input and standard output as files of this process alone, and put others into their places."""
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
    own_folder = os.path.dirname(os.path.abspath(__file__))  # it has an faults.py, as the agent's packages may have
    sys.path[:] = [os.getcwd(), *(folder for folder in sys.path if folder != own_folder)]
    sys.path.sort(key=lambda folder: "py_modules_files" not in folder)  # see async_rl/base/seams/user_modules.py
    module, _, name = sys.argv[1].partition(":")
    agent = getattr(importlib.import_module(module), name)
    replies.write('{"ready": true}\n')
    replies.flush()
    asyncio.run(AgentHost(agent, requests, replies).run())


if __name__ == "__main__":
    main()
