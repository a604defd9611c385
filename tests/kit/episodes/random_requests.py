"""Random requests to the endpoint of agents: well formed, nearly so, and not at all."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

HEADERS: tuple[dict[str, str], ...] = (
    {}, {}, {},
    {"Content-Type": "application/json; charset=nonsense"}, {"Content-Type": "application/json; charset=\x22"},
    {"Content-Type": "text/plain; charset=utf-16"}, {"Content-Type": "multipart/form-data"}, {"Content-Type": ""},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}, {"Content-Encoding": "br"},
    {"Content-Encoding": "zstd"}, {"Content-Encoding": "nonsense"}, {"Expect": "nonsense"}, {"Authorization": "x"},
    {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "nonsense"}, {"Connection": "close"},
    {"Accept-Encoding": "gzip"}, {"Upgrade": "websocket", "Connection": "Upgrade"},
)  # fmt: skip


def nested(depth: int, rng: random.Random) -> str:
    """JSON text of lists or objects that are nested this deeply."""
    return "[" * depth + "]" * depth if rng.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth


def value(rng: random.Random) -> Any:
    return rng.choice(
        [None, True, False, 0, -1, 1, 5, 2**70, 1.5, float("nan"), float("inf"), 10**40, "", "x", "\ud800", "\x00",
         "<|im_end|>", "none", "auto", "required", [], [1], {}, {"a": 1}, [None], ["x"], {"text": "t"},
         [{"type": "text", "text": "t"}], [{"type": "image_url"}], [{"type": "refusal", "refusal": "r"}],
         {"type": "json_object"}, {"include_usage": True}]
    )  # fmt: skip


def call(rng: random.Random) -> Any:
    return rng.choice(
        [{}, {"id": 1, "function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "f", "arguments": {}}},
         {"function": {"name": "f", "arguments": "[" * 5000}}, {"function": {"name": "f", "arguments": "1" * 5000}},
         {"function": {"name": "\ud800", "arguments": '{"a": NaN}'}}, {"function": []}, "x", None, [1]]
    )  # fmt: skip


def message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return value(rng)
    roles = ["user", "user", "assistant", "tool", "system", "developer", "function", "x", "", 1, None]
    said: dict[str, Any] = {"role": rng.choice(roles), "content": rng.choice(["a", "b", value(rng)])}
    if rng.random() < 0.3:
        said["tool_calls"] = [call(rng) for _ in range(rng.randint(0, 2))] if rng.random() < 0.8 else value(rng)
    for name in ("tool_call_id", "name", "refusal"):
        if rng.random() < 0.2:
            said[name] = value(rng)
    return said


def body(rng: random.Random) -> dict[str, Any]:
    messages = [message(rng) for _ in range(rng.choice([0, 0, 0, 1, 2, 4]))]
    asked: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": rng.choice(["a", "b", "\ud800"])}]}
    if rng.random() < 0.1:
        asked["messages"] = value(rng)
    for name in (
        "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "n", "logit_bias", "logprobs",
        "tools", "functions", "model", "temperature", "tool_choice", "response_format", "parallel_tool_calls",
    ):  # fmt: skip
        if rng.random() < 0.07:
            asked[name] = value(rng)
    if rng.random() < 0.3:
        function = {"name": rng.choice(["f", "\ud800", 1]), "description": value(rng), "parameters": value(rng)}
        asked["tools"] = [{"type": "function", "function": function}]
    return asked


def request(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """The body of a request and its headers: a body that is read in most cases, or one that was damaged."""
    text = json.dumps(body(rng))
    damage = rng.randrange(12)
    if damage == 0:
        deep = nested(rng.choice([50, rng.randint(850, 1100), 100_000]), rng)
        where = rng.choice(['"messages"', '"model"', '"tools"', '"stop"', '"x"'])
        text = f"{{{where}: {deep}, {text[1:]}" if rng.random() < 0.5 else f"{text[:-1]}, {where}: {deep}}}"
    data = text.encode("utf-16" if damage == 1 else "utf-8")
    if damage == 2:
        data = data[: rng.randrange(len(data))]
    elif damage == 3:
        place = rng.randrange(len(data))
        data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
    elif damage == 4:
        data = rng.randbytes(rng.randrange(100))
    headers = rng.choice(HEADERS)
    if headers.get("Content-Encoding") == "gzip" and rng.random() < 0.5:
        data = gzip.compress(data)
    return data, headers
