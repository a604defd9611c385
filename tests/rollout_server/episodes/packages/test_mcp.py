from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.chat_messages import ToolCall
from rollout_server.episodes.tools.mcp_server import McpServer
from rollout_server.episodes.tools.tool import Tool, ToolCaller, load_tools
from rollout_server.episodes.user_code import ForeignCode
from tests.kit.virtual_environments import serving

pytest.importorskip("mcp")
pytestmark = pytest.mark.processes

SERVER = Path(__file__).with_name("mcp_notes.py")
COMMAND = f"mcp:{sys.executable} {SERVER}"


@pytest.fixture
def tools() -> Iterator[list[Tool]]:
    server = McpServer(COMMAND)
    yield [Tool(schema, call) for schema, call in server.tools()]
    server.close()


def answers(tools: list[Tool], *calls: tuple[str, Any], tool_s: float = 20.0) -> list[str]:
    asked: list[ToolCall] = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]

    async def run() -> list[str]:
        caller = ToolCaller(tools, tool_s, asyncio.Semaphore(64), ForeignCode())
        return [message["content"] for message in await caller.answer(asked, ())]

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_all_episodes_share_one_session(tools: list[Tool]) -> None:
    assert answers(tools, ("write", {"note": "first"})) == ["written"]
    assert answers(tools, ("add", {"a": 2, "b": 3}), ("read", {})) == ["5", "first"]
    assert answers(tools, *(("add", {"a": i, "b": i}) for i in range(16))) == [str(2 * i) for i in range(16)]


def test_what_goes_wrong_is_for_the_model_to_read(tools: list[Tool]) -> None:
    failed, wrong, unknown, fine = answers(
        tools, ("fail", {"text": "no such file"}), ("add", {"a": "x"}), ("sub", {}), ("add", {"a": 1, "b": 1})
    )
    assert failed == "error: McpToolError: Error executing tool fail"  # the server keeps the reason to itself
    assert wrong.startswith("error: McpToolError") and "b" in wrong
    assert unknown.startswith("error: LookupError: there is no tool 'sub', only add") and fine == "2"


def test_a_tool_that_hangs_is_given_up_at_its_limit(tools: list[Tool]) -> None:
    answers(tools, ("add", {"a": 1, "b": 1}))  # starts the session
    late, fine = answers(tools, ("wait", {"seconds": 60}), ("add", {"a": 1, "b": 1}), tool_s=1.0)
    assert late == "error: the tool wait took longer than 1 s" and fine == "2"
    assert answers(tools, ("add", {"a": 1, "b": 2})) == ["3"]


def test_a_server_that_dies_is_started_again(tools: list[Tool]) -> None:
    answers(tools, ("write", {"note": "lost"}))
    (died,) = answers(tools, ("die", {}))
    assert died.startswith("error: ")
    assert answers(tools, ("read", {})) == [""]


def test_a_server_is_reached_by_its_address(tmp_path: Path) -> None:
    with serving(lambda port: [sys.executable, SERVER, str(port)], tmp_path) as port:
        server = McpServer(f"mcp:http://127.0.0.1:{port}/mcp")
        tools = [Tool(schema, call) for schema, call in server.tools()]
        assert answers(tools, ("add", {"a": 20, "b": 22})) == ["42"]
        server.close()


@pytest.mark.parametrize(
    "target", ["mcp:no-such-command", f"mcp:{sys.executable} -c pass", "mcp:http://127.0.0.1:9/mcp"]
)
def test_a_server_that_can_not_be_used_is_an_error_at_start(target: str) -> None:
    with pytest.raises(ConfigError, match=r"^task\.tools "):
        load_tools([target])
