"""A server that does not read the calls of replies in time: it is started again, and the run goes on."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.marked_command import MarkedCommand, wait_until
from rollout_server.episodes.conversation.reply_reader import ServerParser
from tests.kit.models import save_tool_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

URL = "SLOW_PARSER_URL"
PARSER = ServerParser(os.environ.get(URL, ""), "glm45", timeout_s=0.5, pause_s=0.05)
"""The parser of the run: that of an SGLang server, whose part the test plays."""


class Reading(BaseHTTPRequestHandler):
    """Finds no call in any reply, and answers only while `is_quick` is set."""

    is_quick = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not Reading.is_quick.wait(5.0):  # longer than the time limit of the parser
            return
        body = json.dumps({"normal_text": asked["text"], "calls": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def parser_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Reading) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Reading.is_quick.set()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        Reading.is_quick.set()
        server.shutdown()


@pytest.mark.nightly
def test_a_server_that_reads_no_calls_in_time_is_started_again_and_the_run_goes_on(
    smoke_yaml: Path, tmp_path: Path, parser_url: str
) -> None:
    save_tool_model(tmp_path / "model")
    command = MarkedCommand(
        [
            "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=r", "run.steps=10000", "eval.num_prompts=0",
            "rollout.engine=hf", f"rollout.tool_parser={__name__}:PARSER", "rollout.max_episode_tokens=1024",
            f"model.path={tmp_path / 'model'}", "task.tools=[tests.kit.episodes.example_tools:add]",
            "task.max_prompt_tokens=800",
        ],
        tmp_path / "log",
        environment={URL: parser_url},
    )  # fmt: skip

    def num_steps() -> int:
        return command.text().count("\nstep ")

    def until(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: command.process.poll() is not None or condition(), 200, what)
        assert command.process.poll() is None, command.text()[-3000:]

    try:
        until(lambda: num_steps() >= 2, "two steps")
        Reading.is_quick.clear()
        until(lambda: "is lost, and started again" in command.text(), "the loss of the server")
        Reading.is_quick.set()
        until(lambda: "rollout/0 is back" in command.text(), "the next server")
        seen = num_steps()
        until(lambda: num_steps() >= seen + 2, "two more steps")
        command.interrupt()
        assert command.wait(120) == 130
    finally:
        command.kill()
    assert command.text().count("is lost, and started again") == 1 and "Traceback" not in command.text()
