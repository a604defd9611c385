"""Reduction, metrics.jsonl, the console line, the learning curve, and wandb."""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.telemetry import wandb_run
from async_rl.telemetry.examples import ExampleTable
from async_rl.telemetry.metrics import Metric, MetricsLogger, format_step, read_metrics, reduce_metrics
from async_rl.telemetry.plot_learning_curve import plot_learning_curve, smooth
from async_rl.telemetry.wandb_run import choose_mode, is_logged_in, is_reachable, open_wandb_run
from tests.kit.configs import changed, make_config

CONFIG = make_config(run={"steps": 20}, logging={"wandb": "disabled"})


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def test_each_reduction_gives_its_value() -> None:
    metrics = [
        *(Metric("mean", v, "mean", w) for v, w in ((1.0, 3.0), (5.0, 1.0))),
        *(Metric(name, v, name) for name in ("sum", "max", "min", "last") for v in (2.0, 7.0, 4.0)),  # type: ignore[arg-type]
    ]
    assert reduce_metrics(metrics) == {"mean": 2.0, "sum": 13.0, "max": 7.0, "min": 2.0, "last": 4.0}


def test_a_mean_of_nothing_has_no_value() -> None:
    assert reduce_metrics([Metric("a", 3.0, "mean", 0.0)]) == {}


def test_a_key_with_two_reductions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' has two reductions: mean, sum"):
        reduce_metrics([Metric("a", 1.0), Metric("a", 1.0, "sum")])


def test_the_console_line_shows_what_was_measured_and_nothing_else() -> None:
    values = {"reward/mean": 0.51234, "staleness/mean": 0.75, "staleness/max": 2.0, "time/step_s": 1.25}
    assert format_step(7, 120, values) == "step   7/120  reward 0.512  staleness 0.75 max 2  1.25 s"


def test_each_step_is_written_at_once_as_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(CONFIG, tmp_path / "new" / "run")
    logger.log(1, {"reward/mean": 0.5, "loss/policy": math.nan})
    (line,) = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step"], record["reward/mean"], record["loss/policy"]) == (1, 0.5, None)
    logger.note("a [note] with [brackets]")
    logger.close()
    logger.close()
    assert capsys.readouterr().out.splitlines() == ["step  1/20  reward 0.500", "a [note] with [brackets]"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.5, 0.5, 1.0, 0.0), "held-out accuracy 0.500  held-out reward 0.500"),
        (
            (0.25, 0.7, 1.3, 0.5),
            "held-out accuracy 0.250  held-out reward 0.700  "
            "(right answers have 1.300, wrong answers have 0.500 in the mean)",
        ),
        (
            (0.0, 0.4, None, 0.4),
            "held-out accuracy 0.000  held-out reward 0.400  (wrong answers have 0.400 in the mean)",
        ),
    ],
)
def test_the_console_says_why_held_out_accuracy_and_reward_differ(values: tuple[float | None, ...], text: str) -> None:
    keys = ("accuracy", "reward", "reward_of_right", "reward_of_wrong")
    found = {f"eval/{key}": value for key, value in zip(keys, values, strict=True) if value is not None}
    assert format_step(3, 20, found) == f"step  3/20  {text}"


def test_a_late_evaluation_is_merged_into_its_step_when_read(tmp_path: Path) -> None:
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(1, {"reward/mean": 0.1})
    logger.log(2, {"reward/mean": 0.2})
    logger.log_eval(1, {"eval/accuracy": 0.9})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # the process died here
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["reward/mean"], first["eval/accuracy"]) == (0.1, 0.9)
    assert (second["step"], second["reward/mean"]) == (2, 0.2)


def test_a_terminal_gets_a_bar_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(
        write=(written := []).append, flush=lambda: None, isatty=lambda: True, encoding="utf-8",
    ))  # fmt: skip
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(5, {"reward/mean": 0.5})
    logger.close()
    text = "".join(written)
    assert "reward 0.500" in text
    assert "5/20" in text and "time left" in text


