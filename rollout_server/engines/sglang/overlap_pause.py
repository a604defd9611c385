"""A change to SGLang's overlap schedule: a pause in place reads the forward that is under way before it returns.

With the overlap schedule the scheduler starts a forward before it has read the tokens of the one before. SGLang's pause
in place leaves the last forward in its queue until generation goes on. The tokens of that forward, which the old
weights sampled, would then get the version that the server has by that time, and on a GPU new weights could be written
while the forward still computes with the old ones. All other pauses of SGLang read it first.

A result that was read stays in the queue, so that the scheduler goes on as if it had paused between two forwards of its
schedule without overlap; it is only not read again.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler import Scheduler

_pause = Scheduler.pause_generation
_process = Scheduler.process_batch_result


def install() -> None:
    """Make the change. Call this in the process of SGLang's scheduler before the scheduler starts."""
    Scheduler.pause_generation = _read_and_pause
    Scheduler.process_batch_result = _process_once


def _read_and_pause(scheduler: Any, request: Any) -> None:
    """Pause as SGLang does, but read the forward under way first, which waits until the device has computed it."""
    if request.mode == "in_place" and scheduler.enable_overlap and scheduler.result_queue:
        batch, result = scheduler.result_queue[0]  # there is never more than one between two turns of the loop
        scheduler.process_batch_result(batch, result)
        scheduler.result_read_at_pause = result
    _pause(scheduler, request)


def _process_once(scheduler: Any, batch: Any, result: Any) -> None:
    if getattr(scheduler, "result_read_at_pause", None) is not result:
        _process(scheduler, batch, result)
