"""The rules that bound staleness. Pure; the proof that they do is here.

Notation (design.md sections 3 and 5):
    M  staleness.max                    B  learner.prompts_per_step
    v  number of the next batch to choose: that many batches were chosen before it
    p  served version; never falls, p <= v
    s  start version of a group: p at its admission. Its tokens have versions >= s, because every server serves >= p
    d  deadline of a group: s + M, the last batch that may hold it. In batch b <= s + M its tokens are b - s <= M old
    live(d)  number of live groups (running, or finished and in no batch yet) with deadline <= d

Admission:   a group may start while slots_held < (M + 1) B. It holds its slot until it is dropped or until a version
             trained on it is served (batch b yields version b + 1).
Hand-out:    batch v is the B finished groups with the earliest deadlines, ties by id; and it is handed out only once
             they leave live(d) <= (d - v) B for every d in v..v+M.

Claim: whenever the number of the next batch is v,   live(d) <= (d - v + 1) B   for every d >= v.              (*)
For d = v - 1 the same holds as live(v - 1) = 0: nobody has missed a deadline. So no token of a batch is older than M.

Proof, by induction over events. At the start nothing is live.
  Hand-out of batch v leaves live(d) <= (d - v) B for d in v..v+M, which is (*) for v + 1 (and its d = v is the zero).
      Beyond v + M there is nothing to show: s <= p <= v, so no deadline is later.
  Finishing does not change live(d); a drop lowers it; p and v rising by the learner's doing does not change it.
  Admission at served version p: the new group's deadline is p + M, so only live(d) with d >= p + M grows. The batches
      p..v-1 yield versions p+1..v, none of them served, so their (v - p) B groups hold slots. Hence after admission
      live(d) <= slots_held - (v - p) B <= (M + 1) B - (v - p) B = (p + M - v + 1) B <= (d - v + 1) B.
Choosing the earliest deadlines takes as many groups with deadline <= d as any choice of B finished groups can, for
every d at once: if it fails the condition, every choice does, and waiting is right.

No deadlock: a wait for a batch ends once all that runs has finished, for then the earliest B of the live groups leave
max(0, live(d) - B) <= (d - v) B by (*). And there are B live groups, or else there is room to admit: of (M + 1) B slots
at most (v - p) B are held by trained groups, and the learner waits with v - p < weight_sync.every_steps <= M + 1
(Config refuses anything else), which leaves at least B. Running groups wait for nobody but their engine.
"""

from __future__ import annotations

from collections.abc import Iterable


def admission_capacity(slots_held: int, max_staleness: int, prompts_per_step: int) -> int:
    """Groups that may start now."""
    return max(0, (max_staleness + 1) * prompts_per_step - slots_held)


def deadline(start_version: int, max_staleness: int) -> int:
    """Number of the last batch that may hold a group started at `start_version`."""
    return start_version + max_staleness


def choose_batch(
    finished: Iterable[tuple[int, int]],
    running: Iterable[int],
    version: int,
    max_staleness: int,
    prompts_per_step: int,
) -> list[int] | None:
    """The groups of batch `version`, by group id; None while the learner has to wait.

    Args:
        finished: (deadline, group id) of every finished group that is in no batch yet.
        running: deadline of every running group.
    """
    earliest = sorted(finished)
    chosen, left = earliest[:prompts_per_step], earliest[prompts_per_step:]
    if len(chosen) < prompts_per_step:
        return None
    left_deadlines = [*running, *(d for d, _ in left)]
    if overfull_deadline(left_deadlines, version, max_staleness, prompts_per_step) is not None:
        return None
    return sorted(group_id for _, group_id in chosen)


def overfull_deadline(
    deadlines: Iterable[int], version: int, max_staleness: int, prompts_per_step: int
) -> int | None:
    """The first d in version..version+max_staleness with more than (d - version) * B of `deadlines` <= d, if any.

    With the deadlines that batch `version` would leave behind it says whether all of them can still be met.
    """
    counts = [0] * (max_staleness + 1)  # [d - version] groups with exactly this deadline
    for d in deadlines:
        counts[max(0, d - version)] += 1
    total = 0
    for ahead, count in enumerate(counts):
        total += count
        if total > ahead * prompts_per_step:
            return version + ahead
    return None
