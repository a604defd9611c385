"""The environments of an OpenEnv server (openenv-core 0.3), which runs elsewhere and speaks WebSocket.

    task:
      env: rollout_server.episodes.environments.openenv:OpenEnv
      params: {url: "http://127.0.0.1:8000", action_field: message, observation_field: echoed_message}

The server must allow a session (max_concurrent_envs) for each running episode: rollout.max_groups_in_flight times
rollout.group_size for each worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool


class OpenEnv:
    """One episode with the environment of an OpenEnv server, a class for `task.env`.

    A subclass may override `action` and `shown` for actions and observations of several fields.

    Args:
        url: the server's address.
        index: the prompt's index. It determines the seed of the environment.
        action_field: the action's field for the text of a reply.
        observation_field: the observation's field that the model sees. Empty: it sees all fields, as JSON.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, url: str, index: int = 0, action_field: str = "message", observation_field: str = "") -> None:
        self._url = url.rstrip("/")
        self._seed = index % 2**31  # no negative number: random.seed takes -3 for 3
        self._action_field = action_field
        self._observation_field = observation_field
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def action(self, reply: Message) -> dict[str, Any]:
        """Return the action for a reply of the model: its text in the field `action_field`."""
        return {self._action_field: reply["content"]}

    def shown(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation that the model sees: one field of it, or all fields as JSON."""
        if self._observation_field:
            return str(observation[self._observation_field])
        return json.dumps(observation)

    async def start(self) -> list[Message]:
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=0)
        seen = await self._ask("reset", {"seed": self._seed})
        return [user(self.shown(seen["observation"]))]

    async def step(self, reply: Message) -> Step:
        seen = await self._ask("step", self.action(reply))
        return Step(
            messages=[user(self.shown(seen["observation"]))], reward=float(seen["reward"] or 0.0),
            done=bool(seen["done"]),
        )  # fmt: skip

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message to the server and return the data of its answer.

        Raises:
            ConnectionError: the server closed the connection.
            RuntimeError: the server answers with an error.
        """
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(
                f"the OpenEnv server {self._url} closed the connection (code {self._socket.close_code}): it has ended, "
                "or more episodes run than its max_concurrent_envs"
            )
        said: dict[str, Any] = json.loads(answer.data)
        if said["type"] == "error":
            raise RuntimeError(f"the OpenEnv server {self._url} answers {kind} with an error: {said['data']!r:.500}")
        answered: dict[str, Any] = said["data"]
        return answered
