"""The adapter for OpenEnv with a server that speaks its protocol. packages/ plays with the real one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.environments.openenv import OpenEnv
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from tests.kit.episodes.sessions import scripted, session_of

TOKENIZER = character_tokenizer()
LIMITS = EpisodeLimits(tool_s=5, turn_s=5, episode_s=10)


class Server:
    """Counts replies: the third one is the last, and each gives its number as a reward."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.num_open = 0
        self.answers: dict[str, Any] = {}
        """[type of a message] the answer to it in place of an observation; None closes the connection."""

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_open += 1
        turn = 0
        async for message in socket:
            said = json.loads(message.data)
            self.asked.append(said)
            if said["type"] in self.answers:
                if self.answers[said["type"]] is None:
                    await socket.close()
                    break
                await socket.send_json(self.answers[said["type"]])
                continue
            data = {"observation": {"hint": f"turn {turn}", "n": turn}, "reward": turn or None, "done": turn == 3}
            await socket.send_json({"type": "observation", "data": data})
            turn += 1
        self.num_open -= 1
        return socket


def played(server: Server, kind: type[OpenEnv] = OpenEnv, **params: Any) -> Episode:
    async def play() -> Episode:
        app = web.Application()
        app.router.add_get("/ws", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await EnvRunner(LIMITS, 4).run(
                lambda: kind(url, -3, **params),
                lambda: session_of(scripted(TOKENIZER, ["a", "b", "c"]), TOKENIZER, [TOKENIZER.eos_token_id]),
            )
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(play(), 20))


def test_an_episode_of_a_server_is_played() -> None:
    server = Server()
    episode = played(server, action_field="text", observation_field="hint")
    (row,) = episode.rows
    assert TOKENIZER.decode(row.tokens) == "turn 0<sep>a<eos>\nturn 1<sep>b<eos>\nturn 2<sep>c<eos>"
    assert (episode.end, row.turn_rewards, server.num_open) == ("done", (1.0, 2.0, 3.0), 0)
    assert server.asked == [
        {"type": "reset", "data": {"seed": 2**31 - 3}},
        *({"type": "step", "data": {"text": text}} for text in "abc"),
    ]


@pytest.mark.parametrize(("kind", "answer", "named"), [
    ("reset", None, "max_concurrent_envs"), ("step", None, "closed"),
    ("step", {"type": "error", "data": {"code": "BAD", "message": "no such move"}}, "no such move"),
])
def test_a_server_that_fails_fails_the_episode(kind: str, answer: Any, named: str) -> None:
    server = Server()
    server.answers = {kind: answer}
    episode = played(server)
    assert episode.end == "failed" and named in episode.error and episode.metrics["failed"] == 2
