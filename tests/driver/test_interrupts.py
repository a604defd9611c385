"""The end of a run after the first Ctrl-C or SIGTERM. Processes are fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.driver.run_log import RunLog
from async_rl.driver.supervisor import Supervisor
from tests.kit.configs import make_config


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_interrupted_run_is_given_up_only_if_a_rank_still_trains(has_ended: bool, tmp_path: Path) -> None:
    """After the checkpoint the driver may still wait for the servers' last reports."""
    config = make_config(run={"dir": tmp_path}, timeouts={"interrupt_s": 0.01})
    log = RunLog(config)

    def stop() -> None:
        if has_ended:
            asyncio.get_running_loop().call_soon(supervisor._learning.clear)

    processes: Any = SimpleNamespace(actors={"learner/0": SimpleNamespace(stop=SimpleNamespace(remote=stop))})
    supervisor = Supervisor(config, processes, log)
    supervisor._learning = {"learner/0"}

    async def end() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await supervisor._end_on(stopping)

    if has_ended:
        asyncio.run(end())
    else:
        with pytest.raises(KeyboardInterrupt, match=r"no checkpoint within 0 s \(timeouts\.interrupt_s\) of the inter"):
            asyncio.run(end())
    log.close()
