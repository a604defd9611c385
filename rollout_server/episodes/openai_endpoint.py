"""An HTTP endpoint like OpenAI's, which agents get as their base_url. Its chat completions are replies of sessions.

    POST /s/{key}/v1/chat/completions    tools, streaming, usage
    GET  /s/{key}/v1/models

Each session has a secret key. It is part of the base URL, or the bearer token of requests to /v1. The policy samples as
the run is configured, whatever temperature a request asks for. A reply counts only after all of it was written to an
open connection, so the learner trains on what the agent has received.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from async_rl.base.errors import AsyncRLError
from rollout_server.episodes.conversation.chat_messages import Message, Schema, plain_messages
from rollout_server.episodes.conversation.session import EpisodeOver, Reply, Session

MAX_BODY_BYTES = 16 * 2**20
LARGE_BODY_BYTES = 100_000
"""Longer bodies are parsed in a thread."""
HEAD_S = 75.0
"""How long a connection may stay open without a complete request head, at its start and after each reply."""
NUM_REMEMBERED = 10_000
"""The number of ended sessions that are remembered. A late request to one of them gets status 410 instead of 401."""
_RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's clients send this header with every request: 0, or the number of the retry."""
IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (), "min_p": (), "frequency_penalty": (), "presence_penalty": (),
    "repetition_penalty": (), "seed": (), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,), "reasoning_effort": (),
}  # fmt: skip
"""Parameters that are ignored: they would change how the policy samples, or need a constrained decoder, whose logprobs
belong to another distribution. Each has the values, besides null, that change nothing and cause no warning."""
_REFUSED = {
    "n": 1, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "functions": [], "audio": None, "prediction": None,
}  # fmt: skip
"""Parameters that get status 400. Each has the value that is accepted because it requests nothing."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenSession:
    """A session that an agent can reach by HTTP."""

    session: Session
    base_url: str
    """The `base_url` for OpenAI's clients."""
    key: str
    """The `api_key` for OpenAI's clients."""
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


class OpenAIEndpoint:
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
        for prefix in ("/s/{key}", ""):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            app.router.add_get(f"{prefix}/v1/models", self._models)
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
        """Answer a refused request with an error in OpenAI's format; OpenAI's clients show its message."""
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
        response = web.json_response(body, status=refused.status, headers={"x-should-retry": "false"})
        if not request.content.is_eof():  # the rest of the body is not read, so the connection can have no next request
            response.force_close()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
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

    def _tell_ignored(self, asked: CompletionRequest) -> None:
        self.counts.update(f"ignored/{name}" for name in asked.ignored)
        if new := [name for name in asked.ignored if name not in self._told]:
            self._told.update(new)
            what = f"agents set {', '.join(new)}: the policy samples as the run is configured, without regard to this"
            self.notes.append(f"{what}. Further requests are only counted, in endpoint/ignored/...")


def _key_of(request: web.Request) -> str:
    return request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


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


async def _asked(request: web.Request) -> CompletionRequest:
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
    return await asyncio.to_thread(_read, body) if len(body) > LARGE_BODY_BYTES else _read(body)


def _read(body: bytes) -> CompletionRequest:
    try:
        said = json.loads(body)
    except ValueError as error:
        raise RequestRefusedError(400, "invalid_request", f"the body must be JSON: {error}") from None
    return CompletionRequest.from_body(said)


def _unknown_address(request: web.Request) -> str:
    """Return an error message for a wrong address. It names the right addresses, without the key of a session."""
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
    """Return the response body for a reply that is not streamed."""
    message = {**reply.message, "refusal": None}
    if not reply.message["content"] and "tool_calls" in reply.message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {"choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, with_usage: bool) -> list[dict[str, Any]]:
    """Return the chunks of a streamed response.

    The first chunk has the whole reply, as its calls are not known earlier.
    """
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


class RequestRefusedError(Exception):
    """Refuses an agent's request. The response has HTTP status `status`, and JSON with `code` and the message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """An agent's request for the next message of a conversation: the body of POST .../chat/completions, checked."""

    messages: list[Message]
    tools: list[Schema]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool
    model: str
    ignored: tuple[str, ...]
    """The names of parameters in the request that have no effect."""

    @classmethod
    def from_body(cls, body: Any) -> CompletionRequest:
        """Check a JSON body and return it as a request.

        Raises:
            RequestRefusedError: the body is invalid, or asks for something that the policy can't be trained on.
        """
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise _invalid("messages", "a list of messages", body)
        if refused := [key for key, nothing in _REFUSED.items() if body.get(key) not in (None, nothing)]:
            raise RequestRefusedError(
                400, "unsupported", f"the policy can't be trained on a reply with {', '.join(refused)}: leave it out"
            )
        tools, options = _tools(body.get("tools")), body.get("stream_options")
        return cls(
            messages=_messages(body["messages"]), max_tokens=_max_tokens(body), stop=_stop(body.get("stop")),
            # "none" asks for a reply without calls: the model hardly calls tools that are not described to it.
            tools=[] if body.get("tool_choice") == "none" else tools,
            stream=bool(body.get("stream")), model=str(body.get("model", "policy")),
            stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            ignored=tuple(key for key, honoured in IGNORED.items() if body.get(key) not in (None, *honoured)),
        )  # fmt: skip


def _messages(messages: list[Any]) -> list[Message]:
    try:
        plain = plain_messages(messages)
    except ValueError as error:
        raise RequestRefusedError(400, "invalid_request", str(error)) from None
    has_called = False
    for position, message in enumerate(plain):
        has_called = has_called or "tool_calls" in message
        if message["role"] == "tool" and not has_called:
            raise RequestRefusedError(
                400, "invalid_request",
                f"messages[{position}] has the role tool, and no message before it has tool_calls: keep the reply with "
                "the call before its result",
            )  # fmt: skip
    return plain


def _max_tokens(body: dict[str, Any]) -> int | None:
    """Return the lower of max_completion_tokens and max_tokens in a body, or None if neither is set."""
    found = {name: body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None}
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise _invalid(name, "a whole number from 1", value)
    return min(found.values(), default=None)


def _tools(tools: Any) -> list[Schema]:
    if tools is None:
        return []
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in _list(tools, "tools")]
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid("tools", "objects of the type function, with function.name", tools)
    return [{"type": "function", "function": function} for function in functions]


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else _list(stop or [], "stop")
    if not all(isinstance(text, str) and text for text in texts):
        raise _invalid("stop", "texts", stop)
    return tuple(texts)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _invalid(name, "a list", value)
    return value


def _invalid(name: str, allowed: str, value: Any) -> RequestRefusedError:
    return RequestRefusedError(400, "invalid_request", f"{name} must be {allowed}, got {value!r:.200}")
