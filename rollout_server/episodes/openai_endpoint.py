"""An HTTP endpoint like OpenAI's, whose chat completions are replies of sessions; agents get it as their base_url.

    POST /s/{key}/v1/chat/completions    tools, streaming, usage
    GET  /s/{key}/v1/models

Each session has a key that nobody can guess. It is part of the base URL, or the bearer token of requests to /v1. The
policy samples as the run is configured, whatever temperature a request asks for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rollout_server.episodes.completion_request import CompletionRequest, RequestRefusedError
from rollout_server.episodes.session import EpisodeOver, Reply, Session

MAX_BODY_BYTES = 16 * 2**20
MAX_RUNNING = 64
"""Requests of one session that may run at once. Further ones get status 429, which clients retry later."""
NUM_REMEMBERED = 10_000
"""The number of ended sessions that are remembered, so that a late request gets status 410 and not 401."""
_RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's clients send this header with every request: 0, or the number of the retry."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenSession:
    """A session that an agent can reach by HTTP: its address and key, its running requests, and their first errors."""

    session: Session
    base_url: str
    """The `base_url` for OpenAI's clients."""
    key: str
    """The `api_key` for them."""
    num_running: int = 0
    idle_since_s: float = 0.0
    """The time of the event loop at which the last request ended."""
    over: EpisodeOver | None = None
    """The first refusal of a request because no turn or no room was left."""
    error: Exception | None = None
    """The first error of the engine."""


class OpenAIEndpoint:
    """The HTTP server, on a free port, from which the agents of a worker get their replies."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counts of requests, with keys like `requests`, `retries`, `refused`, `late`, `ignored/temperature`."""
        self._told: set[str] = set()
        """The ignored parameters of requests that the log has named."""
        self._open: dict[str, OpenSession] = {}
        self._ended: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self._address = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of `host`. A request needs the key of a session that is open."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in ("/s/{key}", ""):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        self._address = f"http://{host}:{self._runner.addresses[0][1]}"

    async def aclose(self) -> None:
        await self._runner.cleanup()

    def open(self, session: Session) -> OpenSession:
        """Let requests reach a session, and return it with its base URL and key. `end` undoes it."""
        key = secrets.token_urlsafe(18)
        opened = OpenSession(session, f"{self._address}/s/{key}/v1", key, idle_since_s=time.monotonic())
        self._open[key] = opened
        return opened

    def end(self, key: str) -> None:
        """Refuse further requests to a session, with status 410."""
        del self._open[key]
        self._ended.append(key)

    def _session(self, request: web.Request) -> OpenSession:
        """Return the open session whose key a request has.

        Raises:
            RequestRefusedError: the key is wrong, or the session has ended.
        """
        key = request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if opened := self._open.get(key):
            return opened
        if key in self._ended:
            self.counts["late"] += 1
            raise RequestRefusedError(410, "episode_ended", "the episode has ended, and samples no further reply")
        raise RequestRefusedError(401, "invalid_api_key", "no session has this key")

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except RequestRefusedError as refused:
            return _error(refused)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.counts["requests"] += 1
        try:
            opened = self._session(request)
            asked = CompletionRequest.from_body(await _body(request))
            self._count_ignored(asked)
            is_retry = request.headers.get(_RETRY_COUNT, "0") != "0"
            self.counts["retries"] += is_retry
            reply = await self._reply(opened, asked, is_retry)
        except RequestRefusedError as refused:
            self.counts["refused"] += 1
            return _error(refused)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        if not asked.stream:
            return web.json_response({**head, "object": "chat.completion", **_completion(reply)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in _chunks(reply, asked.stream_usage):
            line = json.dumps({**head, "object": "chat.completion.chunk", **chunk})
            await response.write(f"data: {line}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _reply(self, opened: OpenSession, asked: CompletionRequest, is_retry: bool) -> Reply:
        """Return the reply of the session `opened` to the request `asked`.

        Raises:
            RequestRefusedError: there is no reply; the error says why.
        """
        if opened.num_running >= MAX_RUNNING:
            raise RequestRefusedError(429, "too_many_requests", f"{MAX_RUNNING} requests of this session are running")
        opened.num_running += 1
        try:
            return await opened.session.reply(
                asked.messages, asked.tools, max_tokens=asked.max_tokens, stop=asked.stop, is_retry=is_retry
            )
        except EpisodeOver as over:
            if over.reason == "ended":
                raise RequestRefusedError(410, "episode_ended", str(over)) from None
            opened.over = opened.over or over
            code = "context_length_exceeded" if over.reason == "length" else "no_turn_left"
            raise RequestRefusedError(400, code, str(over)) from None
        except ValueError as error:
            raise RequestRefusedError(400, "invalid_request", str(error)) from error
        except asyncio.CancelledError:
            if not opened.session.is_closed:
                raise
            raise RequestRefusedError(410, "episode_ended", "the episode ended before its reply was sampled") from None
        except Exception as error:  # of the engine: the runner of the episode raises it
            opened.error = opened.error or error
            raise RequestRefusedError(500, "engine_failed", f"{type(error).__name__}: {error}") from error
        finally:
            opened.num_running -= 1
            opened.idle_since_s = time.monotonic()

    def _count_ignored(self, asked: CompletionRequest) -> None:
        for name in asked.ignored:
            if name not in self._told:
                self._told.add(name)
                _log.warning("agents set %s: it is ignored, and the policy samples as the run is configured", name)
            self.counts[f"ignored/{name}"] += 1


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(400, "invalid_request", f"the body must be JSON: {error}") from None
    except ConnectionError:  # the client is gone, and reads no answer
        raise RequestRefusedError(400, "disconnected", "the client closed the connection") from None


def _completion(reply: Reply) -> dict[str, Any]:
    message = {**reply.message, "refusal": None}
    if not reply.message["content"] and "tool_calls" in reply.message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {"choices": [choice], "usage": _usage(reply)}


def _chunks(reply: Reply, with_usage: bool) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer. The first holds the whole reply, as its calls are not known earlier."""
    delta: dict[str, Any] = {"role": "assistant", "content": reply.message["content"]}
    if calls := reply.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]},
    ]
    return [*chunks, {"choices": [], "usage": _usage(reply)}] if with_usage else chunks


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else reply.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.num_prompt_tokens + reply.num_tokens
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": reply.num_tokens, "total_tokens": total}


def _error(refused: RequestRefusedError) -> web.Response:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    body = {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}
    headers = {"x-should-retry": "true" if refused.status == 429 else "false"}
    return web.json_response(body, status=refused.status, headers=headers)
