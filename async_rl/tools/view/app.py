"""The web application: the list of runs, the page of a run, its groups, and the security headers of every response.

    /                              the list of runs; for a single run its page
    /run/NAME                      the run live: tiles, charts, lanes, who waits for whom
    /run/NAME/groups               the groups that meet a WHERE clause
    /run/NAME/groups/ID            a group, with one answer token by token
    /run/NAME/data/...             JSON: charts, lanes, and a text for each file that changes with it

An open page asks every second whether files have changed. If so, it loads itself again in the background and replaces
its parts with data-live. It continues to do so whatever happens to the run or to the server.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.run_dir.log_ratio_file import read_log_ratios
from async_rl.base.telemetry.plots import STATE_COLORS
from async_rl.tools.view.answers import answer_parts, legend, sibling
from async_rl.tools.view.journal_reader import PAGE_ROWS
from async_rl.tools.view.runs import RunFiles, Runs, UnknownRunError

FOLDER = Path(__file__).parent
HOSTS = ["localhost", "127.0.0.1"]
"""The host names that requests may use. A site that makes its own name point to this host (DNS rebinding) sends
that name, and is refused."""
HEADERS = {
    # Pages run no script and load nothing but the files of this server, whatever a model wrote into an answer.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STEPS_SHOWN = 10
MAX_DIGITS = 15
MISSING = "\N{EN DASH}"
COLORS = {"version": "policy version", "ratio": "importance ratio"}
WHERE_EXAMPLES = (
    "state = 'trained' AND reward < 0.2", "staleness >= 2", "step = 10", "drop_reason <> ''", "tokens > 1000",
    "group_id IN (SELECT group_id FROM episodes WHERE end = 'timeout')",
    "group_id IN (SELECT group_id FROM rows WHERE finish_reason = 'length')",
)  # fmt: skip


def make_app(runs: Runs) -> Starlette:
    """Return the web application that shows the runs of a folder."""
    run_routes = [
        Route("/", run_page), Route("/groups", groups_page), Route("/groups/{group_id}", group_page),
        Route("/data/charts", charts), Route("/data/lanes", lanes), Route("/data/changes", changes_of_run),
    ]  # fmt: skip
    app = Starlette(
        routes=[
            Route("/", runs_page),
            Route("/data/changes", changes_of_all),
            Mount("/run/{name}", routes=run_routes),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
            Mount("/bokeh", StaticFiles(directory=bokeh_folder())),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=1),
        ],
        exception_handlers={AsyncRLError: _error, HTTPException: _error, ValueError: _error},
    )  # fmt: skip
    app.state.runs = runs
    return app


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response


def bokeh_folder() -> Path:
    """Return the folder of Bokeh's JavaScript files, without importing its Python part."""
    spec = find_spec("bokeh")
    assert spec is not None and spec.submodule_search_locations, "the command has checked the extra `page`"
    return Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"


def runs_page(request: Request) -> Response:
    runs: Runs = request.app.state.runs
    all_runs = runs.all()
    if runs.is_single:
        return RedirectResponse(f"/run/{quote(all_runs[0].name)}/")
    request.state.seen, rows = _changes_of(runs), []
    for run in all_runs:
        start, now, _ = run.metrics.refresh().start_and_now()
        rows.append({"run": run, "state": run.state, "start": start.get, "now": now.get})
    return _page(request, "runs.html", {"rows": rows})


def run_page(request: Request) -> Response:
    """Return the page of a run. It loads its charts and lanes as JSON."""
    run = run_of(request)
    start, now, first_steps = run.metrics.start_and_now()
    facts = {
        "start": start.get, "now": now.get, "first_steps": first_steps, "metrics": run.metrics,
        "every_metric": run.metrics.every_metric(), "time_left_s": run.time_left_s, "colors": STATE_COLORS,
    }  # fmt: skip
    return _page(request, "run.html", facts, run, "run")


def groups_page(request: Request) -> Response:
    """Return the page with the groups that meet the query's WHERE clause, or with the error of the query."""
    run = run_of(request)
    query = {key: request.query_params.get(key, "").strip() for key in ("where", "order")}
    number = whole_number("page", request.query_params.get("page", "0"))
    facts: dict[str, Any] = {
        **query, "number": number, "page_rows": PAGE_ROWS, "examples": WHERE_EXAMPLES,
        "turn": lambda by: urlencode({**query, "page": number + by}), "rows": [], "prompts": {}, "has_more": False,
        "problem": "",
    }  # fmt: skip
    try:
        rows, has_more = run.journal.groups(query["where"], query["order"], number)
        tokens = run.journal.prompts([row["group_id"] for row in rows])
        prompts = {group_id: run.texts.question(ids) for group_id, ids in tokens.items()}
        facts |= {"rows": rows, "has_more": has_more, "prompts": prompts}
    except AsyncRLError as error:
        facts["problem"] = str(error)
    return _page(request, "groups.html", facts, run, "groups")


