"""The prediction on the page: one thread simulates, once for each state of a run's metrics, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_rl.view import prediction, run_data
from async_rl.view.run_files import RunFiles
from tests.kit.view.client import Client
from tests.kit.view.run_dirs import append_step, make_run

LIMIT_S = 60.0


class Simulations:
    """Counts simulations, and holds each until `go_on` is set."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.number = self.at_once = self.most_at_once = 0

    def run(self, run: RunFiles) -> None:
        self.number += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.began.release()
        assert self.go_on.wait(LIMIT_S)
        self.at_once -= 1


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulations]:
    found = Simulations()
    monkeypatch.setattr(prediction, "predict", found.run)
    yield found
    found.go_on.set()


def ask(client: Client) -> object:
    return client.get("/run/data/prediction").json()


def test_many_who_ask_at_once_share_one_simulation(run_dir: Path, simulations: Simulations) -> None:
    client = Client(run_dir)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, client) for _ in range(8)]
        assert simulations.began.acquire(timeout=LIMIT_S)
        assert client.get("/run/overview").status_code == 200  # other pages are shown meanwhile
        simulations.go_on.set()
        assert [answer.result(LIMIT_S) for answer in answers] == [None] * 8
    assert simulations.number == 1


def test_a_run_is_simulated_again_only_after_its_files_have_changed(run_dir: Path, simulations: Simulations) -> None:
    simulations.go_on.set()
    client = Client(run_dir)
    assert [ask(client), ask(client), simulations.number] == [None, None, 1]
    append_step(run_dir, 13)
    assert [ask(client), ask(client), simulations.number] == [None, None, 2]


def test_a_simulation_that_takes_long_is_answered_as_pending(
    run_dir: Path, simulations: Simulations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "PREDICTION_LIMIT_S", 0.01)
    client = Client(run_dir)
    assert ask(client) == ask(client) == {"pending": True}
    simulations.go_on.set()
    monkeypatch.setattr(run_data, "PREDICTION_LIMIT_S", LIMIT_S)
    assert (ask(client), simulations.number) == (None, 1)


def test_runs_of_one_server_are_simulated_one_after_the_other(tmp_path: Path, simulations: Simulations) -> None:
    turn = threading.Lock()
    runs = [RunFiles(make_run(tmp_path / name)) for name in ("a", "b", "c")]
    found = [prediction.Predictor(run, turn).ask() for run in runs]
    simulations.go_on.set()
    assert [each.result(LIMIT_S) for each in found] == [None] * 3
    assert (simulations.number, simulations.most_at_once) == (3, 1)


def test_a_fault_of_the_simulator_reaches_whoever_asked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: RunFiles) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(prediction, "predict", broken)
    assert Client(run_dir).get("/run/data/prediction", raises=False).status_code == 500
