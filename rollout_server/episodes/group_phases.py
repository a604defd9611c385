"""Splits the time of a rollout group into phases: its queue, its slowest episode in turn, and its rewards."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.learner_waits import Phase
from rollout_server.episodes.episode import Episode


def group_phases(episodes: Sequence[Episode], granted_s: float, began_s: float, scored_s: float) -> list[Phase]:
    """Return the phases of a group from the grant of its slot to its last reward, oldest first.

    Those between the group's begin and its rewards are those of the episode that ended last: while it samples a reply
    it is in `generate`, and else with its tools, environment or agent.

    Args:
        episodes: all episodes of the group, failed ones too.
        granted_s, began_s, scored_s: when the slot was granted, the episodes began, and the last reward was there; by
            the event loop's clock.
    """
    slowest = max(episodes, key=lambda episode: episode.ended_s)
    phases = [Phase("queued", began_s - granted_s)]
    at_s = began_s
    for start_s, end_s in sorted(slowest.reply_times):
        if start_s > at_s:
            phases.append(Phase("tools", start_s - at_s))
            at_s = start_s
        if end_s > at_s:
            phases.append(Phase("generate", end_s - at_s))
            at_s = end_s
    phases += [Phase("tools", slowest.ended_s - at_s), Phase("rewards", scored_s - slowest.ended_s)]
    return [phase for phase in phases if phase.seconds > 0]
