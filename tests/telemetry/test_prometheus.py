"""What Prometheus gets when it scrapes a run."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.metrics_logger import MetricsLogger
from async_rl.base.telemetry.prometheus import open_prometheus
from tests.kit.configs import make_config


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def logger_of(config: Config, folder: Path) -> Iterator[MetricsLogger]:
    logger = MetricsLogger(config, folder)
    try:
        yield logger
    finally:
        logger.close()


def scraped(port: int) -> dict[str, tuple[float, str]]:
    """Scrape a run: (value, type) of each sample without a bucket's label, by name. All have the label of the run."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    samples = [(sample, family.type) for family in families for sample in family.samples if "le" not in sample.labels]
    assert {sample.labels["rl_run_id"] for sample, _ in samples} == {"a"}
    assert len({family.name for family in families}) == len(families)
    return {sample.name: (sample.value, kind) for sample, kind in samples}


def with_port(port: int, **network: Any) -> Config:
    return make_config(run={"name": "a"}, logging={"wandb": "disabled", "prometheus": port}, network=network)


def test_a_scrape_gets_gauges_counters_and_histograms_by_their_names(tmp_path: Path) -> None:
    port = free_port()
    with logger_of(with_port(port), tmp_path) as logger:
        declared = [
            Metric("push/bytes", 0.0, "sum"), Metric("batch/response_tokens", 0.0, "sum"), Metric("time/step_s", 0.0),
            Metric("staleness/mean", 0.0),
        ]
        logger.reduce(declared)
        for step, staleness, broken in ((1, 0.5, 1.0), (2, 1.5, math.nan)):
            logger.log(step, {
                "push/bytes": 100.0, "push/bytes_total": 3.0, "batch/response_tokens": 8.0, "time/step_s": 2.0,
                "staleness/masked_fraction": 0.25, "staleness/mean": staleness, "broken": broken,
                "by_staleness/0/reward": 0.25, "by_staleness/0_reward": 0.75,
            })  # fmt: skip
        logger.log_eval(1, {"eval/reward": 0.5})
        found = scraped(port)
    assert found["async_rl_staleness_mean"] == (1.5, "gauge")
    assert found["async_rl_push_bytes_total"] == (200.0, "counter")
    assert found["rl_train_tokens_total"] == (12.0, "counter") and found["async_rl_step"] == (2.0, "gauge")
    assert found["rl_train_steps_total"] == (2.0, "counter")
    assert found["rl_loop_duration_seconds_sum"] == (4.0, "histogram")
    assert found["rl_environment_reward_mean"] == (0.5, "gauge") and found["rl_run_info"][0] == 1.0
    assert found["async_rl_by_staleness_0_reward"][0] in (0.25, 0.75) and "async_rl_broken" not in found
    with pytest.raises(OSError):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_the_server_ends_with_the_run_although_a_record_has_failed() -> None:
    port = free_port()
    exporter = open_prometheus(with_port(port), {}, print)
    assert exporter is not None
    exporter.log({"a": "no number"})  # type: ignore[dict-item]
    scraped(port)
    exporter.close()
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_that_is_taken_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        with logger_of(with_port(port), tmp_path) as logger:
            logger.log(1, {"reward/mean": 0.5})
    said = capsys.readouterr().out
    assert f"prometheus: off, port {port}" in said and "reward 0.500" in said


def test_the_port_is_on_network_host_and_must_be_one(tmp_path: Path) -> None:
    port = free_port()
    with logger_of(with_port(port, host="127.0.0.2"), tmp_path) as logger:
        logger.log(1, {"reward/mean": 0.5})
        with pytest.raises(OSError):
            scraped(port)
    with pytest.raises(ConfigError, match=r"logging\.prometheus"):
        with_port(70_000)
