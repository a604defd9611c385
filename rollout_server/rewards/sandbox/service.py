"""Runs programs at a service that speaks SandboxFusion's API (https://github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from async_rl.base.errors import ConfigError
from rollout_server.rewards.sandbox.bubblewrap import DEFAULT_LIMITS, Ended, RunLimits, RunProgram, SandboxDiedError

_COMPILE_S = 10.0
MARGIN_S = 10.0
"""A run ends at most this long after its time limit, whatever the service does: queue, compile, fail, send slowly."""
_MAX_CHARACTERS, _REST_BYTES = 12, 1 << 20
"""The bytes of JSON for a byte of output and of errors (6 each), and the bytes of the rest of a reply."""
PAUSES_S = (1.0, 4.0)
"""The pauses before a request is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Runs programs by `POST /run_code`. The service contains them, and limits their output.

    Args:
        url: its address.
        language: the language of the programs, by the service's name for it.
    """

    url: str
    language: str = "python"

    @contextmanager
    def open(self, setup: str = "") -> Iterator[RunProgram]:
        """Yield the function that runs a program; each run is a request of its own."""
        yield self.run

    def run(self, program: str, stdin: str = "", limits: RunLimits = DEFAULT_LIMITS) -> Ended:
        """Run a program. SandboxDiedError: the service did not run it, also when asked again."""
        request = {
            "code": program, "stdin": stdin, "language": self.language, "compile_timeout": _COMPILE_S,
            "run_timeout": limits.wall_s, "memory_limit_MB": limits.memory_bytes >> 20,
        }  # fmt: skip
        end_s = time.monotonic() + limits.wall_s + MARGIN_S
        for pause_s in (*PAUSES_S, math.inf):
            try:
                return self._asked(request, limits, end_s)
            except (OSError, ValueError, LookupError, AttributeError, SandboxDiedError) as error:
                if time.monotonic() + pause_s + limits.wall_s > end_s:  # no time for another try
                    raise SandboxDiedError(f"the sandbox service {self.url} ran no program: {error}") from error
                time.sleep(pause_s)
        raise AssertionError

    def check(self) -> None:
        """Run a program. ConfigError: the service does not answer, or does not know the language."""
        program = "print('found')" if self.language == "python" else ""
        try:
            ended = self.run(program)
        except SandboxDiedError as error:
            raise ConfigError(f"task.sandbox.url: {error}") from None
        if program and ended.output.strip() != "found":
            raise ConfigError(f"task.sandbox.url: {self.url} ran print('found') and returned {ended.output!r:.80}")

    def _asked(self, request: dict[str, Any], limits: RunLimits, end_s: float) -> Ended:
        data, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url.rstrip('/')}/run_code", data, headers)
        with urllib.request.urlopen(asked, timeout=end_s - time.monotonic()) as reply:
            found = json.loads(_read(reply, end_s, _MAX_CHARACTERS * limits.output_bytes + _REST_BYTES))
        runs = [found.get(name) for name in ("compile_result", "run_result") if found.get(name)]
        if found["status"] == "SandboxError" or not runs:
            raise SandboxDiedError(f"{found.get('message') or 'it gave no reason'}"[:300])
        last = runs[-1]  # a program that did not compile did not run
        code = last.get("return_code")
        return Ended(
            exit_code=1 if code is None else int(code), output=(last.get("stdout") or "")[: limits.output_bytes],
            errors=(last.get("stderr") or "")[: limits.output_bytes], is_late=last["status"] == "TimeLimitExceeded",
            cpu_s=float(last.get("execution_time") or 0),
        )  # fmt: skip


def _read(reply: HTTPResponse, end_s: float, max_bytes: int) -> bytes:
    """Return the body of a reply. SandboxDiedError: it is too long, or has not come in time."""
    body = bytearray()
    while chunk := reply.read1(1 << 16):
        body += chunk
        if len(body) > max_bytes:
            raise SandboxDiedError(f"its reply has more than {max_bytes} bytes")
        if time.monotonic() > end_s:
            raise SandboxDiedError("its reply did not come in time")
    return bytes(body)
