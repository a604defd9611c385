"""An HTTP endpoint like OpenAI's, whose chat completions are replies of sessions; agents get it as their base_url.

    POST /s/{key}/v1/chat/completions    tools, streaming, usage
    GET  /s/{key}/v1/models

Each session has a key that nobody can guess. It is part of the base URL, or the bearer token of requests to /v1. The
policy samples as the run is configured, whatever temperature a request asks for. A reply counts only once all of it was
written to a connection that was open: what is trained is what the agent has received.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from async_rl.base.errors import AsyncRLError
from rollout_server.episodes.agents.completion_request import CompletionRequest, RequestRefusedError
from rollout_server.episodes.conversation.session import EpisodeOver, Reply, Session

MAX_BODY_BYTES = 16 * 2**20
LARGE_BODY_BYTES = 100_000
"""Longer bodies are read as JSON in a thread."""
MAX_RUNNING = 64
"""Requests of one session that may run at once. Further ones wait."""
PLACE_S = 600.0
"""How long a request may wait until fewer than MAX_RUNNING others of its session run."""
HEAD_S = 75.0
"""How long a connection may be open without a whole head of a request, at its begin and after each reply."""
BODY_S = 60.0
"""How long the body of a request may take to arrive."""
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
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RUNNING))
    """The places of its running requests."""
    num_running: int = 0
    """The number of requests that run, or wait for a place."""
    idle_since_s: float = 0.0
    """The time of the event loop when the last request ended."""
    over: EpisodeOver | None = None
    """The first refusal of a request because no turn or no room was left."""
    refused: RequestRefusedError | None = None
    """The first refusal of a request for whatever reason."""
    error: Exception | None = None
    """The first error of the engine."""


class OpenAIEndpoint:
    """The HTTP server, on a free port, from which the agents of a worker get their replies."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counts of requests, with keys like `requests`, `retries`, `refused`, `late`, `ignored/temperature`."""
        self.notes: list[str] = []
        """Lines for the console, each about something that agents ask for and don't get."""
        self._told: set[str] = set()
        """The ignored parameters of requests that a note has named."""
        self._open: dict[str, OpenSession] = {}
        self._ended: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self._address = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of `host`. A request needs the key of a session that is open."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._refuse_in_json])
        for prefix in ("/s/{key}", ""):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        self._runner = web.AppRunner(
            app, access_log=None, logger=_http_log, shutdown_timeout=1.0, handler_cancellation=True,
            keepalive_timeout=HEAD_S, lingering_time=1.0,
        )  # fmt: skip
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
        session = self._open.pop(key).session
        self.counts.update(joined=session.counts.joined, undelivered=session.num_undelivered)
        self._ended.append(key)

    def _session(self, request: web.Request) -> OpenSession:
        """Return the open session whose key a request has.

        Raises:
            RequestRefusedError: the key is wrong, or the session has ended.
        """
        key = _key_of(request)
        if opened := self._open.get(key):
            return opened
        if key in self._ended:
            self.counts["late"] += 1
            raise RequestRefusedError(410, "episode_ended", "the episode has ended, and samples no further reply")
        raise RequestRefusedError(401, "invalid_api_key", "no session has this key")

    @web.middleware
    async def _refuse_in_json(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request that is refused in the form of OpenAI's errors, whose message its clients show."""
        try:
            return await handler(request)
        except RequestRefusedError as error:
            refused = error
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            refused = RequestRefusedError(error.status, "unknown_address", _unknown_address(request))
        except web.HTTPException as error:
            refused = RequestRefusedError(error.status, "invalid_request", error.reason)
        except RecursionError:
            refused = RequestRefusedError(400, "invalid_request", "the body is nested too deeply")
        self.counts["refused"] += 1
        if opened := self._open.get(_key_of(request)):
            opened.refused = opened.refused or refused
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        body = {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}
        headers = {"x-should-retry": "true" if refused.status == 429 else "false"}
        response = web.json_response(body, status=refused.status, headers=headers)
        if not request.content.is_eof():  # the rest of the body is not read, so the connection can have no next request
            response.force_close()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with the reply of its session, which is received once it is written.

        Raises:
            RequestRefusedError: there is no reply; the error says why.
        """
        self.counts["requests"] += 1
        opened = self._session(request)
        asked = await _asked(request)
        self._tell_ignored(asked)
        is_retry = request.headers.get(_RETRY_COUNT, "0") != "0"
        self.counts["retries"] += is_retry
        offer = opened.session.offer(
            asked.messages, asked.tools, max_tokens=asked.max_tokens, stop=asked.stop, is_retry=is_retry
        )
        try:
            async with _place(opened), offer as reply:
                return await _send(request, asked, reply)
        except _ClientGoneError:
            return web.Response()  # nobody reads it
        except (RequestRefusedError, RecursionError):
            raise
        except AsyncRLError as error:  # some are ValueErrors: of an oracle that raised
            raise _engine_failed(opened, error) from error
        except ValueError as error:
            raise RequestRefusedError(400, "invalid_request", str(error)) from error
        except EpisodeOver as over:
            if over.reason == "ended":
                raise RequestRefusedError(410, "episode_ended", str(over)) from None
            opened.over = opened.over or over
            code = "context_length_exceeded" if over.reason == "length" else "no_turn_left"
            raise RequestRefusedError(400, code, str(over)) from None
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():  # the client is gone
                raise
            raise RequestRefusedError(410, "episode_ended", "the episode ended before its reply was sampled") from None
        except Exception as error:
            raise _engine_failed(opened, error) from error

    def _tell_ignored(self, asked: CompletionRequest) -> None:
        self.counts.update(f"ignored/{name}" for name in asked.ignored)
        if new := [name for name in asked.ignored if name not in self._told]:
            self._told.update(new)
            what = f"agents set {', '.join(new)}: the policy samples as the run is configured, without regard to this"
            self.notes.append(f"{what}. Further requests are only counted, in endpoint/ignored/...")


def _key_of(request: web.Request) -> str:
    return request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _engine_failed(opened: OpenSession, error: Exception) -> RequestRefusedError:
    """Return the refusal for an error of the engine, which the runner of the episode raises."""
    opened.error = opened.error or error
    return RequestRefusedError(500, "engine_failed", f"{type(error).__name__}: {error}")


class _ClientGoneError(Exception):
    """The client closed the connection before the whole reply was written."""


def _is_about_us(record: logging.LogRecord) -> bool:
    """Return False for an error that aiohttp logs because a client hung up, or does not speak HTTP."""
    of_client = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], of_client))


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_is_about_us)


@asynccontextmanager
async def _place(opened: OpenSession) -> AsyncIterator[None]:
    """Wait for one of the session's places, and hold it while the block runs.

    Raises:
        RequestRefusedError: no place became free within PLACE_S.
    """
    opened.num_running += 1
    try:
        try:
            async with asyncio.timeout(PLACE_S):
                await opened.places.acquire()
        except TimeoutError:
            raise RequestRefusedError(
                429, "too_many_requests",
                f"this request waited {PLACE_S:g} s on the engine, which has not ended {MAX_RUNNING} earlier requests "
                f"of its episode. At most {MAX_RUNNING} run at once",
            ) from None  # fmt: skip
        try:
            yield
        finally:
            opened.places.release()
    finally:
        opened.num_running -= 1
        opened.idle_since_s = time.monotonic()


async def _asked(request: web.Request) -> CompletionRequest:
    """Return what the body of a request asks for.

    Raises:
        RequestRefusedError: the body is invalid, too long, or does not arrive.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise RequestRefusedError(
            408, "too_slow", f"the endpoint waited {BODY_S:g} s on the client for the body of its request"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        limit = f"a body may have at most {MAX_BODY_BYTES} bytes ({MAX_BODY_BYTES >> 20} MiB)"
        raise RequestRefusedError(413, "body_too_large", limit) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise RequestRefusedError(400, "invalid_request", f"the body can't be read: {error}") from None
    return await asyncio.to_thread(_read, body) if len(body) > LARGE_BODY_BYTES else _read(body)


def _read(body: bytes) -> CompletionRequest:
    try:
        said = json.loads(body)
    except ValueError as error:
        raise RequestRefusedError(400, "invalid_request", f"the body must be JSON: {error}") from None
    return CompletionRequest.from_body(said)


def _unknown_address(request: web.Request) -> str:
    """Return a sentence for a request to another address that names what exists, without the key of a session."""
    _, _, rest = request.path.partition("/v1")
    hint = ": call set_default_openai_api('chat_completions')" if rest.startswith("/responses") else ""
    return (
        f"there is no {request.method} {rest or '/':.100} below the base_url, only POST /chat/completions and GET "
        f"/models. A client of other addresses must be told to use chat completions{hint}"
    )


async def _send(request: web.Request, asked: CompletionRequest, reply: Reply) -> web.StreamResponse:
    """Write all of a reply to the connection of its request.

    Raises:
        _ClientGoneError: the connection was closed meanwhile.
    """
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
    response: web.StreamResponse
    try:
        if asked.stream:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            for chunk in chunks(reply, asked.stream_usage):
                line = json.dumps({**head, "object": "chat.completion.chunk", **chunk})
                await response.write(f"data: {line}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
        else:
            response = web.json_response({**head, "object": "chat.completion", **completion(reply)})
            await response.prepare(request)
        await response.write_eof()
    except ConnectionError as error:
        raise _ClientGoneError from error
    if request.transport is None or request.transport.is_closing():  # the last write has failed
        raise _ClientGoneError
    return response


def completion(reply: Reply) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message = {**reply.message, "refusal": None}
    if not reply.message["content"] and "tool_calls" in reply.message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {"choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, with_usage: bool) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer. The first holds the whole reply, as its calls are not known earlier."""
    delta: dict[str, Any] = {"role": "assistant", "content": reply.message["content"]}
    if calls := reply.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]},
    ]
    return [*parts, {"choices": [], "usage": _usage(reply)}] if with_usage else parts


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else reply.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.num_prompt_tokens + reply.num_tokens
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": reply.num_tokens, "total_tokens": total}
