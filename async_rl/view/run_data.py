"""The data of a run's pages, as JSON: series of metrics, the states of each pool over time, answers, and changes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.storage.log_ratios import read_log_ratios
from async_rl.view.answers import answer_columns
from async_rl.view.charts import staleness_buckets
from async_rl.view.live import event_stream
from async_rl.view.pages import json_finite, run_of, whole_number
from async_rl.view.run_files import RunFiles

MAX_KEYS = 60
"""The most metrics of one request; the page divides its own among several (static/charts.js)."""
MAX_STEPS_SHOWN = 200
MAX_HISTOGRAM_STEPS = 200
PREDICTION_LIMIT_S = 20.0
"""The longest time that a request waits for the simulator."""


class NotKeptError(AsyncRLError):
    """The page asked for an answer that does not exist, or whose tokens are not in the run directory (any more)."""


def _json(value: Any) -> Response:
    return Response(json_finite(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def series(request: Request) -> Response:
    """Return the values of the metrics that the query names by `key`, and the keys of all.

    They are those behind line `after` of metrics.jsonl. `lines` is the `after` that asks for what is written later.

    Raises:
        ConfigError: the query names more than MAX_KEYS metrics.
    """
    keys = request.query_params.getlist("key")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"key must be given at most {MAX_KEYS} times, got {len(keys)} keys: ask for them in parts")
    after = whole_number("after", request.query_params.get("after", "0"))
    metrics = run_of(request).files.metrics.refresh()
    read = {"generation": metrics.generation, "lines": metrics.lines}  # of what came meanwhile the page hears again
    found = {"last_step": metrics.last_step, "keys": metrics.keys, "series": metrics.series(keys, after)}
    return _json(read | found)


def window(request: Request) -> Response:
    """Return each pool's states over time, from step `from` to `to` of the query, at most MAX_STEPS_SHOWN steps."""
    run = run_of(request).files
    first, last = int(_number(request, "from", 1)), int(_number(request, "to", 10))
    if not 1 <= first <= last:
        raise ConfigError(f"from and to must be steps, from 1 on and in this order, got from={first}, to={last}")
    number_of_first = first_step_of_timeline(run)
    found = run.timeline.refresh().window(first, min(last, first + MAX_STEPS_SHOWN - 1), number_of_first)
    if found is None:
        ends_s = run.timeline.step_ends_s()
        known = (
            f"it has the steps {number_of_first} to {number_of_first + len(ends_s) - 1}" if ends_s else "it is empty"
        )
        raise ConfigError(f"{run.folder / 'timeline.json'} has nothing of the steps {first} to {last}: {known} so far.")
    return _json(asdict(found))


def first_step_of_timeline(run: RunFiles) -> int:
    """Return the number of the first step in timeline.json, a file that each resume starts from empty."""
    since_s = run.metrics.refresh().values("time/since_first_step_s")
    return int(max((step for step, value in since_s.items() if value == 0.0), default=1))


async def prediction(request: Request) -> Response:
    """Return measured beside predicted utilisation and staleness, or null if the simulator can't predict this run.

    A simulation that takes longer than PREDICTION_LIMIT_S is answered with `pending`; the page then asks again.
    """
    computing = await run_in_threadpool(run_of(request).predictor.ask)
    try:
        async with asyncio.timeout(PREDICTION_LIMIT_S):
            found = await asyncio.shield(asyncio.wrap_future(computing))  # others may wait for it too
    except TimeoutError:
        return _json({"pending": True})
    if found is None or found.predicted is None:
        return _json(None)
    return _json(
        {
            "learner": [found.learner, found.predicted.utilisation],
            "rollout": [found.rollout, found.predicted.rollout],
            "staleness": [found.staleness_mean, found.predicted.mean_staleness], "bound": found.bound,
        }
    )  # fmt: skip


def histogram(request: Request) -> Response:
    """Return the number of trained episodes by staleness and step; of a long run, by stretches of several steps."""
    metrics = run_of(request).files.metrics.refresh()
    buckets = staleness_buckets(metrics.keys)
    counts = {bucket: metrics.values(f"staleness/episodes_{bucket}") for bucket in buckets}
    steps = sorted({step for of_bucket in counts.values() for step in of_bucket})
    stride = max(1, math.ceil(len(steps) / MAX_HISTOGRAM_STEPS))
    parts = [steps[at : at + stride] for at in range(0, len(steps), stride)]
    shares = {
        str(bucket): [sum(of_bucket.get(step, 0.0) for step in part) for part in parts]
        for bucket, of_bucket in counts.items()
    }
    return _json({"first": [part[0] for part in parts], "last": [part[-1] for part in parts], "episodes": shares})


def answer(request: Request) -> Response:
    """Return the tokens of one answer, in the columns of `answer_columns`.

    Raises:
        NotKeptError: the answer does not exist, or the run directory does not hold its tokens (any more).
    """
    run = run_of(request)
    group_id = whole_number("group", request.path_params["group_id"])
    number = whole_number("answer", request.path_params["number"])
    row, payload = run.files.journal.group(group_id), run.files.journal.payload(group_id)
    if row is None or payload is None or number >= len(payload.rows):
        raise NotKeptError(f"The tokens of answer {number} of group {group_id} are not kept in this run directory.")
    trained_at = row["steps"][-1] - 1 if row["steps"] else None
    ratios = read_log_ratios(run.files.folder, row["steps"][-1], group_id, number) if row["steps"] else None
    return _json(answer_columns(payload, number, run.texts, trained_at, ratios))


async def events(request: Request) -> Response:
    return event_stream(request, run_of(request).files.revision)


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a number, got {text!r}")
    return value


ROUTES = [
    Route("/data/series", series),
    Route("/data/window", window),
    Route("/data/prediction", prediction),
    Route("/data/histogram", histogram),
    Route("/data/answers/{group_id}/{number}", answer),
    Route("/events", events),
]
