"""The end of a run after the first Ctrl-C or SIGTERM. Processes are fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.supervisor import Supervisor
from tests.kit.configs import make_config


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_run_is_given_up_only_if_a_rank_still_runs(is_late: bool, tmp_path: Path) -> None:
    """After the checkpoint the driver may still wait for the servers' last reports, and a rank for servers to answer.
    """
    config = make_config(run={"dir": tmp_path}, timeouts={"interrupt_s": 0.01})
    log = RunLog(config)

    def stop() -> None:
        if not is_late:
            asyncio.get_running_loop().call_soon(supervisor._learning.clear)

    processes: Any = SimpleNamespace(actors={"learner/0": SimpleNamespace(stop=SimpleNamespace(remote=stop))})
    supervisor = Supervisor(config, processes, log)
    supervisor._learning = {"learner/0"}

    async def end() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await supervisor._end_on(stopping)

    if is_late:
        with pytest.raises(KeyboardInterrupt, match=r"timeouts\.interrupt_s"):
            asyncio.run(end())
    else:
        asyncio.run(end())
    log.close()
