"""Programs at a service with SandboxFusion's API, which a small server stands in for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from async_rl.base.config.task_parts import SandboxConfig
from rollout_server.question import Question
from rollout_server.rewards.code import sandbox
from rollout_server.rewards.code.checker import CodeChecker, CodeSettings, sandbox_of
from rollout_server.rewards.code.sandbox import RunLimits, SandboxDiedError, Service

pytestmark = pytest.mark.processes
FIELDS = {
    "code", "stdin", "language", "compile_timeout", "run_timeout", "memory_limit_MB", "files", "fetch_files", "args",
}  # fmt: skip
"""The fields of RunCodeRequest in SandboxFusion's sandbox/server/sandbox_api.py."""


def ran(status: str, code: int | None, stdout: str, stderr: str) -> dict[str, Any]:
    return {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}


class StandIn(BaseHTTPRequestHandler):
    """POST /run_code as the service answers it."""

    failures = 0
    """How many requests fail before one is served."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and set(request) <= FIELDS and "code" in request and "language" in request
        reply: dict[str, Any] = {"message": "", "compile_result": None, "run_result": None, "files": {}}
        if StandIn.failures:
            StandIn.failures -= 1
            reply |= {"status": "SandboxError", "message": "no room"}
        else:
            try:
                done = subprocess.run(
                    [sys.executable, "-I", "-c", request["code"]], input=request["stdin"], capture_output=True,
                    text=True, timeout=request["run_timeout"],
                )  # fmt: skip
                run = ran("Finished", done.returncode, done.stdout, done.stderr)
            except subprocess.TimeoutExpired:
                run = ran("TimeLimitExceeded", None, "", "")
            reply |= {"status": "Failed" if run["return_code"] else "Success", "run_result": run}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    StandIn.failures = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PAUSES_S", (0.0, 0.0))


def test_programs_run_at_the_service_with_their_input_and_limits(url: str) -> None:
    sandbox = Service(url=url)
    sandbox.check()
    with sandbox.open() as run:
        assert run("print(int(input()) + 1)", "7").output == "8\n"
        ended = run("import sys; print(1, file=sys.stderr); sys.exit(3)")
        assert (ended.exit_code, ended.errors, ended.is_late) == (3, "1\n", False)
        assert run("while True: pass", "", RunLimits(wall_s=0.5)).is_late
        assert run("1 +").exit_code == 1


def test_the_reward_code_scores_answers_at_the_service(url: str) -> None:
    settings, tests = CodeSettings(), {"assert_case": ["assert add(1, 2) == 3"]}
    checker = CodeChecker(sandbox=sandbox_of(SandboxConfig(url=url)), settings=settings)
    answers = ["def add(a, b): return gcd(a, b) + b", "def add(a, b): return 0", "def add(a, b): return 1 / 0"]
    found = [checker.score(Question(messages=(), ground_truth=tests), f"```python\n{each}\n```") for each in answers]
    assert [each.score for each in found] == [1, 0, 0]


def test_an_error_of_the_service_is_asked_again_and_then_no_verdict(url: str) -> None:
    StandIn.failures = 2
    assert Service(url=url).run("print(1)").output == "1\n"
    StandIn.failures = 99
    with pytest.raises(SandboxDiedError, match="no room"):
        Service(url=url).run("print(1)")
