from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.chat_messages import Message, ToolCall
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.conversation.session import Session
from rollout_server.episodes.env import QuestionEnv
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.episodes.tools.tool import MAX_CALLS, MAX_RESULT_CHARACTERS, Tool, ToolCaller, load_tools
from rollout_server.episodes.user_code import ForeignCode
from rollout_server.question import Question
from tests.kit.episodes import example_tools
from tests.kit.episodes.sessions import LIMITS, scripted
from tests.kit.tokenizers import end_tokens, tokenizer_of

PLACE = "tests.kit.episodes.example_tools"


def call(name: str, arguments: Any, number: int = 0) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": text}}


def answered(
    *calls: ToolCall, tools: list[Tool] | None = None, tool_s: float = 2, places: int = 8, errors: tuple[str, ...] = ()
) -> tuple[list[str], ToolCaller]:
    functions = (example_tools.add, example_tools.weather, example_tools.block, example_tools.fail)
    tools = [Tool.from_function(function) for function in functions] if tools is None else tools

    async def run() -> tuple[list[Message], ToolCaller]:
        caller = ToolCaller(tools, tool_s, asyncio.Semaphore(places), ForeignCode())
        return await caller.answer(calls, errors), caller

    messages, caller = asyncio.run(run())
    assert [m.get("tool_call_id") for m in messages[: len(calls)]][:MAX_CALLS] == [c["id"] for c in calls][:MAX_CALLS]
    return [message["content"] for message in messages], caller


def test_the_description_of_a_tool_comes_from_its_types_and_docstring() -> None:
    assert Tool.from_function(example_tools.weather).schema == {
        "type": "function",
        "function": {
            "name": "weather", "description": "Tell the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The name of the city."},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "The unit of the temperature."},
                },
                "required": ["city"],
            },
        },
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "result"), [
    ({"a": 2}, "2"), ({"a": "2", "b": "3"}, "5"), ({"a": "x"}, "error: a: "), ({"a": 1, "c": 2}, "error: c: "),
    ({}, "error: a: "), ("{", "error: JSONDecode"),
])  # fmt: skip
def test_arguments_are_checked_and_errors_are_the_result(arguments: Any, result: str) -> None:
    (text,), caller = answered(call("add", arguments))
    assert text.startswith(result) and (result.startswith("error") or text == result)
    assert (caller.counts.calls, caller.counts.failed) == (1, int(result.startswith("error")))


def test_parallel_calls_run_at_once_and_keep_their_order() -> None:
    all_run = asyncio.Barrier(MAX_CALLS)

    async def meet(number: int) -> int:
        """Wait until all calls run.

        Args:
            number: the result.
        """
        await all_run.wait()
        await asyncio.sleep(0.05)
        return number

    calls = [call("meet", {"number": i}, i) for i in range(MAX_CALLS)]
    texts, caller = answered(*calls, tools=[Tool.from_function(meet)], tool_s=60, places=MAX_CALLS)
    assert texts == [str(i) for i in range(MAX_CALLS)]
    assert (caller.counts.calls, caller.counts.failed, caller.counts.timeouts) == (MAX_CALLS, 0, 0)
    assert caller.counts.tool_s > 0.04 * MAX_CALLS  # the sum of their .05 s


def test_what_goes_wrong_in_a_tool_is_for_the_model_to_read() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise AttributeError("it was never set up")

    def raise_it() -> str:
        """Raise an error that can't be shown."""
        raise SilentError

    tools = [Tool.from_function(function) for function in (example_tools.fail, raise_it)]
    calls = call("fail", {"text": "no such file"}), call("sub", {}, 1), call("raise_it", {}, 2)
    (long,), _ = answered(call("fail", {"text": "x" * 50_000}))
    assert len(long) < MAX_RESULT_CHARACTERS + 50 and long.startswith("error: ValueError: xxx")
    texts, caller = answered(*calls, tools=tools, errors=("'{' is no call",))
    assert (texts[0], texts[3]) == ("error: ValueError: no such file", "error: '{' is no call")
    assert texts[1].startswith("error: LookupError: ") and "'sub'" in texts[1] and "fail, raise_it" in texts[1]
    assert texts[2].startswith("error: SilentError: ")
    assert (caller.counts.calls, caller.counts.failed, caller.counts.timeouts) == (4, 4, 0)


