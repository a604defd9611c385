"""A publisher that sends nothing, and servers that accept what they are asked, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import torch
from torch import Tensor

from async_rl.weights.publisher import WeightPublisher
from tests.kit.configs import make_config

CPU = torch.device("cpu")
CONFIG = make_config(weight_sync={"bucket_bytes": 2**20}, timeouts={"push_s": 20.0})


class PausingPublisher(WeightPublisher):
    """A publisher that pauses and resumes servers and sends nothing."""

    def connect(self) -> None:
        pass

    def send(self, staged: Iterator[tuple[str, Tensor]], version: int) -> int:
        next(staged)
        return 1


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
