"""Plays the tasksets of verifiers (0.4.0). Their server runs in a Python environment of its own.

In that environment this file is a program: it writes the tasks of a taskset to a file, and then serves them.

    verifiers-venv/bin/python rollout_server/episodes/environments/verifiers_server.py my_taskset tasks.jsonl

In the worker this file is an agent: it asks the server to play each task with the model at the episode's endpoint.

    task: {path: tasks.jsonl, agent: "rollout_server.episodes.environments.verifiers_server:solve"}
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import os
import sys
import uuid
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgpack
import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from rollout_server.question import Question

ADDRESS = "tcp://127.0.0.1:5005"
HEALTH_S = 30.0
"""How long the server may take to answer a health check."""
_KEY_VARIABLE = "NO_API_KEY"
"""The server reads an API key from this variable. No key is needed, because it is part of the base URL."""


async def solve(question: Question, base_url: str, api_key: str) -> float:
    """Ask the verifiers server to play a task with the model at `base_url`; return the weighted sum of its rewards.

    The address of the server is in the question. Cancelling this call ends the task on the server too.

    Raises:
        ConnectionError: the server does not answer, or says that it could not play the task.
    """
    here = _connections.setdefault(asyncio.get_running_loop(), {})
    address = question.extra["address"]
    if address not in here:
        here[address] = Connection(address)
    return await here[address].run(question.extra["task"], base_url)


class Connection:
    """A connection to a verifiers server, shared by all episodes of an event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._answers: dict[bytes, asyncio.Queue[tuple[bytes, Any]]] = {}
        """The (kind, content) of the messages for each request."""
        self._reading = asyncio.create_task(self._read(), context=contextvars.Context())  # it belongs to no episode

    async def run(self, task: dict[str, Any], base_url: str) -> float:
        """Ask the server to play a task with the model at `base_url`; return the weighted sum of its rewards.

        Raises:
            ConnectionError: the server does not answer, or says that it could not play the task.
        """
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._ask(b"health", {})
        except TimeoutError:
            raise ConnectionError(
                f"the verifiers server {self._address} did not answer in {HEALTH_S:g} s: is it running?"
            ) from None
        client = {"type": "eval", "base_url": base_url, "api_key_var": _KEY_VARIABLE}
        request = {"task_data": task, "client": client, "model": "policy", "sampling": {}}
        rewards: dict[str, dict[str, Any]] = {}
        reply = await self._ask(b"run", request, rewards)
        if not reply["success"] or not rewards:
            reason = reply["error"] or reply["head"]["errors"]
            raise ConnectionError(f"the verifiers server {self._address} did not play the task to its end: {reason}")
        return sum(
            reward["score"] * reward["weight"] for trace in rewards.values() for reward in trace.values() if reward
        )

    async def _ask(
        self, method: bytes, content: dict[str, Any], rewards: dict[str, dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Send a request and return the reply. While waiting, collect the newest rewards of each trace in `rewards`."""
        number = uuid.uuid4().hex.encode()
        answers = self._answers[number] = asyncio.Queue()
        await self._socket.send_multipart([number, method, msgpack.packb(content)])
        try:
            while True:
                kind, answer = await answers.get()
                if kind == b"reply":
                    return dict(answer)
                if rewards is None:
                    continue
                if answer.get("discard"):
                    rewards.pop(answer["trace"], None)
                elif found := answer.get("set", {}).get("rewards"):
                    rewards[answer["trace"]] = found
        except asyncio.CancelledError:
            cancel = {"request_id": number.decode()}
            await self._socket.send_multipart([uuid.uuid4().hex.encode(), b"cancel", msgpack.packb(cancel)])
            raise
        finally:
            del self._answers[number]

    async def _read(self) -> None:
        while True:
            number, kind, content = await self._socket.recv_multipart()
            if answers := self._answers.get(number):
                answers.put_nowait((kind, msgpack.unpackb(content, strict_map_key=False)))


_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Connection]] = WeakKeyDictionary()
"""The connections of each event loop, by address."""


def main() -> None:
    """Write the tasks of a taskset to a file for task.path, and serve them.

    Runs in the Python environment of verifiers.
    """
    own_folder = os.path.dirname(os.path.abspath(__file__))  # it has modules with the names of other libraries
    sys.path[:] = [os.getcwd(), *(folder for folder in sys.path if folder != own_folder)]
    from verifiers.v1 import SingleAgentEnvConfig
    from verifiers.v1.serve.pool import serve_env
    from verifiers.v1.utils.loaders import load_environment

    parser = argparse.ArgumentParser(description="Write the tasks of a taskset to a file, and serve them.")
    parser.add_argument("taskset", help="the module of the taskset")
    parser.add_argument("file", help="the file of tasks to write, for task.path")
    parser.add_argument("--harness", default="", help="the module of the harness; by default the taskset's own")
    parser.add_argument("--count", type=int, help="how many tasks to write; needed if the taskset has no end")
    parser.add_argument("--address", default=ADDRESS)
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args()
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if chosen.harness:
        agent["harness"] = {"id": chosen.harness}
    config = SingleAgentEnvConfig(taskset={"id": chosen.taskset}, agent=agent)
    tasks = load_environment(config).taskset
    with open(chosen.file, "w", encoding="utf-8") as file:
        for task in tasks if chosen.count is None else tasks.take(chosen.count):
            file.write(json.dumps(_row(task, chosen.taskset, chosen.address)) + "\n")
    serve_env(max_workers=chosen.workers, address=chosen.address, config=config)


def _row(task: Any, taskset: str, address: str) -> dict[str, Any]:
    """Return the row of a task for task.path. Its prompt is only for logs: the harness of verifiers prompts the model.
    """
    text = task.data.prompt_text or f"task {task.data.idx}"
    return {
        "data_source": f"verifiers/{taskset}", "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"address": address, "task": task.data.model_dump(mode="json")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
