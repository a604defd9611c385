"""Renders the templates, and formats values for them. Text from models and data is escaped by the templates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from async_rl.errors import ConfigError
from async_rl.view.library import Library, OpenRun

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
MISSING = "\N{EN DASH}"
MAX_DIGITS = 15
MAX_SHOWN_CHARS = 80
"""The most characters of a wrong value that an error quotes."""
TABS = (
    ("overview", "Overview"), ("overlap", "Overlap"), ("groups", "Groups"), ("staleness", "Staleness"),
)  # fmt: skip


def library_of(request: Request) -> Library:
    library: Library = request.app.state.library
    return library


def run_of(request: Request) -> OpenRun:
    """Return the run that the address of a request names."""
    return library_of(request).run(request.path_params.get("cell", ""))


def base_of(request: Request) -> str:
    """Return the path with which the addresses of the request's run begin: `/run` or `/cells/<cell>`."""
    cell = request.path_params.get("cell", "")
    return f"/cells/{quote(cell)}" if cell else "/run"


def page(request: Request, template: str, facts: dict[str, Any], status: int = 200) -> Response:
    """Return a page made of a template; `facts` are the template's variables."""
    library = library_of(request)
    shared = {"sweep": library.sweep, "folder": library.folder, "tabs": TABS, "base": base_of(request)}
    return HTMLResponse(_TEMPLATES.get_template(template).render(shared | facts), status)


def run_page(request: Request, template: str, tab: str, facts: dict[str, Any]) -> Response:
    """Return a page of a run, under the head that its pages share: the run's state, its step, and the chosen `tab`."""
    run = run_of(request).files
    run.metrics.refresh()
    head = {"run": run, "state": run.state, "tab": tab, "progress": run.progress}
    return page(request, template, head | facts)


def whole_number(name: str, text: str) -> int:
    """Return the number that a part `name` of an address holds. All that are allowed fit into a column of SQLite.

    Raises:
        ConfigError: the part is no whole number, is negative, or has more than MAX_DIGITS digits.
    """
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
        raise ConfigError(f"{name} must be a whole number, at least 0, of at most {MAX_DIGITS} digits, got {shown!r}")
    return int(text)


def number(value: Any, form: str = "{:.3g}") -> str:
    """Return a value as text, with an en dash for one that is missing or not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    return form.format(value)


def duration(seconds: float | None) -> str:
    """Return a duration in its largest unit and the one below, e.g. `1 h 12 min`."""
    if seconds is None:
        return MISSING
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole % 86400 // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s")]
    first = next((i for i, (amount, _) in enumerate(parts) if amount), 3)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount or first == 3)


def marked(text: str) -> Markup:
    """Return a snippet of a search as HTML, with its hits, which stand between the characters 1 and 2, marked."""
    return Markup(str(escape(text)).replace("\x01", "<mark>").replace("\x02", "</mark>"))


def json_finite(value: Any) -> str:
    """Return JSON of nested lists and dicts, with null for numbers that are not finite."""
    return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters |= {"number": number, "duration": duration, "marked": marked}
