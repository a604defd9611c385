"""The reward `code`: runs the program in an answer against the tests of its question, in a sandbox.

If a program fails, hangs, or does something forbidden, only its own answer loses the reward. If the sandbox itself
dies, there is no verdict.
"""

from __future__ import annotations

import builtins
import re
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.section import section
from async_rl.base.config.task_parts import SandboxConfig
from async_rl.base.host import usable_cores
from rollout_server.question import Question
from rollout_server.rewards.code.cases import read_cases
from rollout_server.rewards.code.sandbox import (
    MARGIN_S,
    SERVICE_MARGIN_S,
    Bubblewrap,
    RunLimits,
    SandboxDiedError,
    Service,
)
from rollout_server.rewards.contract import Reward, RewardResult

_STARRED = ("typing", "collections", "functools", "heapq", "itertools", "bisect", "math")
_MODULES = (*_STARRED[1:], "datetime", "json", "operator", "random", "re", "string", "sys")


def _provided() -> dict[str, str]:
    found: dict[str, str] = {}
    for module in _STARRED:
        names: dict[str, object] = {}
        exec(f"from {module} import *", names)
        of_module = [name for name in names if not name.startswith("_") and not hasattr(builtins, name)]
        found |= {name: f"from {module} import {name}" for name in of_module}
    return found | {module: f"import {module}" for module in _MODULES}


