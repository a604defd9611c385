"""Compares answers with math-verify (https://github.com/huggingface/Math-Verify), which runs in child processes.

math-verify's own timeouts are signals, which only a main thread receives, and an answer like `9^9^9^9` would hold the
interpreter lock of the rollout worker for minutes. A child process can be killed.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, cast

from async_rl.base.cores import usable_cores
from async_rl.base.errors import RewardError
from rollout_server.rewards.reward_threads import MAX_THREADS

CHECK_TIMEOUT_S = 5.0
"""A child whose check takes longer ends itself."""
ANSWER_TIMEOUT_S = 30.0
"""A child that does not reply within this time, including its start, is killed."""
IDLE_TIMEOUT_S = 300.0
"""The longest wait for an idle child. A reward function of the user's may call from more threads than there are
children; timeouts.reward_s usually ends its wait earlier."""


def num_children() -> int:
    """Return how many math-verify processes (60 MB each) a worker has: one per usable core, in 2..MAX_THREADS."""
    return min(MAX_THREADS, max(2, usable_cores()))


class MathChecker:
    """A pool of math-verify processes that any thread may use. They start when needed and end with this process."""

    def __init__(self) -> None:
        self._num_children = num_children()
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(self._num_children):
            self._idle.put(None)

    def is_equal(self, response: str, gold: str) -> bool:
        """Return whether the response's final answer equals `gold`, in LaTeX; False if that takes over CHECK_TIMEOUT_S.

        Raises:
            RewardError: math-verify can't run, its process hangs, or no process was idle within 300 s.
        """
        try:
            child = self._idle.get(timeout=IDLE_TIMEOUT_S)
        except queue.Empty:
            raise RewardError(
                f"an answer waited {IDLE_TIMEOUT_S:.0f} s for one of the {self._num_children} math-verify processes "
                "to be idle"
            ) from None
        kept: subprocess.Popen[str] | None = None
        try:
            child = child or _start()
            reply = _ask(child, {"gold": gold, "response": response, "timeout_s": CHECK_TIMEOUT_S})
            if reply:
                kept = child
                return bool(json.loads(reply))
            returncode = child.wait(ANSWER_TIMEOUT_S)  # the child has closed its output, so it is ending
            if returncode == -signal.SIGALRM:
                return False
            raise RewardError(f"the math-verify process ended with code {returncode}: is math-verify installed?")
        finally:
            self._idle.put(kept)


def _ask(child: subprocess.Popen[str], request: dict[str, object]) -> str:
    """Send a request to a math-verify process and return its reply, `true` or `false`; "" if the process has ended.

    RewardError: it did not answer within ANSWER_TIMEOUT_S, and was killed.
    """
    answers = cast(IO[str], child.stdout)
    try:
        print(json.dumps(request), file=child.stdin, flush=True)
        if wait([answers.fileno()], ANSWER_TIMEOUT_S):
            return answers.readline()
    except BrokenPipeError:
        return ""
    child.kill()
    raise RewardError(
        f"the math-verify process {child.pid} did not answer for {ANSWER_TIMEOUT_S:.0f} s, nor end; it was killed"
    )


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
