"""A transport that kills a server of the hf engine after a push, and its successor within a later one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from async_rl.base.config.section import section
from async_rl.base.seams import TransportEntry
from async_rl.base.weights.servers import Bucket
from async_rl.base.weights.transport import BroadcastTransport

GLOO = "tests.kit.engines.killing_pushes:KILLING_GLOO"
VICTIM = "rollout/1"
NOTICED_S = 60.0


@section("weight_sync.params")
class KillSettings:
    """When the victim is killed."""

    between: int
    """The version of the push after which the victim dies. The push returns once the driver has told the learner."""
    within: int
    """A version: it dies in the push after the first of this or a later version that has reached it, after the first
    bucket."""
    log: str
    """The file with the output of the command."""


class KillingTransport(BroadcastTransport):
    """Kills the process that listens at the victim's URL."""

    _kills, _has_killed = False, False
    """Whether the next push is the one within which the victim dies; whether it was."""

    def end_push(self, served: int | None) -> None:
        super().end_push(served)
        if self.members.purpose != "push":  # a server that joins gets its first weights
            return
        self._kills = served is not None and served >= self.settings.within and VICTIM in self.members.names
        if served == self.settings.between:
            self._kill()
            deadline = time.monotonic() + NOTICED_S
            while f"{VICTIM}: the prompts of its" not in Path(self.settings.log).read_text():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(2.0)  # the driver has called the learner before it asked the buffer for that number of groups

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        sent = super().start_sending(bucket, version)
        if self._kills and not self._has_killed:
            self._has_killed = True
            sent()
            self._kill()
            return lambda: None
        return sent

    def _kill(self) -> None:
        (url,) = [member.url for member in self.members.current if member.name == VICTIM]
        port = int(url.rpartition(":")[2])
        listening = [
            each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port
        ]
        psutil.Process(listening[0]).kill()


KILLING_GLOO = TransportEntry(
    open=partial(KillingTransport, backend="gloo"), delivers="gloo", devices=("cpu",), settings=KillSettings
)
