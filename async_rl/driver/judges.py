"""Starts lost servers of the judge again, where the workers know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ray import ObjectRef

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.judge_actor import JudgeActor
from async_rl.driver.watchdog import Watchdog


class Judges:
    """The servers of the judge of a run that has started.

    Args:
        urls: [name] the address of each of them.
    """

    def __init__(
        self, config: Config, processes: ActorGroup, watchdog: Watchdog, urls: Mapping[str, str]
    ) -> None:
        self._config = config
        self._processes = processes
        self._watchdog = watchdog
        self._urls = urls

    @property
    def urls(self) -> list[str]:
        """The addresses of all of them, which stay the same in a run."""
        return list(self._urls.values())

    def start_again(self, name: str) -> ObjectRef:
        """Start the process of a lost server, at its old address; returns the call of its `start`."""
        index, port = self._config.judge_names.index(name), urlsplit(self._urls[name]).port
        actor = self._processes.start(name, JudgeActor, self._config, index, port)
        self._watchdog.begin(name, is_up=False)
        call: Any = actor.start
        started: ObjectRef = call.remote()
        return started
