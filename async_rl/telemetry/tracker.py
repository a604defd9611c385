"""The common part of the trackers (wandb, trackio, TensorBoard): their failures can't end a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Tracker:
    """Passes metrics to the run object of a tracking library.

    After the first failure, which `note` reports, nothing more is passed on.
    """

    library: ClassVar[str]

    def __init__(self, run: Any, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note
        self._failed = False

    def begin_lineage(self) -> None:
        """Note that a resume has made its first step, or has come to the end of the run, and is not undone any more."""

    def close(self) -> None:
        """End the run at the tracking library."""
        self._attempt(self._run.finish)

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # nothing that a tracking library raises may end the run
            self._failed = True
            self._note(f"{self.library}: off from here on, the run goes on: {type(error).__name__}: {error}")
