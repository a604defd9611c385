"""Tells which step of a run is the last one, by run.steps or run.seconds."""

from __future__ import annotations

import torch
import torch.distributed as dist

from async_rl.config import RunConfig


class RunLimit:
    """The end of a run, the same on every rank. The seconds count from the end of the first step."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._first_step_s: float | None = None

    def is_reached(self, version: int, now_s: float) -> bool:
        """Return whether the step that ends now, at `now_s` of time.monotonic, and made `version` is the last one."""
        if self._first_step_s is None:
            self._first_step_s = now_s
        late = torch.tensor(self._run.seconds > 0 and now_s - self._first_step_s >= self._run.seconds)
        if self._run.seconds > 0:
            dist.broadcast(late, 0)
        return version >= self._run.steps or bool(late)
