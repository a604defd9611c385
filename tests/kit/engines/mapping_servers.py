"""Servers in one process of their own that map the memory in which learner ranks share weights, as vLLM's do.

python -m tests.kit.engines.mapping_servers COUNT FOLDER prints the URLs, then serves until its standard input ends.
Each update that ends is written to FOLDER/INDEX-VERSION.pt: the weights, and the processes whose memory held them.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch

from async_rl.base.weights.transport import bucket_num_bytes, unpack
from rollout_server.engines.vllm.server.receiving import map_memory

DIES_AT = 2
"""The version whose first bucket ends the server 1."""


class MappingHandler(BaseHTTPRequestHandler):
    """The endpoints of a vLLM server that a push uses."""

    def __init__(self, *arguments: Any, index: int, folder: Path, state: dict[str, Any]) -> None:
        self.index, self.folder, self.state = index, folder, state
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/start_weight_update":
            self.state["weights"], self.state["pids"] = {}, set()
        elif self.path == "/update_weights":
            if self.index == 1 and self.state["version"] == DIES_AT - 1:
                threading.Thread(target=self.server.shutdown).start()
                self.server.server_close()
                return
            self._map(body["update_info"])
        elif self.path == "/finish_weight_update":
            self.state["version"] = int(body["weight_version"])
            target = self.folder / f"{self.index}-{self.state['version']}.pt"
            torch.save({"weights": self.state["weights"], "pids": sorted(self.state["pids"])}, target)
        self._answer({"results": [[]]})

    def _map(self, part: dict[str, Any]) -> None:
        data = map_memory(part["memory"], torch.device("cpu"))
        names, dtypes, shapes = part["names"], part["dtypes"], part["shapes"]
        named = unpack(data[: bucket_num_bytes(dtypes, shapes)], names, dtypes, shapes)
        self.state["weights"] |= {name: tensor.clone() for name, tensor in named}
        name = base64.b64decode(part["memory"]["handle"][1]).decode()  # /torch_<process id>_...
        self.state["pids"].add(int(name.split("_")[1]))

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def mapping_servers(count: int, folder: Path) -> Iterator[list[str]]:
    """Start the process, and end it after the body; yields the servers' URLs."""
    command = [sys.executable, "-m", "tests.kit.engines.mapping_servers", str(count), str(folder)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()
        process.communicate(timeout=20)


def main(count: int, folder: Path) -> None:
    urls = []
    for index in range(count):
        handler = partial(MappingHandler, index=index, folder=folder, state={"version": 0})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls.append(f"http://127.0.0.1:{server.server_port}")
    print(*urls, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
