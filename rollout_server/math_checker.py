"""math-verify (https://github.com/huggingface/Math-Verify) in child processes.

Its own timeouts are signals, which only a main thread can take, and a model's `9^9^9^9` would hold the
interpreter lock of the rollout worker for minutes. A child can be ended.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from async_rl.errors import RewardError

NUM_CHILDREN = 2
CHECK_TIMEOUT_S = 5.0


class MathChecker:
    """Call `is_equal` from any thread. The children start with the first calls and end with this process."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(NUM_CHILDREN):
            self._idle.put(None)

    def is_equal(self, response: str, gold: str) -> bool:
        """Whether the response's final answer equals `gold`, a LaTeX or plain expression.

        False also when the comparison takes more than 5 s or too much memory: an answer nobody can check is
        no answer. Raises RewardError when the child can't run at all.
        """
        child = self._idle.get()
        try:
            if child is None:
                child = _start()
            request = {"gold": gold, "response": response, "timeout_s": CHECK_TIMEOUT_S}
            try:
                print(json.dumps(request), file=child.stdin, flush=True)
                reply = cast(IO[str], child.stdout).readline()
            except BrokenPipeError:
                reply = ""
            if reply:
                return bool(json.loads(reply))
            returncode, child = child.wait(), None
            if returncode == -signal.SIGALRM:
                return False
            raise RewardError(f"the math-verify process ended with code {returncode}: is it installed?")
        finally:
            self._idle.put(child)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("math_child.py"))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
