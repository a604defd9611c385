"""A small server that speaks the protocol of the Hugging Face hub, for huggingface_hub's own client."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
_API_DEFAULT = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)")
_FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_UPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main")
PIECE_BYTES = 1 << 16


@dataclass
class Repository:
    """A repository: its commits, oldest first, each with all of its files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files to a branch; returns its hash."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode() + branch.encode()).hexdigest()
        self.commits[digest] = files
        self.branches[branch] = digest
        return digest

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer:
    """The hub of a test. TOKEN opens gated repositories; `downloads` counts the whole files that were sent."""

    TOKEN = "hf_of_the_test"

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.requests: Counter[str] = Counter()
        """[method and path] how often it was asked for."""
        self.status = 0
        """The status of every answer, or 0: as it should be."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.take(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server; connections are refused from then on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_model(self, name: str, folder: Path) -> str:
        """Add the files of a folder as a commit of a model; returns the commit."""
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        return self.models.setdefault(name, Repository()).commit(files)

    def add_dataset(self, name: str, files: dict[str, bytes]) -> str:
        return self.datasets.setdefault(name, Repository()).commit(files)

    @property
    def downloads(self) -> Counter[str]:
        """[file] how often its bytes were sent."""
        found = Counter[str]()
        for request, count in self.requests.items():
            if request.startswith("GET ") and (file := _FILE.fullmatch(request.removeprefix("GET "))):
                found[file[4]] += count
        return found

    def environment(self, cache: Path) -> dict[str, str]:
        """The variables with which a process asks this hub, and keeps what it gets in the folder `cache`."""
        places = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub")}
        return {**places, "HF_HUB_OFFLINE": "0"}  # other tests set it to 1

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Have this process do the same."""
        use_hub(monkeypatch, self.url, cache)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests[f"{request.command} {path}"] += 1
        if self.status:
            _send(request, self.status, {}, b"")
        elif found := _FILE.fullmatch(unquote(path, errors="strict")):
            self._send_file(request, self._of(found[1] or "models").get(found[2]), found[3], found[4])
        elif found := _API.fullmatch(urlsplit(request.path).path):
            repo, kind = self._of(found[1]).get(found[2]), found[3]
            self._send_api(request, repo, found[2], kind, unquote(found[4]))
        elif found := _API_DEFAULT.fullmatch(path):
            self._send_api(request, self._of(found[1]).get(found[2]), found[2], "revision", "main")
        else:
            _send(request, 404, {}, b"")

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """Answer the requests of an upload: a new repository, how files are to be sent (in the commit), the commit."""
        path = unquote(urlsplit(request.path).path)
        content = request.rfile.read(int(request.headers["Content-Length"]))
        self.requests[f"POST {path}"] += 1
        found = _UPLOAD.fullmatch(path)
        if self.status or request.headers.get("Authorization") != f"Bearer {self.TOKEN}":
            _send(request, self.status or 401, {}, b"")
        elif path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.models.setdefault(name, Repository()).is_private = asked.get("visibility") == "private"
            _send_json(request, {"url": f"{self.url}/{name}", "name": name, "id": name})
        elif found and found[2] == "preupload":
            ways = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(content)["files"]]  # fmt: skip
            _send_json(request, {"files": ways})
        elif found:
            lines = [json.loads(line) for line in content.splitlines()]
            files = {line["value"]["path"]: b64decode(line["value"]["content"]) for line in lines[1:]}
            commit, page = self.models[found[1]].commit(files), f"{self.url}/{found[1]}"
            _send_json(request, {"success": True, "commitOid": commit, "commitUrl": f"{page}/commit/{commit}"})
        else:
            _send(request, 404, {}, b"")

    def _of(self, kind: str) -> dict[str, Repository]:
        return self.datasets if kind == "datasets" else self.models

    def _send_api(
        self, request: BaseHTTPRequestHandler, repo: Repository | None, name: str, kind: str, revision: str
    ) -> None:
        if repo is None:
            return _send(request, 401, {"X-Error-Code": "RepoNotFound"}, b"")
        commit = repo.resolve(revision)
        if commit is None:
            return _send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"")
        files = repo.commits[commit]
        if kind == "tree":
            return _send_json(request, [_entry(path, content) for path, content in files.items()])
        siblings = [{"rfilename": path} for path in files]
        return _send_json(request, {"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False})

    def _send_file(self, request: BaseHTTPRequestHandler, repo: Repository | None, revision: str, path: str) -> None:
        if repo is None:
            return _send(request, 401, {"X-Error-Code": "RepoNotFound"}, b"")
        if repo.is_gated and request.headers.get("Authorization") != f"Bearer {self.TOKEN}":
            return _send(request, 403, {"X-Error-Code": "GatedRepo"}, b"")
        commit = repo.resolve(revision)
        content = repo.commits[commit].get(path) if commit else None
        if commit is None or content is None:
            return _send(request, 404, {"X-Error-Code": "EntryNotFound" if commit else "RevisionNotFound"}, b"")
        begin = 0
        if asked := re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "")):
            begin = int(asked[1])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(content)}"', "X-Linked-Size": str(len(content))}
        return _send(request, 206 if begin else 200, headers, content[begin:])


@contextmanager
def open_hub() -> Iterator[HubServer]:
    hub = HubServer()
    try:
        yield hub
    finally:
        hub.close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Have huggingface_hub, which reads its variables when it is imported, ask the hub at `url`, without waits."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda s: None, time=time.time, monotonic=time.monotonic))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}


def _send_json(request: BaseHTTPRequestHandler, content: object) -> None:
    _send(request, 200, {"Content-Type": "application/json"}, json.dumps(content).encode())


def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        for begin in range(0, len(content), PIECE_BYTES):
            request.wfile.write(content[begin : begin + PIECE_BYTES])
