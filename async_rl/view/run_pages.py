"""The pages of a run: overview, overlap, groups with one of them, and staleness."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.errors import ConfigError
from async_rl.guard.signals import SIGNALS
from async_rl.telemetry.plot_timeline import STATE_COLORS
from async_rl.view.answers import sibling
from async_rl.view.charts import EPISODE_CHARTS, OVERVIEW_CHARTS, reward_charts, staleness_charts
from async_rl.view.journal_reader import ORDERS, JournalError
from async_rl.view.library import OpenRun
from async_rl.view.metrics_file import RECENT_STEPS
from async_rl.view.pages import page, run_of, run_page, whole_number
from async_rl.view.run_files import RunFiles
from async_rl.view.text_index import Found
from async_rl.view.token_texts import TokenTexts
from buffer.stored_group import DROP_REASONS

INTEGER_FILTERS = ("step", "staleness_min", "staleness_max", "tokens_min", "tokens_max", "prompt")
NUMBER_FILTERS = ("reward_min", "reward_max")
TEXT_FILTERS = ("state", "drop_reason", "worker", "end")
ORDER_TITLES = {
    "newest": "newest first", "oldest": "oldest first", "reward_high": "highest reward", "reward_low": "lowest reward",
    "longest": "longest answers", "stalest": "most stale",
}  # fmt: skip
assert ORDER_TITLES.keys() == ORDERS.keys()
STEPS_SHOWN = 10
COLORINGS = {
    "version": "policy version",
    "ratio": "importance ratio",
    "logprob": "behaviour logprob",
    "mask": "mask",
}


def overview(request: Request) -> Response:
    run = run_of(request).files
    hidden = {"run.name", "run.dir"}  # they say where the run is, and every run sets them
    settings = [row for row in run.changed_settings if row[0] not in hidden]
    of_rewards = reward_charts(run.metrics.refresh().keys)
    charts = [*OVERVIEW_CHARTS, *of_rewards, *(EPISODE_CHARTS if plays_episodes(run) else ())]
    facts = {"charts": charts, "settings": settings, "none_at_all": ..., **_live_facts(run)}
    return run_page(request, "overview.html", "overview", facts)


def plays_episodes(run: RunFiles) -> bool:
    """Return whether a run has episodes of several turns, by its settings or its metrics."""
    settings = any(run.setting(f"task.{name}") for name in ("env", "agent", "tools"))
    return settings or "episode/turns" in run.metrics.refresh().keys


def overview_live(request: Request) -> Response:
    """Return the part of the overview that changes while the run goes on, without its charts."""
    run = run_of(request).files
    return run_page(request, "overview_live.html", "overview", _live_facts(run))


def header(request: Request) -> Response:
    return run_page(request, "run_header.html", "", {})


def _live_facts(run: RunFiles) -> dict[str, Any]:
    metrics = run.metrics.refresh()
    alarms = []
    for key in metrics.keys:
        if is_broken := _rule_of(run, key):
            values = metrics.values(key)
            broken = [step for step, value in values.items() if is_broken(value)]
            is_on = bool(values) and is_broken(list(values.values())[-1])
            alarms.append({"name": key.partition("/")[2], "is_on": is_on, "broken": broken})
    figures = metrics.recent()
    return {
        "last": metrics.last, "figure": figures.get, "recent_steps": RECENT_STEPS, "alarms": alarms,
        "alarm_text": run.alarms,
        "time_left_s": run.time_left_s, "end_reason": run.end_reason,
        "pace_s": figures.get("time/step_s"), "broken_lines": metrics.broken_lines, "bound": run.bound,
    }  # fmt: skip


def _rule_of(run: RunFiles, key: str) -> Callable[[float], bool] | None:
    """Return whether a value of the metric `key` is an alarm, as a function; None: it is neither alarm nor signal."""
    kind, _, name = key.partition("/")
    if kind == "alarm":
        return lambda value: value > 0
    limit = run.setting(f"guard.{name}_limit") if kind == "guard" and name in SIGNALS else None
    if not isinstance(limit, int | float):  # such as guard/rule_correlation, which is no signal
        return None
    return (lambda value: value < limit) if SIGNALS[name].is_floor else (lambda value: value > limit)


def overlap(request: Request) -> Response:
    run = run_of(request).files
    last_step = run.metrics.refresh().last_step
    first = max(2, last_step - STEPS_SHOWN)
    window = request.query_params
    facts = {
        "first": window.get("from", first), "last": window.get("to", max(first, last_step - 1)),
        "follows": "from" not in window, "colors": STATE_COLORS,
    }  # fmt: skip
    return run_page(request, "overlap.html", "overlap", facts)


def staleness(request: Request) -> Response:
    run = run_of(request).files
    metrics = run.metrics.refresh()
    rows = []
    for name, title in (("trained", "trained on"), *((f"dropped_{r}", f"dropped: {r}") for r in DROP_REASONS)):
        number = metrics.last(f"buffer/{name}")
        means = {key: metrics.last(f"buffer/{name}/{key}") for key in ("response_tokens", "reward", "duration_s")}
        if number:
            rows.append({"title": title, "number": number, **means})
    facts = {"charts": staleness_charts(metrics.keys), "outcomes": rows}
    return run_page(request, "staleness.html", "staleness", facts)


def groups(request: Request) -> Response:
    """Return the page with the list of groups that meet the query's filters, or why there is no list."""
    run = run_of(request)
    query = {key: value.strip() for key, value in request.query_params.items() if value.strip()}
    facts: dict[str, Any] = {
        "query": query, "orders": ORDER_TITLES, "problem": "", "rows": [], "prompts": {}, "has_more": False,
        "choices": {}, "snippets": {}, "note": "", "page": 0, "next": "", "previous": "", "searches": True,
    }  # fmt: skip
    try:
        facts |= _found_groups(run, query)
    except JournalError as error:
        facts["problem"] = str(error)
    return run_page(request, "groups.html", "groups", facts)


