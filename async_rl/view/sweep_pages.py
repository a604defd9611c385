"""The page of a sweep: its cells as they arrive, any metric over any axis, and cells side by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.errors import AsyncRLError
from async_rl.sweeps.cells import SEED
from async_rl.sweeps.report import LEARNING, REWARD_NOTE, TRADE_OFF, WORTH_NOTE, seconds_compared, shown_columns
from async_rl.sweeps.settings import Setting, efficiency_unknown
from async_rl.sweeps.significance import SPEEDS, not_evaluated
from async_rl.view.live import event_stream
from async_rl.view.pages import json_finite, library_of, page
from async_rl.view.sweep_files import TITLES, SweepFiles

SHOWN = ("efficiency", "efficiency_sampled", "improvement", "learner", *SPEEDS, "ess", "kl")
"""The charts of the trade-off are those of the first NUM_SHOWN that were measured: what a step is worth, how busy the
learner is, what a minute brings. Sweeps in exact mode measure no times."""
NUM_SHOWN = 3
COLUMNS = ("accuracy_end", "learner", "rollout", "ess", "staleness_mean", "steps_per_minute")
FORMS = {key: form for key, (_, form) in {**TRADE_OFF, **LEARNING}.items()}
MAX_COMPARED = 6
COMPARED_KEYS = ("reward/mean", "eval/accuracy", "staleness/mean", "utilisation/learner", "offpolicy/ess")


class NoSweepError(AsyncRLError):
    """The page of a sweep is asked for, but the server shows a single run."""


def _sweep(request: Request) -> SweepFiles:
    found = library_of(request).sweep
    if found is None:
        raise NoSweepError(f"{library_of(request).folder} is a single run and not a sweep.")
    return found


def sweep(request: Request) -> Response:
    return page(request, "sweep.html", _facts(request))


def cells(request: Request) -> Response:
    """Return the sweep's table of cells alone; the open page asks for it when the state of a cell has changed."""
    return page(request, "sweep_cells.html", _facts(request))


def _facts(request: Request) -> dict[str, Any]:
    found = _sweep(request)
    listed = found.cells()
    measured = {key for cell in listed for key in cell.values}
    axes = found.axes(listed)
    rows = found.rows()
    columns = shown_columns(rows) if rows else TRADE_OFF
    metrics = [(key, title) for key, title in TITLES.items() if key in measured]
    shown = [key for key in SHOWN if key in measured and key in columns][:NUM_SHOWN]
    keys = found.metric_keys()
    return {
        "run": None, "cells": listed, "axes": axes, "plot_axes": [a for a in axes if a != SEED] or axes,
        "metrics": metrics, "keys": keys, "columns": [c for c in COLUMNS if c in measured],
        "titles": TITLES, "forms": FORMS, "plan": found.plan,
        "shown": shown, "offered": " ".join([*shown, str(len(metrics)), str(len(axes)), str(bool(keys))]),
        "notes": _notes(rows, measured),
        "problem": found.problem, "compared": request.query_params.getlist("cell")[:MAX_COMPARED],
        "compared_keys": COMPARED_KEYS, "finished": sum(cell.state == "finished" for cell in listed),
    }  # fmt: skip


def _notes(rows: Sequence[Setting], measured: Collection[str]) -> list[str]:
    notes = [WORTH_NOTE] * ("efficiency" in measured) + [REWARD_NOTE] * ("policy_reward" in measured)
    return [*notes, *efficiency_unknown(rows), *filter(None, [not_evaluated(rows), seconds_compared(rows)])]


def points(request: Request) -> Response:
    """Return as JSON the lines of a plot of `metric` over `axis`, both from the query; see SweepFiles.points."""
    metric, axis = request.query_params.get("metric", ""), request.query_params.get("axis", "")
    lines = _sweep(request).points(metric, axis)
    found = {"lines": lines, "title": TITLES.get(metric, metric), "axis": axis}
    return Response(json_finite(found), media_type="application/json", headers={"Cache-Control": "no-store"})


async def events(request: Request) -> Response:
    return event_stream(request, _sweep(request).revision)


ROUTES = [
    Route("/sweep", sweep),
    Route("/sweep/cells", cells),
    Route("/sweep/data/points", points),
    Route("/sweep/events", events),
]
