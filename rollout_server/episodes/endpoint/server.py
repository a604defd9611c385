"""The HTTP endpoint that agents get as their base_url. Its answers are replies of sessions.

    POST /s/{key}/v1/chat/completions    OpenAI's chat completions
    POST /s/{key}/v1/responses           OpenAI's responses
    POST /s/{key}/v1/messages            Anthropic's messages
    GET  /s/{key}/v1/models, /s/{key}/v1/models/policy

All have tools, streaming and usage. The tokens and versions of a reply don't depend on the API that asked for it.

Each session has a secret key. It is part of the base URL, or the API key of requests to /v1. The policy samples as
the run is configured, whatever temperature a request asks for. A reply counts only after all of it was written to an
open connection, so the learner trains on what the agent has received.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from async_rl.base.errors import AsyncRLError
from rollout_server.episodes.conversation.session import EpisodeOver, Reply, Session
from rollout_server.episodes.endpoint.chat_completions import CHAT_COMPLETIONS
from rollout_server.episodes.endpoint.messages import MESSAGES
from rollout_server.episodes.endpoint.request import AgentRequest, Api, RequestRefusedError
from rollout_server.episodes.endpoint.responses import RESPONSES

MAX_BODY_BYTES = 16 * 2**20
LARGE_BODY_BYTES = 100_000
"""Longer bodies are parsed in a thread."""
HEAD_S = 75.0
"""How long a connection may stay open without a complete request head, at its start and after each reply."""
NUM_REMEMBERED = 10_000
"""The number of ended sessions that are remembered. A late request to one of them gets status 410 instead of 401."""
_RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's and Anthropic's clients send this header with every request: 0, or the number of the retry."""
_APIS = {"chat/completions": CHAT_COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
_MODEL = {
    "id": "policy", "display_name": "policy", "owned_by": "run",
    "object": "model", "created": 0, "type": "model", "created_at": "1970-01-01T00:00:00Z",
}  # fmt: skip
"""The model that `GET /models` lists, with the keys of OpenAI's and of Anthropic's API."""
_PREFIXES = ("/s/{key}/v1", "/s/{key}/v1/v1", "/v1")
"""Anthropic's clients append /v1 to their base_url, OpenAI's do not. So /v1 may come twice."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenSession:
    """A session that an agent can reach by HTTP."""

    session: Session
    base_url: str
    """The `base_url` for OpenAI's and Anthropic's clients."""
    key: str
    """The `api_key` for these clients."""
    idle_since_s: float
    """When the last request ended, in time.monotonic()."""
    num_running: int = 0
    """The number of running requests."""
    over: EpisodeOver | None = None
    """The first refusal because no turn or no room was left."""
    refused: RequestRefusedError | None = None
    """The first refusal for any reason."""
    error: Exception | None = None
    """The first error of the engine."""


class AgentEndpoint:
    """The HTTP server for a worker's agents, on a free port."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counts of requests: `requests`, `retries`, `refused`, `late`, `ignored/temperature`, ..."""
        self.notes: list[str] = []
        """Lines for the console about parameters of requests that have no effect."""
        self._told: set[str] = set()
        """The parameters that `notes` has named already."""
        self._open: dict[str, OpenSession] = {}
        self._ended: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self._address = ""
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1. Later calls do nothing."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._listen(), name="start of the agents' endpoint")
        await asyncio.shield(self._starting)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._refuse_in_json])
        for prefix in _PREFIXES:
            for path in _APIS:
                app.router.add_post(f"{prefix}/{path}", self._answer)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/policy", self._model)
        self._runner = web.AppRunner(
            app, access_log=None, logger=_http_log, shutdown_timeout=1.0, handler_cancellation=True,
            keepalive_timeout=HEAD_S, lingering_time=1.0,
        )  # fmt: skip
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def aclose(self) -> None:
        """Stop the server, if it was started."""
        if self._starting is not None:
            await self._starting
            await self._runner.cleanup()

    def open(self, session: Session) -> OpenSession:
        """Make a session reachable until `end` is called, and return it with its base URL and key."""
        key = secrets.token_urlsafe(18)
        opened = OpenSession(session, f"{self._address}/s/{key}/v1", key, idle_since_s=time.monotonic())
        self._open[key] = opened
        return opened

    def end(self, key: str) -> None:
        """Make a session unreachable: further requests get status 410."""
        session = self._open.pop(key).session
        self.counts.update(joined=session.counts.joined, undelivered=session.num_undelivered)
        self._ended.append(key)

    def _session(self, request: web.Request) -> OpenSession:
        """Return the open session that belongs to the key of a request.

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
        """Answer a refused request with an error in the format of its API; the API's clients show its message."""
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
        body = _api_of(request).error(refused)
        response = web.json_response(body, status=refused.status, headers={"x-should-retry": "false"})
        if not request.content.is_eof():  # the rest of the body is not read, so the connection can have no next request
            response.force_close()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        ends = {"has_more": False, "first_id": _MODEL["id"], "last_id": _MODEL["id"]}
        return web.json_response({"object": "list", "data": [_MODEL], **ends})

    async def _model(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(_MODEL)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with a reply of its session. The reply counts as received once it is written.

        Raises:
            RequestRefusedError: there is no reply. The error says why.
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
            with _running(opened):
                async with offer as reply:
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

    def _tell_ignored(self, asked: AgentRequest) -> None:
        self.counts.update(f"ignored/{name}" for name in asked.ignored)
        if new := [name for name in asked.ignored if name not in self._told]:
            self._told.update(new)
            what = f"agents set {', '.join(new)}: the policy samples as the run is configured, without regard to this"
            self.notes.append(f"{what}. Further requests are only counted, in endpoint/ignored/...")


def _key_of(request: web.Request) -> str:
    """Return the session's key in a request's address, or in the header of OpenAI's or Anthropic's clients."""
    headers = request.headers
    of_header = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ")
    return request.match_info.get("key") or of_header


def _api_of(request: web.Request) -> Api:
    """Return the API that has a request's address or one above it; of other addresses chat completions."""
    _, _, below = request.path.rpartition("/v1/")
    return next((api for path, api in _APIS.items() if f"{below}/".startswith(f"{path}/")), CHAT_COMPLETIONS)


def _engine_failed(opened: OpenSession, error: Exception) -> RequestRefusedError:
    """Return the refusal for an error of the engine, and keep the error in the session for the episode's runner."""
    opened.error = opened.error or error
    return RequestRefusedError(500, "engine_failed", f"{type(error).__name__}: {error}")


class _ClientGoneError(Exception):
    """The client closed the connection before the whole reply was written."""


def _is_about_us(record: logging.LogRecord) -> bool:
    """Return False for log records of aiohttp about a client that hung up or does not speak HTTP."""
    of_client = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], of_client))


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_is_about_us)