def _found_groups(run: OpenRun, query: dict[str, str]) -> dict[str, Any]:
    filters = read_filters(query)
    order = query.get("order", "newest")
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    number = whole_number("page", query.get("page", "0"))
    found: Found | None = None
    index = run.index
    if "text" in query:
        found = index.search(query["text"])
    listed = run.files.journal.groups(filters, order, number, found.group_ids if found else None)
    tokens = run.files.journal.prompts([row["group_id"] for row in listed.rows])
    prompts = {group_id: question(run.texts, ids) for group_id, ids in tokens.items()}
    turn = {key: value for key, value in query.items() if key != "page"}
    return {
        "rows": listed.rows, "prompts": prompts, "has_more": listed.has_more, "page": number,
        "choices": run.files.journal.choices(),
        "snippets": found.snippets if found else {}, "note": found.note if found else index.missing,
        "searches": not index.missing, "next": urlencode({**turn, "page": number + 1}),
        "previous": urlencode({**turn, "page": number - 1}),
    }  # fmt: skip


def question(texts: TokenTexts, prompt: Sequence[int]) -> str | None:
    """Return the last message of a prompt, in which prompts differ, or all of its text if it holds no message."""
    messages = texts.messages(prompt)
    return messages[-1] if messages else texts.decode(prompt)


def read_filters(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the filters of the list of groups in an address's query: by name a number or a text.

    Raises:
        ConfigError: a value is not a number.
    """
    filters: dict[str, Any] = {key: whole_number(key, query[key]) for key in INTEGER_FILTERS if key in query}
    for key in NUMBER_FILTERS:
        if key in query:
            try:
                filters[key] = float(query[key])
            except ValueError:
                filters[key] = math.nan
            if not math.isfinite(filters[key]):
                raise ConfigError(f"{key} must be a number, got {query[key]!r}")
    return filters | {key: query[key] for key in TEXT_FILTERS if key in query}


def group(request: Request) -> Response:
    """Return the page of one group: its answers side by side, and one of them token by token."""
    run = run_of(request)
    group_id = whole_number("group", request.path_params["group_id"])
    row = run.files.journal.group(group_id)
    if row is None:
        missing = {"text": f"The journal has no group {group_id}.", "run": None}
        return page(request, "error.html", missing, 404)
    payload = run.files.journal.payload(group_id)
    siblings = [sibling(payload, i, run.texts) for i in range(len(payload.rows))] if payload else []
    answer = whole_number("answer", request.query_params.get("answer", "0"))
    color = request.query_params.get("color", "version")
    facts: dict[str, Any] = {
        "row": row, "siblings": siblings, "answer": min(answer, max(0, len(row["rows"]) - 1)),
        "coloring": color if color in COLORINGS else "version", "colorings": COLORINGS,
        "prompt": run.texts.decode(payload.prompt_tokens.tolist()) if payload else None,
        "question": question(run.texts, payload.prompt_tokens.tolist()) if payload else None,
        "prompt_ids": payload.prompt_tokens.tolist() if payload else [], "missing": run.texts.missing,
        "kept_steps": run.files.kept_steps,
    }  # fmt: skip
    return run_page(request, "group.html", "groups", facts)


ROUTES = [
    Route("/overview", overview),
    Route("/overview/live", overview_live),
    Route("/header", header),
    Route("/overlap", overlap),
    Route("/staleness", staleness),
    Route("/groups", groups),
    Route("/groups/{group_id}", group),
]
