"""Agents as a user writes them, for a process of their own: they import nothing of this project."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
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
    print("working on", question.ground_truth)
    return float(ask(base_url, list(question.messages)) == question.ground_truth)


async def solve_or_die(question: Any, base_url: str, api_key: str) -> float:
    """The first process dies."""
    marker = question.extra["marker"]
    if not os.path.exists(marker):
        with open(marker, "w"):
            os._exit(3)
    return await asyncio.to_thread(solve, question, base_url, api_key)


def die(question: Any, base_url: str, api_key: str) -> float:
    os._exit(3)


async def misbehave(question: Any, base_url: str, api_key: str) -> float:
    """Does what the question's `act` says, after a reply; without one it works."""
    reward = await asyncio.to_thread(solve, question, base_url, api_key)
    act = question.extra.get("act")
    if act == "read":
        subprocess.run("cat", shell=True, check=True)  # whatever standard input holds
    if act == "read itself":
        sys.stdin.read()
    if act == "forget":
        return None  # type: ignore[return-value]
    if act == "overshoot":
        return 10**5000  # no float
    if act == "exit":
        sys.exit(2)
    if act == "exit in a task":
        await asyncio.create_task(exit_later())
    if act == "cancel":
        raise asyncio.CancelledError
    if act == "lose":
        raise ConnectionResetError("gone")
    if act == "fork and die":
        if os.fork() == 0:
            time.sleep(20)  # the child outlives the process, with copies of its files
            os._exit(0)
        os._exit(3)
    if act == "shout":
        raise RuntimeError("x" * 2**25)
    if act in ("garble", "nest"):
        line = b"x" * 2**25 if act == "garble" else b"[" * 10**6
        for descriptor in os.listdir("/proc/self/fd"):  # the pipe to the worker is one of them
            with contextlib.suppress(OSError):
                if int(descriptor) > 2 and stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode):
                    os.write(int(descriptor), line + b"\n")
    return reward


async def exit_later() -> None:
    sys.exit(2)


async def hang(question: Any, base_url: str, api_key: str) -> float:
    await asyncio.to_thread(solve, question, base_url, api_key)
    try:
        await asyncio.sleep(60)
    finally:
        with open(question.extra["marker"], "w") as file:
            file.write("cancelled")
    return 1.0