def test_smoothing_starts_without_bias_and_follows_a_constant() -> None:
    assert smooth([3.0, 3.0, 3.0], [1.0, 5.0, 0.1], span=5) == pytest.approx([3.0, 3.0, 3.0])
    # span 3: weights 1/2 on the newest, 1/4 on the one before, normalised by 3/4
    assert smooth([0.0, 3.0], [1.0, 1.0], span=3) == pytest.approx([0.0, 2.0])
    assert smooth([0.0, 3.0], [4.0, 1.0], span=3) == pytest.approx([0.0, 1.0])  # the long step counts more


def test_a_learning_curve_is_drawn_from_the_file_alone(tmp_path: Path) -> None:
    assert write_and_draw(tmp_path, []) is None
    few = [{"step": 0, "eval/accuracy": 0.2}, {"step": 1, "reward/mean": 0.3}]
    many = [
        {"step": i, "reward/mean": i / 30, "staleness/mean": None, "staleness/max": 1.0} for i in range(1, 31)
    ]
    for records in (few, many):
        path = write_and_draw(tmp_path, records)
        assert path is not None
        assert path.read_bytes().startswith(b"\x89PNG")


def write_and_draw(run_dir: Path, records: list[dict[str, float | None]]) -> Path | None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return plot_learning_curve(run_dir)


@pytest.mark.usefixtures("no_account")
def test_without_an_account_wandb_is_off_in_auto_and_offline_if_asked_for() -> None:
    assert choose_mode("auto") == ("disabled", "")
    mode, why = choose_mode("online")
    assert mode == "offline"
    assert "wandb login" in why


@pytest.mark.usefixtures("no_account")
def test_wandb_is_not_imported_when_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    assert open_wandb_run(changed(CONFIG, logging={"wandb": "auto"}), tmp_path, pytest.fail) is None


@pytest.mark.usefixtures("no_account")
def test_with_a_key_but_no_network_wandb_goes_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        assert choose_mode("auto") == ("online", "")
    mode, why = choose_mode("auto")
    assert mode == "offline"
    assert "can't be reached" in why


def test_a_name_that_does_not_resolve_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_enough = threading.Event()

    def look_up(*arguments: object) -> None:
        asked_enough.wait(60)
        raise OSError("no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert not is_reachable("https://api.wandb.ai", timeout_s=0.05)
    asked_enough.set()


@pytest.mark.usefixtures("no_account")
def test_a_login_in_netrc_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert is_logged_in()


@pytest.mark.usefixtures("no_account")
def test_wandb_gets_the_same_keys_over_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    axes: list[tuple[str, str, str]] = []
    summary: dict[str, float] = {}
    run = SimpleNamespace(
        log=logged.append, finish=lambda: None, summary=summary,
        define_metric=lambda name, step_metric, summary: axes.append((name, step_metric, summary)),
    )
    options: dict[str, Any] = {}
    fake = SimpleNamespace(
        init=lambda **kwargs: options.update(kwargs) or run, Settings=lambda **kwargs: kwargs
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(wandb_run.importlib.util, "find_spec", lambda name: object())
    logger = MetricsLogger(changed(CONFIG, logging={"wandb": "offline"}), tmp_path)
    logger.log(1, {"reward/mean": 0.5})
    logger.close()
    assert options["mode"] == "offline"
    assert options["config"]["staleness"]["max"] == 0
    assert logged == read_metrics(tmp_path / "metrics.jsonl")
    assert axes == [("*", "step", "none")] and logged[0]["step"] == 1
    assert summary["reward/mean"] == 0.5
    first = options["id"]
    MetricsLogger(changed(CONFIG, logging={"wandb": "offline"}), tmp_path).close()
    assert options["id"] == first and options["resume"] == "allow"  # a resumed run is the same run


def test_a_failure_of_wandb_is_noted_once_and_turns_it_off(tmp_path: Path) -> None:
    notes: list[str] = []

    def fail(record: object) -> None:
        raise OSError("disk full")

    run = wandb_run.WandbRun(SimpleNamespace(log=fail, finish=pytest.fail), notes.append, ExampleTable("none"))
    run.log({"step": 1})
    run.log({"step": 2})
    run.close()
    assert notes == ["wandb: off from here on, the run goes on: OSError: disk full"]
