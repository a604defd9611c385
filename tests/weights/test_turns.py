"""The requests by which servers release and resume GPU memory, sent over real HTTP to servers that record them.

tests/rollout_server/engines/test_server_updates.py and tests/e2e/test_pipeline.py do the same with SGLang on a CPU,
where no memory is released.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from async_rl.base.weights.cuda_ipc import CudaIpcTransport
from async_rl.base.weights.publisher import WeightPublisher
from async_rl.base.weights.servers import Member
from tests.kit.configs import make_config
from tests.kit.publishers import names, publisher_for

pytestmark = pytest.mark.processes  # together they compute for long

Requests = list[tuple[str, Any]]
PAUSE = ("/pause_generation", {"mode": "retract"})
RELEASE = ("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
UPDATE = [("/begin_weight_update", {}), "/update_weights_from_tensor", ("/end_weight_update", {})]
WEIGHTS = ("/resume_memory_occupation", {"tags": ["weights"]})
KV_CACHE = ("/resume_memory_occupation", {"tags": ["kv_cache"]})
CONTINUE = ("/continue_generation", {})


class RecordingHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == self.server.dies_at:  # type: ignore[attr-defined]
            threading.Thread(target=self.server.end).start()  # type: ignore[attr-defined]
            self.close_connection = True
            return
        self.server.requests.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.requests: Requests = []
        self.dies_at = ""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def received(self) -> list[Any]:
        """The requests since the last call, as (path, body); of requests with weights only the path."""
        requests, self.requests = self.requests, []
        return [path if "tensor" in path else (path, body) for path, body in requests]

    def end(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made = [Server(), Server(), Server()]
    yield made
    for server in made:
        server.end()


def publisher_of(*servers: Server) -> WeightPublisher:
    config = make_config(placement={"colocated": True}, weight_sync={"on_update": "retract"})
    assert config.shares_gpus
    return publisher_for(config, [server.url for server in servers], CudaIpcTransport)


def push(publisher: WeightPublisher, version: int) -> tuple[str, ...]:
    return names(publisher.push([("w", torch.ones(4))], version).lost)


def test_weight_memory_is_resumed_before_the_push_and_the_cache_after_it(servers: list[Server]) -> None:
    publisher = publisher_of(servers[0])
    publisher.release_server_memory()
    assert servers[0].received() == [PAUSE, RELEASE]
    push(publisher, 1)
    assert servers[0].received() == [PAUSE, ("/flush_cache", {}), WEIGHTS, *UPDATE, KV_CACHE, CONTINUE]
    push(publisher, 2)  # the learner had no turn before it
    assert servers[0].received() == [PAUSE, ("/flush_cache", {}), *UPDATE, CONTINUE]


def test_after_a_failed_push_memory_is_resumed_once_and_not_at_new_servers(
    servers: list[Server],
) -> None:
    stays, dies, new = servers
    publisher = publisher_of(stays, dies)
    publisher.release_server_memory()
    assert stays.received() == dies.received() == [PAUSE, RELEASE]
    dies.dies_at = WEIGHTS[0]
    assert push(publisher, 1) == ("rollout/1",)
    assert stays.received() == [PAUSE, ("/flush_cache", {}), WEIGHTS, ("/end_weight_update", {})]
    publisher.members.admit([Member("rollout/1", new.url, 2)])
    assert push(publisher, 1) == ()
    assert stays.received() == [PAUSE, ("/flush_cache", {}), *UPDATE, KV_CACHE, CONTINUE]
    assert new.received() == [PAUSE, ("/flush_cache", {}), *UPDATE, CONTINUE]


def test_a_server_that_dies_while_releasing_memory_is_found_by_the_push(servers: list[Server]) -> None:
    stays, dies, _ = servers
    dies.dies_at = "/release_memory_occupation"
    publisher = publisher_of(stays, dies)
    publisher.release_server_memory()
    assert push(publisher, 1) == ("rollout/1",)
    stays.received()
    assert push(publisher, 1) == ()
    assert KV_CACHE in stays.received()
