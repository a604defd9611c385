"""The actors as plain objects in this process, whose output, folder and environment they leave alone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.run.processes.actors import LearnerActor, Origin, RolloutActor, see_own_gpus, share_of_cores
from async_rl.run.processes.judge_actor import JudgeActor
from tests.kit.configs import make_config


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes an actor of the kind, which gets the keys from the driver."""
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def made(kind: Any, keys: dict[str, bytes] | None = None, **sections: Any) -> Any:
        config = make_config(**{"run": {"dir": tmp_path}, **sections})
        return kind(Origin(str(tmp_path), config, client_keys=keys or {}), 0)

    return made


@pytest.mark.parametrize("kind", [RolloutActor, JudgeActor])
def test_a_server_that_is_stopped_removes_the_keys_that_the_driver_has_sent(
    kind: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    folder, judge = tmp_path / "keys", {"judge": {"path": "j"}, "placement": {"judge": {"servers": 1}}}
    actor = make(kind, {"client.key_secret": b"secret"}, network={"keys": str(folder)}, **judge)
    assert (folder / "client.key_secret").read_bytes() == b"secret"
    asyncio.run(actor.stop())
    assert not folder.exists()


def test_a_server_answers_while_it_loads_from_a_slow_disk(
    make: Callable[..., Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, has_answered = threading.Event(), threading.Event()

    def load() -> None:
        is_loading.set()
        if not has_answered.wait(20):
            raise AssertionError("the event loop stood still while the actor loaded")
        raise InterruptedError("enough")

    (tmp_path / "slow_part.py").write_text("import slow_disk\nslow_disk.load()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "slow_disk", SimpleNamespace(load=load))
    actor = make(RolloutActor, model={"path": model_folder}, task={"name": "slow_part:T"}, rollout={"engine": "hf"})

    async def answer() -> None:
        await asyncio.to_thread(is_loading.wait, 20)
        assert (await actor.status()).doing
        has_answered.set()

    async def run() -> None:
        failed, answered = await asyncio.gather(actor.start(), answer(), return_exceptions=True)
        assert "enough" in str(failed) and answered is None
        await actor.stop()

    asyncio.run(run())


def test_the_port_of_the_learners_rendezvous_is_held_until_it_is_served(make: Callable[..., Any]) -> None:
    actor = make(LearnerActor)
    address = actor.listen()
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(address)


@pytest.mark.parametrize(
    ("gpus", "seen"), [([5], "5"), ([2, 3], "2,3"), ([], "0,1,2,3,4,5,6,7")],
)
def test_a_process_sees_the_gpus_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    see_own_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def pinned(servers: int, ranks: int) -> Config:
    return make_config(placement={"learner": {"ranks": ranks}, "rollout": {"servers": servers}, "pin_cpus": True})


def test_every_process_has_cores_of_its_own() -> None:
    shares = [share_of_cores(pinned(2, 1), number, [0, 1, 2, 3, 6, 7, 9]) for number in range(3)]
    assert shares == [[0, 1], [2, 3], [6, 7]]
    with pytest.raises(ConfigError, match=r"^placement\.pin_cpus"):
        share_of_cores(pinned(2, 1), 0, [0, 1])