@contextmanager
def _running(opened: OpenSession) -> Iterator[None]:
    opened.num_running += 1
    try:
        yield
    finally:
        opened.num_running -= 1
        opened.idle_since_s = time.monotonic()


async def _asked(request: web.Request) -> AgentRequest:
    """Read, check and return the body of a request.

    Raises:
        RequestRefusedError: the body is invalid or too long, or its connection breaks.
    """
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        limit = f"a body may have at most {MAX_BODY_BYTES} bytes ({MAX_BODY_BYTES >> 20} MiB)"
        raise RequestRefusedError(413, "body_too_large", limit) from None
    except (web.RequestPayloadError, ConnectionError) as error:
        raise RequestRefusedError(400, "invalid_request", f"the body can't be read: {error}") from None
    api = _api_of(request)
    return await asyncio.to_thread(_read, api, body) if len(body) > LARGE_BODY_BYTES else _read(api, body)


def _read(api: Api, body: bytes) -> AgentRequest:
    try:
        said = json.loads(body)
    except ValueError as error:
        raise RequestRefusedError(400, "invalid_request", f"the body must be JSON: {error}") from None
    return api.read(said)


def _unknown_address(request: web.Request) -> str:
    """Return an error message for a wrong address. It names the right addresses, without the key of a session."""
    _, _, rest = request.path.partition("/v1")
    posts = ", ".join(f"POST /{path}" for path in _APIS)
    return f"there is no {request.method} {rest or '/':.100} below the base_url, only {posts} and GET /models"


async def _send(request: web.Request, asked: AgentRequest, reply: Reply) -> web.StreamResponse:
    """Write all of a reply to the connection of its request.

    Raises:
        _ClientGoneError: the connection was closed meanwhile.
    """
    response: web.StreamResponse
    api = _api_of(request)
    try:
        if asked.stream:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            for event in api.events(asked, reply):
                await response.write(event)
        else:
            response = web.json_response(api.body(asked, reply))
            await response.prepare(request)
        await response.write_eof()
    except ConnectionError as error:
        raise _ClientGoneError from error
    if request.transport is None or request.transport.is_closing():  # the last write has failed
        raise _ClientGoneError
    return response
