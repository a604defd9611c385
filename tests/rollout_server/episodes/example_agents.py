"""Agents as a user writes them, for a process of their own: they import nothing of this project."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from typing import Any


def ask(base_url: str, messages: list[Any]) -> str:
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps({"messages": messages}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=20) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def solve(question: Any, base_url: str, api_key: str) -> float:
    print("working on", question.answer)
    return float(ask(base_url, list(question.messages)) == question.answer)


async def solve_or_die(question: Any, base_url: str, api_key: str) -> float:
    """The first process dies."""
    marker = question.extra["marker"]
    if not os.path.exists(marker):
        with open(marker, "w"):
            os._exit(3)
    return await asyncio.to_thread(solve, question, base_url, api_key)


def die(question: Any, base_url: str, api_key: str) -> float:
    os._exit(3)


def fail(question: Any, base_url: str, api_key: str) -> float:
    raise KeyError("oops")


async def hang(question: Any, base_url: str, api_key: str) -> float:
    await asyncio.to_thread(solve, question, base_url, api_key)
    try:
        await asyncio.sleep(60)
    finally:
        with open(question.extra["marker"], "w") as file:
            file.write("cancelled")
    return 1.0


def block(question: Any, base_url: str, api_key: str) -> float:
    time.sleep(600)  # longer than any test may take
    return 1.0
