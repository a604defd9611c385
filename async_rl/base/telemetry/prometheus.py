"""Serves the metrics of a run to Prometheus.

Names are those that the OpenTelemetry project discusses for RL (`rl.*`), where one fits, as Prometheus spells them. Any
other metric is async_rl_ with its key, as in async_rl_staleness_mean for `staleness/mean`. A metric that is declared as
a sum over steps is a counter, any other a gauge with its last value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from async_rl.base.config import Config
from async_rl.base.seams.lookup import lacking
from async_rl.base.telemetry.metrics import EPISODES, PLAIN, TIME, TOKENS, Declaration, trained_tokens
from async_rl.base.telemetry.trackers import Tracker

DURATIONS = {TIME: "rl_loop_duration", "time/train_s": "rl_train_duration", "time/sync_s": "rl_sync_duration"}
"""For each metric that is a histogram, its name; the unit, seconds, is added to it."""
COUNTERS = {EPISODES: "rl_sample_episodes", TOKENS: "rl_train_tokens"}
GAUGES = {"eval/reward": "rl_environment_reward_mean"}
STEPS = "rl_train_steps"
BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
RUN_ID = "rl_run_id"
"""The label of every sample: run.name."""


def open_prometheus(
    config: Config, declared: Mapping[str, Declaration], note: Callable[[str], None]
) -> PrometheusExporter | None:
    """Listen on port logging.prometheus of network.host, or return None if it is 0 or can't be used.

    Args:
        declared: the declarations of the metrics by key. It may grow later.
        note: called with the reason if the metrics can't be served.
    """
    if not (port := config.logging.prometheus):
        return None
    if text := lacking("prometheus"):
        note(f"prometheus: off, it {text}")
        return None
    exporter = PrometheusExporter(config, declared, note)
    try:
        exporter.listen(config.network.host, port)
    except OSError as error:
        note(f"prometheus: off, port {port} of {config.network.host} can't be used: {error.strerror}")
        return None
    note(f"prometheus: metrics at http://{config.network.host}:{port}/metrics")
    return exporter


class PrometheusExporter(Tracker):
    """Collects the metrics of a run, and answers scrapes in a thread of its own. See `open_prometheus`."""

    library = "prometheus"

    def __init__(self, config: Config, declared: Mapping[str, Declaration], note: Callable[[str], None]) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        super().__init__(None, note)
        task = config.task
        self._declared = declared
        self._run_id = config.run.name
        self._about = {
            RUN_ID: config.run.name, "rl_system": "async-rl", "rl_model_name": config.model.path,
            "rl_algorithm": config.algorithm.preset or config.algorithm.advantage,
            "rl_environment_name":
                task.name or ", ".join(each.path for each in task.train_data) or task.env or task.agent,
        }  # fmt: skip
        self._registry = CollectorRegistry()
        self._durations = {
            key: Histogram(
                name, key, [RUN_ID], unit="seconds", buckets=BUCKETS_S, registry=self._registry
            ).labels(self._run_id)
            for key, name in DURATIONS.items()
        }  # fmt: skip
        self._registry.register(self)
        self._last: dict[str, float] = {}
        """The last value of each metric that is a gauge, by key."""
        self._totals: dict[str, float] = {}
        """The sum of each metric that is a counter, by key, since this process has started."""

    def listen(self, host: str, port: int) -> None:
        """Start to answer scrapes. Raises OSError if the port can't be used."""
        from prometheus_client import start_http_server

        self._run, self._thread = start_http_server(port, host, self._registry)

    def log(self, record: Mapping[str, float]) -> None:
        """Take in a record. A value that is not finite is left out, and removes the metric's last value."""
        self._attempt(lambda: self._add(record))

    def close(self) -> None:
        """Stop the server. The last values can't be scraped any more."""
        for end in (self._run.shutdown, self._run.server_close):
            with suppress(Exception):
                end()

    def _add(self, record: Mapping[str, float]) -> None:
        totals, last = dict(self._totals), dict(self._last)  # a scrape reads the old ones meanwhile
        values = {key: value for key, value in record.items() if math.isfinite(value)}
        for key in record.keys() - values.keys():
            last.pop(key, None)
        if "time/written_at_s" in values:
            totals[STEPS] = totals.get(STEPS, 0.0) + 1
        else:
            values.pop("step", None)  # of an evaluation or a late metric, whose step may be an older one
        if TOKENS in values:
            values[TOKENS] = trained_tokens(values)
        for key, value in values.items():
            if key in self._durations:
                self._durations[key].observe(value)
            elif key in COUNTERS or self._declared.get(key, PLAIN).over_steps == "sum":
                totals[key] = totals.get(key, 0.0) + value
            else:
                last[key] = value
        self._totals, self._last = totals, last

    def collect(self) -> Iterator[Any]:
        """Yield the families of samples for a scrape, except the histograms."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("rl_run", "The run.", self._about)
        taken = set[str]()  # two families of one name make a scrape fail
        for values, known, family in (
            (self._totals, {**COUNTERS, STEPS: STEPS}, CounterMetricFamily), (self._last, GAUGES, GaugeMetricFamily)
        ):  # fmt: skip
            for key, value in values.items():
                name = known.get(key) or prometheus_name(key)
                names = {name}
                if family is CounterMetricFamily:  # its sample has the name with _total
                    name = name.removesuffix("_total")
                    names = {name, f"{name}_total"}
                if not names & taken:
                    taken |= names
                    samples = family(name, _help(key, self._declared.get(key, PLAIN)), labels=[RUN_ID])
                    samples.add_metric([self._run_id], value)
                    yield samples


def prometheus_name(key: str) -> str:
    """Return the name of a metric that has no proposed one: async_rl_loss_kl for `loss/kl`."""
    return "async_rl_" + re.sub(r"\W+", "_", key, flags=re.ASCII)


def _help(key: str, declared: Declaration) -> str:
    return f"{key} ({declared.unit})" if declared.unit else key
