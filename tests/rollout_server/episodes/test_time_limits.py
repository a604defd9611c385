"""Whatever the code of one episode raises or cancels, the event loop of all others goes on."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_server.episodes.user_code import Fault, ForeignCode, in_thread


async def exits() -> None:
    sys.exit(2)


async def interrupts() -> None:
    raise KeyboardInterrupt


async def cancels() -> None:
    raise asyncio.CancelledError


async def cancels_its_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


async def exits_in_a_group() -> None:
    raise BaseExceptionGroup("of tasks", [SystemExit(2)])


async def exits_in_a_task() -> None:
    await asyncio.create_task(exits())


async def exits_in_a_task_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exits())
        group.create_task(asyncio.sleep(60))


async def exits_when_cancelled() -> None:
    task = asyncio.create_task(exits_at_its_end())
    await asyncio.sleep(0)
    task.cancel()
    await task


async def exits_at_its_end() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        sys.exit(2)


def threaded(error: BaseException) -> Callable[[], Awaitable[None]]:
    def work() -> None:
        raise error

    return lambda: in_thread(work)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (exits, "SystemExit: 2"), (interrupts, "KeyboardInterrupt"), (cancels, "CancelledError"),
        (cancels_its_task, "CancelledError"), (exits_in_a_group, "SystemExit: 2"), (exits_in_a_task, "SystemExit: 2"),
        (exits_in_a_task_group, "SystemExit: 2"), (exits_when_cancelled, "SystemExit: 2"),
        (threaded(SystemExit(2)), "SystemExit: 2"), (threaded(KeyboardInterrupt()), "KeyboardInterrupt"),
        (threaded(asyncio.CancelledError()), "CancelledError"), (threaded(GeneratorExit()), "GeneratorExit"),
    ],
)  # fmt: skip
def test_code_that_would_end_the_event_loop_ends_its_own_call(code: Any, name: str) -> None:
    async def run() -> Exception:
        other = asyncio.create_task(asyncio.sleep(0.01, "goes on"))
        with pytest.raises(Exception) as raised:
            await ForeignCode().call(code, 20, "the environment's step")
        assert await other == "goes on"
        return raised.value

    fault = Fault.of(asyncio.run(run()))
    assert re.fullmatch(rf"{name}(, at .*test_time_limits\.py:\d+)?", str(fault))
