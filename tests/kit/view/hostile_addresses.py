"""Random addresses, methods and headers such as an attacker tries them, and what every answer of the page must keep."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from async_rl.tools.view.app import HEADERS, make_app
from async_rl.tools.view.runs import Runs

SCRIPT = "<script>window.hacked=1</script>"
TEXTS = (
    "0", "1", "3", "-1", "007", "1e400", "nan", "-inf", "0x10", "1_000", "%D9%A3", "%C2%B2", str(2**31), str(2**63 - 1),
    str(2**63), "9" * 18, "9" * 5000, "%00", "a%00b", "%ED%A0%80abc", "%FF%FE", "..%2f..%2fapp.py", "%2f", "%5c",
    "%252f", "../../app.py", "", "%20", "a" * 20_000, SCRIPT, "%3Cscript%3Ewindow.hacked=1%3C/script%3E",
    "%22%3E%3Cimg+src=x+onerror=1%3E", "'><svg/onload=1>", "javascript:alert(1)", "%E2%80%AE", "%F0%9F%92%A9",
    "right+answer", "hacked", '"', "%22*%22+OR", "a'b;DROP", "late", "trained", "rollout/0", "newest", "stalest",
    "reward/mean", "true", "None", "{{7*7}}", "%0d%0aX:1",
)  # fmt: skip
NAMES = ("page", "where", "order", "from", "to", "answer", "color", SCRIPT, "%00")
CLAUSES = (
    "1", "1=1--", "1;DROP+TABLE+groups", "reward>'a'", "1)UNION+SELECT+1", "/*", "load_extension('x')", "step", "x.y.z",
    "writefile('a',1)", "randomblob(1e9)", "group_id+IN+(SELECT+1+FROM+rows)", "1+LIMIT+1", "PRAGMA+x", "(" * 500,
)  # fmt: skip
PATHS = (
    "/", "/run", "/run/run", "/run/run/", "/run/run/groups", "/run/run/groups/{}", "/run/run/groups/{}/",
    "/run/run/data/charts", "/run/run/data/lanes", "/run/run/data/changes", "/run/run/data/{}", "/run/run/{}",
    "/run/{}", "/run/{}/groups", "/data/changes", "/report/{}", "/static/{}", "/static/view.css/{}", "/bokeh/{}", "/{}",
    "//{}", "{}", "/run//{}", "/RUN/run/", "*", "http://evil.example/{}",
)  # fmt: skip
METHODS = ("GET",) * 60 + ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "X")
HOSTS = ("localhost",) * 120 + (
    "127.0.0.1:8717", "[::1]:80", "127.0.0.2", "LOCALHOST", "evil.example", "localhost.evil.example",
    "localhost:80@evil", "", "[::1", "localhost:[", "localhost:99999999", "127.0.0.1.evil", "\x00", "\xff", SCRIPT,
    "a" * 5000, "[]", "127.1",
)  # fmt: skip
ALLOWED = {200, 206, 304, 307, 400, 404, 405, 416}
"""The statuses of answers; any other, above all 500, is a fault."""


@dataclass(frozen=True, slots=True)
class Attempt:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def random_attempt(source: random.Random) -> Attempt:
    path = source.choice(PATHS)
    while "{}" in path:
        path = path.replace("{}", source.choice(TEXTS), 1)
    number = source.choice((0, 0, 1, 1, 2, 4))
    query = [f"{source.choice(NAMES)}={source.choice(TEXTS + CLAUSES)}" for _ in range(number)]
    if source.random() < 0.05:
        query.append(source.choice(("&&==&", "%", "=" * 50, "a;b;c", "&".join(["key=a"] * 1500))))
    target = path + ("?" + "&".join(query) if query else "")
    hosts = [("host", source.choice(HOSTS)) for _ in range(source.choice((1,) * 20 + (0, 2)))]
    others = [
        ("range", source.choice(("bytes=0-1", "bytes=9-1", "bytes=-999999999999", "bytes=" + "0-1," * 100, "x"))),
        ("if-modified-since", source.choice(("now", "Thu, 01 Jan 1970 00:00:00 GMT", "\xff"))),
        ("accept-encoding", source.choice(("gzip", "gzip;q=nan", "\xff"))),
        ("content-length", source.choice(("5", "-1", "x"))),
    ]
    return Attempt(source.choice(METHODS), target, tuple(hosts + [pair for pair in others if source.random() < 0.1]))


class HostileClient:
    """Asks an application as a server with lax rules would: it passes on whatever came."""

    def __init__(self, folder: Path) -> None:
        self._app = make_app(Runs(folder))

    async def ask(self, attempt: Attempt) -> Answer:
        raw_path, _, query = attempt.target.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "server": ("127.0.0.1", 8717), "client": ("127.0.0.1", 5), "scheme": "http", "method": attempt.method,
            "root_path": "", "path": unquote(raw_path), "raw_path": raw_path.encode("latin-1"),
            "query_string": query.encode("latin-1"), "state": {},
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in attempt.headers],
        }  # fmt: skip
        sent: list[Any] = []
        has_body = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await has_body.wait()  # the client leaves at the first part of the answer, so that streams of events end
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                has_body.set()

        async with asyncio.timeout(60):
            await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))


def faults_of(answer: Answer) -> list[str]:
    """Return what is wrong with an answer: its status, a missing header, or a script that is not the page's own."""
    found = [] if answer.status in ALLOWED else [f"status {answer.status}"]
    found += [f"no header {name}" for name, value in HEADERS.items() if answer.headers.get(name.lower()) != value]
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/html") and "content-encoding" not in answer.headers:
        reader = _Scripts()
        reader.feed(answer.body.decode())
        found += reader.found
    return found


class _Scripts(HTMLParser):
    """Collects what can run in a page of HTML, but for the scripts of this server."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        is_own = values.get("src", "").startswith(("/static/", "/bokeh/"))
        if (tag == "script" and not is_own) or tag in ("img", "iframe", "object", "embed", "base"):
            self.found.append(self.get_starttag_text() or tag)
        bad = [name for name in values if name.startswith("on")]
        links = ("href", "src", "action")
        bad += [name for name in links if values.get(name, "").strip().lower().startswith("javascript:")]
        self.found += [f"{name} of {self.get_starttag_text()}" for name in bad]
