"""A server of a run, and its states (`ServerState`):

               engine up, connected         has the weights           is to leave
    starting ───────────────────> filling ─────────────────> serving ─────────────> draining
        ^                            │                          │                       │ has no group any more,
        │                            │ lost                     │ lost                  v or leave_s are over
        └────────────────────────────┴──────────────────────────┴─────────────────── gone
          if it is still wanted; its groups are granted to other servers

    starting   A host with room is found, then the process and its engine start.
    filling    The learner brings it its first weights. It has no slots yet, and disturbs no other server.
    serving    It gets slots, pushes and evaluations.
    draining   It gets no slots and no pushes. Its groups may end. A server that leaves before it serves ends at once.
    gone       It has no process. It is started again on a host with room, unless it was removed.

Evaluation servers and judge servers follow the same path, but are not filled: they serve as soon as the learner has
started. An evaluation server gets its first weights with the next evaluation, a judge server gets none.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum


class ServerState(Enum):
    """The state of a server; the module's docstring has the diagram."""

    STARTING = "starting"
    FILLING = "filling"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class Server:
    """A server and its state."""

    name: str
    attached_url: str = ""
    """The URL of a server that the run does not start; empty: the run starts it."""
    state: ServerState = ServerState.GONE
    since_s: float = field(default_factory=time.time)
    """When it got into this state, in seconds since the epoch."""
    url: str = ""
    """Where its engine answers, or its last engine; empty before the first start."""
    is_known: bool = False
    """Whether the learner knows this start of it."""
    filled: asyncio.Future[int] | None = None
    """The wait for its first weights; the result is their policy version."""
    version: int = -1
    """The version of its weights by the last report; -1: none of the learner's."""
    retry_s: float = 0.0
    """The wait before its next start; 0 unless it has failed to start since it served last."""
    drain_end_s: float = 0.0
    """If it drains: when that ends, in time.monotonic()."""

    def enter(self, state: ServerState) -> None:
        self.state, self.since_s = state, time.time()

    @property
    def kind(self) -> str:
        """The kind of server: rollout, eval or judge."""
        return self.name.partition("/")[0]

    @property
    def is_up(self) -> bool:
        """Whether it has started and connected."""
        return self.state in (ServerState.FILLING, ServerState.SERVING)