PROVIDED = _provided()
"""For each name that verl's checker provides to programs, the import of it. A program gets only the imports that it
uses, because all of them take longer than Python takes to start."""
_NOT_MAIN = 'import sys; __name__ = "answer"; sys.modules[__name__] = sys.modules["__main__"]'
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^()]*\)|[^\n;(#]+)", re.MULTILINE)
_WORDS = ("python", "py", "python3", "py3")
"""The words after ``` that mark a program."""
_BLOCK = re.compile(
    r"```[^\n`]+```(?![\w+#-]+[ \t]*\r?\n)"
    r"|(?:^[ \t]*(?:[-*+>]|\d+[.)])?[ \t]*```[ \t]*\{?\.?([\w+#-]*)[^\n`]*"
    r"|```([\w+#-]*)[ \t]*\r?)\n(.*?)```",
    re.DOTALL | re.MULTILINE,
)
"""Matches code within a line, with no groups, or a block of code, with groups: its first word is in one of two
groups, its code in the third. At the start of a line ``` may have more words after it, elsewhere at most one."""


@section("task.rewards.params")
class CodeSettings:
    """The settings of the reward `code`."""

    partial: bool = False
    """The reward is the share of the first `max_cases` tests that pass. If false, it is 1 if all tests pass, else 0."""
    max_cases: PositiveInt = 10
    """How many tests are run, if `partial` is set."""
    timeout_s: PositiveFloat = 6.0
    """How long one run of a program may take."""
    answer_s: PositiveFloat = 20.0
    """How long all runs of an answer may take together. Tests that are left then count as failed."""
    memory_bytes: Annotated[int, Field(ge=1 << 24)] = 512 << 20
    """The memory that each process of a program may use."""
    wrap: str = ""
    """A program to run, with {answer} replaced by the whole answer. Empty: the answer's last block of code is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChecker:
    """Scores answers by running the programs in them in a sandbox."""

    sandbox: Bubblewrap | Service
    settings: CodeSettings

    def score(self, question: Question, response: str) -> RewardResult:
        """Return 1 or 0, or with `partial` the share of tests that pass, with metrics of the runs."""
        settings, cases = self.settings, read_cases(question.ground_truth)
        program = find_program(response, settings.wrap)
        if program is None:
            return RewardResult(0.0, {"no_code": 1.0, "passed": 0.0, "late": 0.0, "cheatable": 0.0})
        cases = cases[: settings.max_cases] if settings.partial else cases
        end_s = time.monotonic() + settings.answer_s
        passed, is_late = 0, False
        try:
            shared = imports((program, *(case.suffix for case in cases)))
            with self.sandbox.open("\n".join(shared)) as run:
                for case in cases:
                    wall_s = min(settings.timeout_s, end_s - time.monotonic())
                    if wall_s <= 0:
                        is_late = True
                        break
                    limits = RunLimits(wall_s=wall_s, cpu_s=settings.timeout_s, memory_bytes=settings.memory_bytes)
                    ended = run(whole_program(program, case.suffix), case.stdin, limits)
                    is_late |= ended.is_late
                    # The exit code alone never passes a test: what comes out must be what is expected.
                    is_passed = not ended.is_late and ended.exit_code == 0 and case.is_passed_by(ended.output)
                    passed += is_passed
                    if not is_passed and not settings.partial:
                        break
        except SandboxDiedError as error:
            return RewardResult(None, reason=str(error))
        score = passed / len(cases) if settings.partial else float(passed == len(cases))
        cheatable = sum(case.is_cheatable for case in cases) / len(cases)
        metrics = {"no_code": 0.0, "passed": passed / len(cases), "late": float(is_late), "cheatable": cheatable}
        return RewardResult(score, metrics, is_final=not is_late)  # on another day it may be fast enough


def imports(texts: Iterable[str]) -> list[str]:
    """Return the imports of the PROVIDED names that these texts use."""
    words = dict.fromkeys(word for text in texts for word in re.findall(r"[^\W\d]\w*", text))
    return [PROVIDED[word] for word in words if word in PROVIDED]


def whole_program(program: str, suffix: str) -> str:
    """Return the program to run: the answer, followed by the code of the test case.

    It begins with the answer's imports of __future__, which must come first, and then the imports that verl's checker
    provides. If the case calls a function, the answer's `if __name__ == "__main__"` block does not run.
    """
    futures = [each[0].strip() for each in _FUTURE.finditer(program)]
    prelude = [*futures, *imports((program, suffix)), *([_NOT_MAIN] if suffix else [])]
    return "\n".join((*prelude, _FUTURE.sub("pass", program), suffix))


def find_program(response: str, wrap: str = "") -> str | None:
    """Return the answer's last block of Python, or `wrap` with the whole answer in it; None: there is no block.

    A block without a word is the program only if no block has a word: after a program it may be the program's output.
    """
    if wrap:
        return wrap.replace("{answer}", response.strip())
    _, _, answer = response.rpartition("</think>")  # a draft in its thoughts counts only if there is no other program
    blocks = _blocks(answer) or _blocks(response)
    found = [code for word, code in blocks if word in _WORDS] or [code for word, code in blocks if not word]
    if not found:
        return None
    program = found[-1].replace("\r\n", "\n")
    return textwrap.dedent(program) if program[:1].isspace() else program  # a block in a list is indented


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return (word after ```, code) of each block of code."""
    found = (each for each in _BLOCK.finditer(text) if each[3] is not None)
    return [((each[1] or each[2] or "").lower(), each[3]) for each in found]


@asynccontextmanager
async def open_code(config: Config, settings: CodeSettings) -> AsyncIterator[Callable[..., RewardResult]]:
    """A context with the function that scores an answer."""
    yield CodeChecker(sandbox=sandbox_of(config.task.sandbox), settings=settings).score


def sandbox_of(config: SandboxConfig) -> Bubblewrap | Service:
    """Return the sandbox that task.sandbox configures: bubblewrap or a service."""
    return Service(url=config.url) if config.url else Bubblewrap(is_contained=config.kind != "none")


def check_code(config: Config, settings: CodeSettings, timeout_s: float, key: str) -> None:
    """Check that the sandbox works on this host, and that a slow program costs only its own answer the reward.

    Args:
        timeout_s: the time limit of a call of the reward, which must exceed `answer_s` by a margin.
        key: the configuration key of the reward, for error messages.

    Raises:
        ConfigError: one of the two checks failed.
    """
    margin_s, limit = SERVICE_MARGIN_S if config.task.sandbox.url else MARGIN_S, "timeouts.reward_s"
    check(
        settings.answer_s + margin_s <= timeout_s, limit if key == "task.reward" else f"{key}.timeout_s", timeout_s,
        f"at least {settings.answer_s + margin_s:g}, {margin_s:g} s more than answer_s of {key}",
        "Else a slow program would cost its whole group the reward.",
    )
    sandbox_of(config.task.sandbox).check()


CODE = Reward(
    open=open_code, settings=CodeSettings, is_function_of_input=True, inputs=lambda config: str(config.task.sandbox),
    modules=("rollout_server.rewards.code",), concurrency=max(2, usable_cores()),
    check=check_code, describe=lambda config, settings: f"programs {config.task.sandbox}",
)
