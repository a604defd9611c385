"""What each tracker, wandb, trackio and TensorBoard, does for a run, and that none can end one."""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.base.telemetry.examples import ExampleTable
from async_rl.base.telemetry.trackers import (
    TensorboardRun,
    Tracker,
    TrackioRun,
    WandbRun,
    choose_mode,
    is_reachable,
    open_tensorboard_run,
    open_trackio_run,
    open_wandb_run,
)
from tests.kit.configs import make_config

OPEN = {"wandb": open_wandb_run, "trackio": open_trackio_run, "tensorboard": open_tensorboard_run}
ALL_OFF = {"wandb": "disabled", "trackio": False, "tensorboard": False}
ON = {"wandb": "offline", "trackio": True, "tensorboard": True}
each_tracker = pytest.mark.parametrize("name", OPEN)


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def logging(name: str) -> dict[str, Any]:
    return ALL_OFF | {name: ON[name]}


@each_tracker
def test_a_library_is_not_imported_when_it_is_off(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    config = make_config(logging=ALL_OFF | {"wandb": "auto"})
    assert OPEN[name](config, tmp_path, pytest.fail) is None
    assert not list(tmp_path.iterdir())


@each_tracker
def test_without_the_library_the_run_goes_on_and_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    notes: list[str] = []
    assert OPEN[name](make_config(logging=logging(name)), tmp_path, notes.append) is None
    (note,) = notes
    assert note.startswith(f"{name}: off") and "pip install" in note


@each_tracker
def test_a_failure_is_noted_once_and_turns_the_tracker_off(name: str) -> None:
    notes: list[str] = []

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    library = SimpleNamespace(log=fail, add_scalar=fail, finish=pytest.fail, close=pytest.fail)
    run: Tracker = {
        "wandb": lambda: WandbRun(library, notes.append, ExampleTable("none")),
        "trackio": lambda: TrackioRun(library, notes.append),
        "tensorboard": lambda: TensorboardRun(lambda: library, notes.append),
    }[name]()
    run.begin_lineage()
    for step in (1, 2):
        run.log({"step": step, "reward/mean": 1.0})  # type: ignore[attr-defined]
    run.close()
    (note,) = notes
    assert note.startswith(f"{name}: off") and "disk full" in note


@pytest.mark.parametrize(("name", "identity"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_goes_on_as_the_same_run_and_another_of_its_name_does_not(
    name: str, identity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    library = SimpleNamespace(__spec__=object(), Settings=dict, init=lambda **options: opened.append(options) or run)
    monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    for folder in ("one", "one", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        OPEN[name](make_config(logging=logging(name)), tmp_path / folder, pytest.fail)
    first, resumed, other = (options[identity] for options in opened)
    assert first == resumed != other
    assert all(options["resume"] == "allow" for options in opened)


def test_without_an_account_wandb_is_off_in_auto_and_offline_if_asked_for() -> None:
    assert choose_mode("auto") == ("disabled", "")
    mode, why = choose_mode("online")
    assert mode == "offline" and "wandb login" in why


def test_with_a_key_but_no_network_wandb_goes_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        assert choose_mode("auto") == ("online", "")
    mode, why = choose_mode("auto")
    assert mode == "offline" and address in why


def test_a_name_that_does_not_resolve_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_enough = threading.Event()

    def look_up(*arguments: object) -> None:
        asked_enough.wait(60)
        raise OSError("no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert not is_reachable("https://api.wandb.ai", timeout_s=0.05)
    asked_enough.set()
