"""Processes that find imported what takes seconds to import: they are forked from a server that has done it once.

The server starts with the first of them and lives as long as the process that tests. It has the environment
variables of that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp

IMPORTED = [
    "benchmarks.weight_receiver", "learner.loop.updater", "learner.loop.pushes", "rollout_server.engines.hf.engine",
    "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2",
]  # fmt: skip


def forked() -> ForkServerContext:
    """The context of multiprocessing that starts such processes."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def start_ranks(main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run main(rank, *arguments) as each of `ranks` ranks, and wait until all have ended; if one fails, so does this.
    """
    forked()
    mp.start_processes(main, arguments, nprocs=ranks, start_method="forkserver")