def group_page(request: Request) -> Response:
    """Return the page of one group: its answers side by side, and one answer token by token."""
    run = run_of(request)
    group_id = whole_number("group", request.path_params["group_id"])
    number = whole_number("answer", request.query_params.get("answer", "0"))
    color = request.query_params.get("color", "version")
    color = color if color in COLORS else "version"
    row = run.journal.group(group_id)
    if row is None:
        raise UnknownRunError(f"The journal has no group {group_id}.")
    facts: dict[str, Any] = {"row": row, "siblings": [], "color": color, "colors": COLORS, "missing": run.texts.missing}
    if group := run.journal.payload(group_id):
        number = min(number, len(group.rows) - 1)
        step = row["steps"][-1] if row["steps"] else None
        ratios = read_log_ratios(run.folder, step, group_id, number) if step else None
        trained_at = step - 1 if step else None
        prompt = group.prompt_tokens.tolist()
        facts |= {
            "number": number, "siblings": [sibling(group, each, run.texts) for each in range(len(group.rows))],
            "question": run.texts.question(prompt), "prompt": run.texts.decode(prompt),
            "parts": answer_parts(group, number, run.texts, trained_at, ratios, color),
            "legend": legend(group.rows[number], group.start_version, trained_at, ratios is not None, color),
        }  # fmt: skip
    return _page(request, "group.html", facts, run, "groups")


def charts(request: Request) -> Response:
    return JSONResponse(run_of(request).metrics.charts())


def lanes(request: Request) -> Response:
    """Return as JSON each pool's states over the newest steps."""
    run = run_of(request)
    # A resume starts timeline.json from empty, and counts the seconds since its own first step.
    since_s = run.metrics.values("time/since_first_step_s")
    number_of_first = int(max((step for step, value in since_s if value == 0.0), default=1))
    timeline = run.timeline.refresh()
    last = number_of_first + len(timeline.step_ends_s()) - 1
    found = timeline.window(last - STEPS_SHOWN + 1, last, number_of_first)
    if found is None:
        raise ConfigError("The timeline has no step yet.")
    return JSONResponse(asdict(found))


def changes_of_run(request: Request) -> Response:
    return JSONResponse(run_of(request).changes())


def changes_of_all(request: Request) -> Response:
    return JSONResponse(_changes_of(request.app.state.runs))


def _changes_of(runs: Runs) -> dict[str, str]:
    return {"runs": " ".join(run.changes()["status"] for run in runs.all())}


def run_of(request: Request) -> RunFiles:
    """Return the run named in the address of a request, with its newest metrics."""
    runs: Runs = request.app.state.runs
    run = runs.run(request.path_params["name"])
    request.state.seen = run.changes()  # before anything is read: the page asks for what changes later
    run.metrics.refresh()
    return run


def whole_number(name: str, text: str) -> int:
    """Parse a number in an address. Every allowed number fits into a column of SQLite.

    Args:
        name: the part of the address, for the error.

    Raises:
        ConfigError: the text is no whole number, is negative, or has more than MAX_DIGITS digits.
    """
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ConfigError(f"{name} must be a whole number of at most {MAX_DIGITS} digits, got {text[:80]!r}")
    return int(text)


def number_text(value: Any, form: str = "{:.3g}") -> str:
    """Return a value as text; an en dash if it is missing or not finite."""
    return form.format(value) if isinstance(value, int | float) and math.isfinite(value) else MISSING


def duration_text(seconds: float | None) -> str:
    """Return a duration in its largest unit and the next smaller one, e.g. `1 h 12 min`."""
    if seconds is None:
        return MISSING
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole % 86400 // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s")]
    first = next((i for i, (amount, _) in enumerate(parts) if amount), 3)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount or first == 3)


def _page(
    request: Request, template: str, facts: dict[str, Any], run: RunFiles | None = None, tab: str = "",
    status: int = 200,
) -> Response:
    """Render a template to an HTML page. The page's header shows the state of the run.

    Args:
        facts: the template's variables.
        tab: the selected tab.
    """
    runs: Runs = request.app.state.runs
    head: dict[str, Any] = {"run": run, "tab": tab, "folder": runs.folder, "is_single": runs.is_single}
    head["seen"] = getattr(request.state, "seen", {})
    if run:
        head |= {"base": f"/run/{quote(run.name)}", "state": run.state, "progress": run.progress}
    return HTMLResponse(_TEMPLATES.get_template(template).render(head | facts), status)


def _error(request: Request, error: Exception) -> Response:
    """Return the HTTP response for a request that raised `error`.

    It has the error's text, as JSON for /data/, else a page.
    """
    is_missing = isinstance(error, UnknownRunError)
    status = error.status_code if isinstance(error, HTTPException) else 404 if is_missing else 400
    text = str(error.detail if isinstance(error, HTTPException) else error)
    if isinstance(error, HTTPException) and status == 404:
        text = f"There is no page {request.scope['path']}."
    if "/data/" in request.scope["path"]:
        return JSONResponse({"error": text}, status)
    return _page(request, "error.html", {"text": text}, status=status)


_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters |= {"number": number_text, "duration": duration_text}
