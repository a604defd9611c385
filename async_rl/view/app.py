"""The web application: its addresses, its error pages, and the security headers of every response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.errors import AsyncRLError
from async_rl.view import run_data, run_pages, sweep_pages
from async_rl.view.hosts import HostCheck
from async_rl.view.library import Library, UnknownRunError
from async_rl.view.pages import STATIC, page

HEADERS = {
    # Pages run no script and load nothing but the files of this server, whatever a model wrote into an answer.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(library: Library, is_loopback: bool = True, names: Collection[str] = ()) -> Starlette:
    """Return the application that shows the runs of a library, for requests whose Host passes HostCheck.

    Args:
        is_loopback: whether only programs of this machine reach it.
        names: the names besides `localhost` under which it may be asked for.
    """
    run_routes: list[BaseRoute] = [*run_pages.ROUTES, *run_data.ROUTES]
    middleware = [
        Middleware(_Headers), Middleware(HostCheck, is_loopback=is_loopback, names=names),
        Middleware(GZipMiddleware, minimum_size=1000, compresslevel=1),
    ]  # fmt: skip
    app = Starlette(
        routes=[
            Route("/", _first_page, name="home"),
            Mount("/static", StaticFiles(directory=STATIC), name="static"),
            Mount("/bokeh", StaticFiles(directory=bokeh_folder()), name="bokeh"),
            Mount("/run", routes=run_routes),
            Mount("/cells/{cell}", routes=run_routes),
            *sweep_pages.ROUTES,
        ],
        middleware=middleware,
        exception_handlers={AsyncRLError: _error, HTTPException: _error, ValueError: _error, Exception: _fault},
        lifespan=_lifespan,
    )
    app.state.library = library
    app.state.is_ending = lambda: False  # a server sets it, so that streams of events end with it
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.library.close()


class _Headers:
    """Adds the security headers in HEADERS to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _first_page(request: Request) -> Response:
    return RedirectResponse("/sweep" if request.app.state.library.sweep else "/run/overview")


def bokeh_folder() -> Path:
    """Return the folder of the chart library's JavaScript, without importing its Python part."""
    spec = find_spec("bokeh")
    assert spec is not None and spec.submodule_search_locations, "the command has checked the extra `page`"
    return Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"


def _error(request: Request, error: Exception) -> Response:
    """Return the HTTP answer to a request that raised `error`, with the error's text: JSON for /data/, else a page."""
    is_missing = isinstance(error, UnknownRunError)
    status = error.status_code if isinstance(error, HTTPException) else 404 if is_missing else 400
    text = str(error.detail if isinstance(error, HTTPException) else error)
    if isinstance(error, HTTPException) and status == 404:
        text = f"There is no page {request.scope['path']}."
    return _error_page(request, text, status)


def _fault(request: Request, error: Exception) -> Response:
    """Return the answer to a request that met a fault of this program; the server then logs where it was raised."""
    text = f"This page met a fault of async-rl, {type(error).__name__}; the output of `async-rl view` says where."
    response = _error_page(request, text, 500)
    response.headers.update(HEADERS)  # Starlette sends this answer from outside of all middleware
    return response


def _error_page(request: Request, text: str, status: int) -> Response:
    if "/data/" in request.scope["path"]:
        return JSONResponse({"error": text}, status)
    facts: dict[str, Any] = {"text": text, "run": None}
    return page(request, "error.html", facts, status)
