"""The actors as plain objects: each is made without its `__init__`, which would redirect this process's output."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.driver.actors import LearnerActor, RolloutActor
from async_rl.driver.judges import JudgeActor
from async_rl.messages.reports import EvaluationDue, LearnerReport
from tests.kit.configs import make_config


@pytest.mark.parametrize("kind", [RolloutActor, JudgeActor])
def test_a_server_that_is_stopped_removes_the_keys_that_the_driver_has_sent(kind: Any, tmp_path: Path) -> None:
    actor, folder = kind.__new__(kind), tmp_path / "keys"
    actor._config, actor._sent_keys = make_config(network={"keys": str(folder)}), {"client.key_secret": b"secret"}
    folder.mkdir()
    (folder / "client.key_secret").write_bytes(b"secret")
    asyncio.run(actor.stop())
    assert not folder.exists()


@pytest.mark.parametrize("loaded", [
    "async_rl.storage.model_folder.load_tokenizer", "rollout_server.tasks.base.open_task",
    "rollout_server.engines.base.open_engine", "rollout_server.rewards.base.open_rewards",
    "rollout_server.scored_player.open_player",
])
def test_a_server_answers_while_it_loads_from_a_slow_disk(
    loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, has_answered = threading.Event(), threading.Event()

    def load(*_: Any) -> None:
        is_loading.set()
        if not has_answered.wait(20):
            raise AssertionError("the event loop stood still while the actor loaded")
        raise InterruptedError("enough")

    for name in (
        "async_rl.storage.model_folder.load_tokenizer", "rollout_server.tasks.base.open_task",
        "rollout_server.engines.base.open_engine", "rollout_server.rewards.base.open_rewards",
    ):
        monkeypatch.setattr(name, lambda *_: None)
    monkeypatch.setattr(loaded, load)
    actor = RolloutActor.__new__(RolloutActor)
    actor._config, actor._index, actor._task = make_config(run={"dir": tmp_path}), 0, None  # type: ignore[assignment]
    actor._doing, actor._since_s = "starts its engine", 0.0
    actor._engine, actor._tokenizer = SimpleNamespace(url=""), None  # type: ignore[assignment]

    is_connecting = loaded.endswith(("open_rewards", "open_player"))

    async def answer() -> None:
        await asyncio.to_thread(is_loading.wait, 20)
        doing = "opens its rewards, environment and tools" if is_connecting else "starts its engine"
        assert (await actor.status()).doing == doing
        has_answered.set()

    async def run() -> None:
        begun = actor.connect("tcp://none", []) if is_connecting else actor.start()
        results = await asyncio.gather(begun, answer(), return_exceptions=True)
        assert [type(result) for result in results] == [InterruptedError, type(None)]

    asyncio.run(run())


def test_the_port_of_the_learners_rendezvous_is_held_until_it_is_served(tmp_path: Path) -> None:
    actor = LearnerActor.__new__(LearnerActor)
    actor._config = make_config(run={"dir": tmp_path})
    address = actor.listen()
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(address)
    assert actor._listener is not None
    actor._listener.close()


def test_a_learners_reports_come_through_however_ray_asks_for_them() -> None:
    class Learner:
        def run(self) -> Iterator[LearnerReport]:
            yield from [EvaluationDue(version=version) for version in range(3)]

    actor = LearnerActor.__new__(LearnerActor)
    actor._learner = Learner()  # type: ignore[assignment]
    reports: Any = actor.run()
    assert [next(reports), reports.send(1), reports.send(2)] == [EvaluationDue(version=version) for version in range(3)]
