"""Publishers for tests, and servers that are objects or accept what they are asked over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.errors import WeightSyncError
from async_rl.base.seams import ENGINES
from async_rl.base.weights.publisher import PushReport, WeightPublisher, open_filler
from async_rl.base.weights.servers import Member, Members
from async_rl.base.weights.transport import Transport
from tests.kit.configs import make_config

CPU = torch.device("cpu")
CONFIG = make_config(weight_sync={"bucket_bytes": 2**20}, timeouts={"push_s": 20.0})
OBJECT_ENGINE = "tests.kit.publishers:OBJECTS"
"""A value of rollout.engine: its servers are the objects of `url_of`, which have methods of a ServerAdmin."""
_OBJECTS: dict[str, Any] = {}


class ObjectAdmin:
    """Finds the object that answers at a URL anew for each call."""

    def __init__(self, config: Config, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> Any:
        return getattr(_OBJECTS[self._url], name)


OBJECTS = replace(ENGINES["sglang"], open_admin=ObjectAdmin)


def url_of(server: Any, url: str = "") -> str:
    """Let the object `server` answer at `url`, or at a new URL, and return it."""
    url = url or f"object://{len(_OBJECTS)}"
    _OBJECTS[url] = server
    return url


class AnyServer:
    """A server that does all that it is asked, unless it is dead.

    Args:
        note: called with the name of each call, of `resume_memory` also with what it resumes.
        sums: of its weights.
    """

    def __init__(
        self, note: Callable[[str], None] = lambda call: None, is_alive: bool = True, sums: Sequence[float] = ()
    ) -> None:
        self.note, self.is_alive, self.sums = note, is_alive, sums

    def is_ready(self) -> bool:
        return self.is_alive

    def unloaded_weights(self) -> list[str]:
        return []

    def value_sums(self) -> Sequence[float]:
        return self.sums

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> list[float]:
            self.note(f"{name} {arguments[0]}" if name == "resume_memory" else name)
            if not self.is_alive:
                raise WeightSyncError("connection refused")
            return []

        return call


class PausingTransport(Transport):
    """A transport that sends nothing."""

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        next(staged)
        return 1


def publisher_for(
    config: Config, urls: Sequence[str], transport: Callable[..., Transport] = PausingTransport, rank: int = 0,
    device: torch.device = CPU,
) -> WeightPublisher:
    members = Members(config, {f"rollout/{index}": url for index, url in enumerate(urls)})
    return WeightPublisher(transport(config, members, rank, device))


def fill(
    publisher: WeightPublisher, joiners: Sequence[Member], tensors: Iterable[tuple[str, Tensor]], version: int,
    **checks: bool,
) -> PushReport:
    """Bring servers their first weights and admit them, as the learner's Pusher does."""
    filler = open_filler(publisher)
    filler.members.replace(joiners)
    report = filler.push(tensors, version, **checks)
    filler.transport.disconnect()
    publisher.members.admit(filler.members.current)
    return report


def names(members: Sequence[Member]) -> tuple[str, ...]:
    return tuple(member.name for member in members)


class AcceptingHandler(BaseHTTPRequestHandler):
    status = 200
    key = ""
    """The value that `Authorization` must have; empty: any."""

    def do_GET(self) -> None:
        self.send_response(401 if self.key and self.headers["Authorization"] != self.key else 200)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler] = AcceptingHandler) -> Iterator[str]:
    """The URL of a server whose requests `handler` answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
