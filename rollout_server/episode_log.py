"""The log of the episodes that a worker plays: their metrics for its reports, and lines for the console."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from async_rl.config import Config
from async_rl.telemetry.metrics import Metric
from rollout_server.episodes.episode import ENDS, Episode, episode_metrics

_log = logging.getLogger(__name__)


class EpisodeLog:
    """Collects the metrics of a worker's episodes, and the first error of each kind as a line for the console."""

    def __init__(self, worker: str, config: Config) -> None:
        self._worker = worker
        self._has_turns = config.task.has_turns
        self._max_rows = config.rollout.max_rows
        self._episodes: list[Mapping[str, float]] = []
        """The metrics of each episode of several turns since the last call of `drain_metrics`."""
        self._noted: set[str] = set()
        """The kinds of errors that the console was told of."""
        self._notes: list[str] = []
        self.report_now = asyncio.Event()
        """Set for lines that must not come after the end of a run that they explain."""

    def add(self, episodes: Sequence[Episode], origin: str, *, are_trained: bool) -> None:
        """Add the errors of episodes to the notes and, if they are to be trained on, their metrics to the next report.

        Args:
            origin: the row of the data of which they are episodes, in words.
            are_trained: False for held-out and greedy episodes, which would change the means of the others.
        """
        for episode in episodes:
            if self._has_turns and are_trained:
                ends = {f"end_{end}": float(episode.end == end) for end in ENDS}
                dropped_rows = max(0, len(episode.rows) - self._max_rows)
                self._episodes.append(episode.metrics | ends | {"dropped_rows": dropped_rows})
            if episode.error:
                self._note_error(episode, origin, is_trained=are_trained)

    def note(self, text: str) -> None:
        """Send a line to the console now."""
        self._notes.append(f"{self._worker}: {text}")
        self.report_now.set()

    def note_once(self, kind: str, text: str) -> bool:
        """Add a line for the console to the next report and return True, unless one of its `kind` was added before."""
        if kind in self._noted:
            return False
        self._noted.add(kind)
        self._notes.append(f"{self._worker}: {text}")
        return True

    def drain_metrics(self) -> list[Metric]:
        """Return the metrics of the episodes that were added since the last call."""
        episodes, self._episodes = self._episodes, []
        return list(episode_metrics(episodes))

    def drain_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _note_error(self, episode: Episode, origin: str, *, is_trained: bool) -> None:
        which = "an episode" if is_trained else "a held-out or greedy episode"
        said = f"{which} ended with `{episode.end}`: {episode.error} (on {origin})"
        rest = f"only counted, in episode/end_{episode.end}" if is_trained else "not shown"
        reward = " Its reward is 0." if episode.end == "error" else ""
        is_new = self.note_once(episode.error_kind, f"{said}.{reward} Further ones of this kind are {rest}")
        if is_new and episode.traceback:
            _log.warning("%s\n%s", said, episode.traceback)
