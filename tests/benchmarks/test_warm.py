"""The server that cells of a sweep share, with a stand-in for SGLang."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import (
    Config,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    StalenessConfig,
    TaskConfig,
    TimeoutsConfig,
)
from async_rl.errors import AsyncRLError, ConfigError, ProcessDiedError, WaitTimeoutError
from benchmarks import warm
from benchmarks.cells import Cell, seed_axis, staleness_axis
from benchmarks.sweep import Sweep, run_sweep
from benchmarks.warm import WarmServer
from rollout_server.engines.base import Load
from tests.benchmarks.factories import base_yaml


class FakeEngine:
    """Fails to start, or dies, where it is told to."""

    def __init__(self, config: Config, number: int, failure: BaseException | None) -> None:
        self.config, self.url = config, f"http://fake:{number}"
        self.failure = failure
        self.is_dead = self.is_closed = False

    async def start(self) -> None:
        if isinstance(self.failure, TimeoutError):
            await asyncio.sleep(60)
        if self.failure:
            raise self.failure

    async def load(self) -> Load | None:
        return None if self.is_dead else Load(0, 8)

    async def aclose(self) -> None:
        self.is_closed = True
        if self.is_dead:
            raise ProcessDiedError("nobody there")


class Engines(list[FakeEngine]):
    """All that were opened."""

    failure: BaseException | None = None

    def open(self, config: Config, index: int, log_dir: Path) -> FakeEngine:
        self.append(FakeEngine(config, len(self), self.failure))
        return self[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr("rollout_server.engines.base.open_engine", engines.open)
    monkeypatch.setattr(warm, "_has_gpu", lambda: False)
    return engines


Open = Callable[..., WarmServer]


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Open]:
    """A WarmServer for the cells of the given configs. None may leave its thread behind."""
    opened: list[WarmServer] = []
    before = set(threading.enumerate())

    def of(*configs: Config) -> WarmServer:
        opened.append(WarmServer(configs, tmp_path / "logs"))
        return opened[-1]

    yield of
    for server in opened:
        server.close()
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.daemon]


def cell(bound: int = 0, response_tokens: int = 8, pin_cpus: bool = False, **timeouts: float) -> Config:
    return Config(
        model=ModelConfig(path="none"), task=TaskConfig(name="reasoning_gym/chain_sum"),
        rollout=RolloutConfig(max_response_tokens=response_tokens), staleness=StalenessConfig(max=bound),
        placement=PlacementConfig(pin_cpus=pin_cpus), timeouts=TimeoutsConfig(**timeouts),
    )


def test_cells_that_differ_in_the_bound_share_a_server_with_room_for_the_largest(
    engines: Engines, open_server: Open
) -> None:
    cells = [cell(0), cell(3), cell(1)]
    server = open_server(*cells)
    assert [server.url_for(config) for config in cells] == ["http://fake:0"] * 3
    assert [engine.config.staleness.max for engine in engines] == [3]


def test_a_cell_that_needs_another_server_gets_one_and_the_old_one_ends(engines: Engines, open_server: Open) -> None:
    short, long = cell(response_tokens=8), cell(response_tokens=16)
    server = open_server(short, long)
    assert [server.url_for(config) for config in (short, long, short)] == [f"http://fake:{i}" for i in range(3)]
    assert [engine.is_closed for engine in engines] == [True, True, False]
    assert [engine.config.rollout.max_response_tokens for engine in engines] == [8, 16, 8]


def test_cells_with_a_server_or_an_engine_of_their_own_get_none(engines: Engines, open_server: Open) -> None:
    config = cell()
    own = [
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **change))
        for change in ({"engine": "hf"}, {"server_url": "http://elsewhere:1"})
    ]
    assert [open_server(*own).url_for(config) for config in own] == ["", ""]
    assert not engines


def test_after_a_start_that_failed_the_next_cell_tries_again(engines: Engines, open_server: Open) -> None:
    server = open_server(cell())
    engines.failure = ProcessDiedError("SGLang ended by itself")
    with pytest.raises(ProcessDiedError, match="ended by itself"):
        server.url_for(cell())
    assert engines[0].is_closed
    engines.failure = None
    assert server.url_for(cell()) == "http://fake:1"


def test_after_close_the_next_cell_gets_a_new_server(engines: Engines, open_server: Open) -> None:
    """The sweep closes it after a cell that failed."""
    server = open_server(cell())
    server.url_for(cell())
    server.close()
    server.close()
    assert server.url_for(cell()) == "http://fake:1"
    assert engines[0].is_closed


def test_a_server_that_died_between_two_cells_is_replaced(engines: Engines, open_server: Open) -> None:
    server = open_server(cell())
    server.url_for(cell())
    engines[0].is_dead = True
    assert server.url_for(cell()) == "http://fake:1"


def test_an_unforeseen_failure_is_an_error_of_the_cell_and_names_its_cause(engines: Engines, open_server: Open) -> None:
    engines.failure = OSError("no file handles left")
    with pytest.raises(AsyncRLError, match=r"did not start: OSError\('no file handles left'\)"):
        open_server(cell()).url_for(cell())


def test_an_engine_that_can_not_even_be_opened_fails_at_once(
    engines: Engines, open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ImportError("sglang is not installed")

    monkeypatch.setattr("rollout_server.engines.base.open_engine", refuse)
    with pytest.raises(AsyncRLError, match="sglang is not installed"):
        open_server(cell()).url_for(cell())


def test_a_start_without_an_end_is_given_up_with_a_named_wait(
    engines: Engines, open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "MARGIN_S", 0.5)
    engines.failure = TimeoutError()
    config = cell(server_start_s=0.5)
    with pytest.raises(WaitTimeoutError, match="waited 1 s for its SGLang server to start"):
        open_server(config).url_for(config)
    assert engines[0].is_closed


def test_the_servers_thread_keeps_to_its_share_of_the_cores(
    engines: Engines, open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, four cores: the server comes first."""
    pinned: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: pinned.append((threading.current_thread().name, cores))
    )
    config = cell(pin_cpus=True)
    open_server(config).url_for(config)
    ((thread, cores),) = pinned
    assert cores == [4, 5]
    assert thread != threading.current_thread().name


def test_too_few_cores_are_refused_before_anything_starts(
    engines: Engines, open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    config = cell(pin_cpus=True)
    with pytest.raises(ConfigError, match=r"placement\.pin_cpus.*1 cores for 2 processes"):
        open_server(config).url_for(config)
    assert not engines


def test_a_sweep_on_too_few_cores_ends_at_once_with_the_reason_for_each_cell(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`taskset -c 0 async-rl sweep` of a config with placement.pin_cpus."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    cells: list[Cell] = []
    sweep = Sweep(
        config=str(base_yaml(tmp_path)), overrides=("placement.pin_cpus=true",), folder=tmp_path / "sweep",
        axes=(staleness_axis("0,1"), seed_axis(1, 0)),
    )
    progress = run_sweep(sweep, lambda sweep, cell, url: cells.append(cell) or "")
    assert sorted(progress.failed) == ["staleness-0.seed-0", "staleness-1.seed-0"]
    assert all("1 cores for 2 processes" in error for error in progress.failed.values())
    assert cells == []
