"""A run decides what its configuration leaves open, and sends both to its processes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl import pipeline
from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.run_dir.checkpoints import checkpoint_folder
from async_rl.base.run_dir.watch_events import WatchEvent, add_event
from async_rl.run.processes import actor_group
from async_rl.run.processes.actors import Origin, enter
from async_rl.run.processes.placement import Host, host_demands
from async_rl.run.processes.reservation import Reservation
from tests.kit.configs import changed, make_config
from tests.kit.runs import make_checkpoint

HOST = Host(name="h", cpus=8.0, gpus=0.0)


class Stopped(Exception):
    """Ends a run where its processes would start."""


@pytest.fixture
def origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Origin]:
    """What the processes of runs would get, which end there."""
    found: list[Origin] = []

    def started(run_dir: Path, reservation: Reservation, signals: object, origin: Origin) -> None:
        assert (run_dir / "keys").is_dir()
        if not origin.config.run.resume:  # else it is written with the first step
            assert load_config(run_dir / "config.yaml").network == origin.config.network
        found.append(origin)
        raise Stopped

    def nothing(*_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    monkeypatch.setattr(pipeline, "check_names", lambda config: None)
    monkeypatch.setattr(pipeline, "check_inputs", lambda config: [])
    monkeypatch.setattr(pipeline, "open_ray", nothing)
    monkeypatch.setattr(pipeline, "ray_messages_in", nothing)
    monkeypatch.setattr(pipeline, "reserve", lambda config, _: Reservation(config, host_demands(config, 0), [HOST]))
    monkeypatch.setattr(actor_group, "ActorGroup", started)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "WANDB_MODE": "disabled"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return found


def run(config: Config, origins: list[Origin]) -> Origin:
    with pytest.raises(Stopped):
        pipeline.run(config)
    return origins.pop()


def test_each_process_has_the_users_config_and_makes_its_settings_of_it(
    origins: list[Origin], tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()  # another run has the name
    network, placement = {"ports": "20000-20023"}, {"rollout": {"servers": 2}}
    config = make_config(run={"dir": tmp_path, "name": "r"}, network=network, placement=placement)
    origin = run(config, origins)
    assert origin.config is config
    whole = resolve(config, origin.decided)
    assert whole.run_dir == tmp_path / "r-2"
    assert whole.weight_sync.transport != "auto"
    assert whole.network.keys == str(tmp_path / "r-2" / "keys")
    left = changed(whole, run=config.run, weight_sync=config.weight_sync, network=config.network)
    assert left == config
    parts = {"buffer": "20000-20011", "learner/0": "20000-20011", "rollout/1": "20018-20023"}
    for name, ports in parts.items():
        assert enter(origin, name) == changed(whole, network={"ports": ports})
    assert enter(origin, "buffer", 20007).network.port == 20007


def test_servers_of_different_engines_have_their_own_as_the_engine(origins: list[Origin], tmp_path: Path) -> None:
    placement = {"rollout": {"servers": 2, "engines": ["hf", "sglang"]}}
    config = make_config(run={"dir": tmp_path}, placement=placement, weight_sync={"transport": "disk"})
    origin = run(config, origins)
    assert [enter(origin, f"rollout/{number}").rollout.engine for number in (0, 1)] == ["hf", "sglang"]
    assert enter(origin, "learner/0").placement.rollout.engines == ("hf", "sglang")


def test_a_run_that_is_ended_at_once_says_how_to_resume_if_it_has_a_checkpoint(
    origins: list[Origin], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt("at once")

    monkeypatch.setattr(actor_group, "ActorGroup", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        pipeline.run(make_config(run={"dir": tmp_path, "name": "new"}))
    make_checkpoint(tmp_path / "r", 2)
    with pytest.raises(KeyboardInterrupt, match=f"--resume {tmp_path / 'r'}"):
        pipeline.run(make_config(run={"dir": tmp_path, "resume": tmp_path / "r"}))


def test_a_resume_after_a_rollback_decides_on_its_checkpoint(origins: list[Origin], tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    for version in (2, 4):
        make_checkpoint(run_dir, version)
    add_event(run_dir, WatchEvent(kind="rollback", version=4, back_to=2))
    config = make_config(run={"dir": tmp_path, "name": "other", "resume": run_dir})
    origin = run(config, origins)
    assert origin.config is config
    settings = resolve(config, origin.decided)
    assert (settings.run.name, settings.run.resume) == ("r", str(checkpoint_folder(run_dir, 2)))
    assert settings.watch.rollbacks == 1