def test_a_tool_that_blocks_its_thread_is_given_up_at_its_limit() -> None:
    released = threading.Event()

    def block(call: int) -> str:
        """Block the thread until all calls have been answered.

        Args:
            call: its number.
        """
        released.wait(600)  # longer than the limit of a test
        return "released"

    async def three_replies() -> list[list[Message]]:
        places, tools = asyncio.Semaphore(40), [Tool.from_function(block)]
        calls = [call("block", {"call": i}, i) for i in range(13)]
        callers = [ToolCaller(tools, 0.2, places, ForeignCode()) for _ in range(3)]
        return await asyncio.gather(*(caller.answer(calls, ()) for caller in callers))

    texts = [message["content"] for answers in asyncio.run(three_replies()) for message in answers]
    released.set()
    assert len(texts) == 39 and all(text.startswith("error: ") and "block" in text for text in texts)


def test_a_reply_with_hundreds_of_calls_holds_up_no_other_episode() -> None:
    released, began = asyncio.Event(), 0

    async def wait() -> str:
        """Wait until another episode has called a tool."""
        nonlocal began
        began += 1
        await released.wait()
        return "done"

    async def ready() -> str:
        """Let the others end."""
        released.set()
        return "ready"

    async def two_episodes() -> tuple[list[Message], list[Message], ToolCaller]:
        places = asyncio.Semaphore(MAX_CALLS + 1)
        tools = [Tool({"type": "function", "function": {"name": f.__name__}}, f) for f in (wait, ready)]
        hog, other = (ToolCaller(tools, 60, places, ForeignCode()) for _ in range(2))
        many = asyncio.create_task(hog.answer([call("wait", {}, i) for i in range(300)], ["'{' is no call"] * 5))
        await asyncio.sleep(0)
        answer = await other.answer([call("ready", {})], ())
        return answer, await many, hog

    (answer,), answers, hog = asyncio.run(two_episodes())
    assert answer["content"] == "ready" and began == MAX_CALLS == len(answers) - 1
    assert answers[-1]["content"].startswith("error: ") and " 289 " in answers[-1]["content"]
    assert (hog.counts.calls, hog.counts.failed) == (305, 289)


def test_a_class_is_a_set_of_tools_with_the_state_of_one_episode() -> None:
    make_add, make_notebook = load_tools([f"{PLACE}:add", f"{PLACE}:Notebook"])
    first, second = make_notebook(), make_notebook()
    assert [tool.name for tool in first] == ["read", "write"] and make_add()[0].name == "add"
    answered(call("write", {"note": "a"}), tools=first)
    answered(call("write", {"note": "b"}), tools=first)
    assert answered(call("read", {}), tools=first)[0] == ['["a", "b"]']
    assert answered(call("read", {}), tools=second)[0] == ["[]"]


@pytest.mark.parametrize(("name", "named"), [
    ("undescribed", ""), ("NOT_A_TOOL", "int"), ("missing", ""), ("Library", "TypeError: .*'folder'"),
    ("Offline", "ConnectionError"),
])  # fmt: skip
def test_what_is_no_tool_is_refused_when_it_is_loaded(name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{named}"):
        load_tools([f"{PLACE}:{name}"])


def test_an_episode_calls_tools_until_the_model_answers() -> None:
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    replies = [
        'Let me add.\n<tool_call>\n{"name":"add",  "arguments":{"a":17,"b":25}}\n</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>{not json}</tool_call>",
        "It is 42.",
    ]
    question = Question(messages=({"role": "user", "content": "17+25?"},), ground_truth="42")
    tools = [Tool.from_function(example_tools.add)]

    async def play() -> Episode:
        reader = ReplyReader(tokenizer, ends, JsonParser("hermes"))
        runner = EnvRunner(EpisodeLimits(tool_s=5, turn_s=5, episode_s=10), 4)
        return await runner.run(
            lambda: QuestionEnv(question, tools),
            lambda: Session(scripted(tokenizer, replies), TurnRenderer(tokenizer, ends), reader, LIMITS),
        )

    episode = asyncio.run(play())
    (row,) = episode.rows
    text, start = tokenizer.decode(row.tokens), int(row.mask.argmax())
    (error,) = re.findall(r"error: '\{not json\}'.*", text)
    assert text[len(tokenizer.decode(row.tokens[:start])) :] == (
        f"{replies[0]}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n"
        "<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"{replies[1]}<|im_end|>\n<|im_start|>user\n<tool_response>\n{error}\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{replies[2]}<|im_end|>"
    )
    trained = tokenizer.decode(row.tokens[row.mask])
    assert trained == "".join(f"{reply}<|im_end|>" for reply in replies)
    assert episode.answer == "It is 42." and episode.metrics["tool_calls"] == 3
    assert episode.metrics["failed_tool_calls"] == 1 and episode.metrics["turns"] == 3
