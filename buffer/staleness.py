"""The rules that bound staleness. Pure; the proof that they do is here.

Notation:
    M  staleness.max                    B  learner.prompts_per_step
    F  ceil(buffer.fresh_fraction * B): fresh groups (in no batch yet) that every batch holds at least; B without replay
    E  weight_sync.every_steps          v  number of the next batch to choose: that many batches were chosen before it
    p  served version; never falls, p <= v
    s  start version of a group: p at its admission. Its tokens have versions >= s, because every server serves >= p
    d  deadline of a group: s + M, the last batch that may hold it. In batch b <= s + M its tokens are b - s <= M old
    live(d)  number of live groups (running, or finished and in no batch yet) with deadline <= d

Admission:   a group may start while slots_held < (M + 1) F. It holds its slot until it is dropped or until a version
             trained on it is served (batch b yields version b + 1). A used group holds none.
Hand-out:    batch v is n fresh groups with the earliest deadlines, ties by id, and B - n used ones within their
             deadlines; n is the smallest number >= F for which there are that many used ones and which leaves
             live(d) <= (d - v) F for every d in v..v+M. While there is no such n <= B, the learner waits.

Claim: whenever the number of the next batch is v,   live(d) <= (d - v + 1) F   for every d >= v.              (*)
For d = v - 1 the same holds as live(v - 1) = 0: nobody has missed a deadline. So no token of a batch is older than M.

Proof, by induction over events. At the start nothing is live.
  Hand-out of batch v leaves live(d) <= (d - v) F for d in v..v+M, which is (*) for v + 1 (and its d = v is the zero).
      Beyond v + M there is nothing to show: s <= p <= v, so no deadline is later.
  Finishing does not change live(d); a drop lowers it; p and v rising by the learner's doing does not change it.
  Admission at served version p: the new group's deadline is p + M, so only live(d) with d >= p + M grows. The batches
      p..v-1 yield versions p+1..v, none of them served, so their (v - p) F fresh groups at least hold slots. Hence
      live(d) <= slots_held - (v - p) F <= (M + 1) F - (v - p) F = (p + M - v + 1) F <= (d - v + 1) F.
  Resuming at version w: the batches from w on never were. Of the groups that were live when the checkpoint was made
      those go on that are finished with tokens of versions <= w, as many as (*) allows (`kept_at`: all of them unless
      M or F was changed); others are dropped. Nothing else holds a slot.
Choosing the earliest deadlines takes as many groups with deadline <= d as any choice of n finished groups can, for
every d at once: if it fails the condition, every choice does, and waiting is right.

No deadlock: a wait for a batch ends once all that runs has finished, for then the earliest F of the live groups leave
max(0, live(d) - F) <= (d - v) F by (*). And there are B live groups, or else there is room to admit: of (M + 1) F slots
at most (v - p) B are held by trained groups, and the learner waits with v - p < E, so (M + 1) F >= E B leaves at least
B. Config refuses anything else. That is needed when E = 1 (the first batch has no used groups to fill up with) and
when F = B; for E > 1 with replay it may refuse more than it must, for how many used groups there will be depends on
which ones expire. Running groups wait for nobody but their engine.

The other late policies (`staleness.late`) do not wait for running groups, so the bound is not (*)'s doing:
    drop     batch v is taken from finished groups with deadline >= v, so it is within the bound; after its hand-out
             every live group with deadline <= v would miss it and is dropped. Other groups lose nothing by that.
    mask     no deadline. A finished group may be in batch v while it has a token of version >= v - M; tokens older than
             that are masked (`young_enough`), so none of them is trained on. Oldest start version first, ties by id.
Both need B finished groups and nothing else, and v stands still meanwhile: no deadlock.

Exact mode (`staleness.mode: exact`; k = M, E = 1, F = B): a group gets its batch number t at admission, the lowest with
a vacant place among those that may start: max(0, t - k) <= p, that is t <= p + k. Batch t is the B groups with number
t. A push waits until no group runs and no place of the batches <= p + k is vacant. So a group of batch t starts and
ends at version max(0, t - k): when p = t - k > 0 is served, batches up to t - 1 are full and stay full. Its tokens are
exactly min(t, k) old in batch t. Slots are the same: while p is served, the batches p..p+k hold (k + 1) B of them.
After a resume at w whose batches w..w+k-1 could not be kept whole, w takes the place of 0: versions before it are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from async_rl.config import Config
from async_rl.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What of the configuration decides on admission and hand-out; M, B and F of the proof."""

    max_staleness: int
    prompts_per_step: int
    fresh_per_step: int
    max_uses: int = 1
    late: Literal["wait", "drop", "mask"] = "wait"
    exact: bool = False
    drain: bool = False
    """A push waits for the groups that run, while no other may start."""

    @classmethod
    def from_config(cls, config: Config) -> Rules:
        return cls(
            max_staleness=config.staleness.max, prompts_per_step=config.learner.prompts_per_step,
            fresh_per_step=config.fresh_per_step, max_uses=config.buffer.max_uses, late=config.staleness.late,
            exact=config.staleness.mode == "exact", drain=config.weight_sync.on_update == "drain",
        )


def admission_capacity(slots_held: int, rules: Rules) -> int:
    """Groups that may start now."""
    return max(0, (rules.max_staleness + 1) * rules.fresh_per_step - slots_held)


def deadline(start_version: int, max_staleness: int) -> int:
    """Number of the last batch that may hold a group started at `start_version`."""
    return start_version + max_staleness


def last_batch(start_version: int, newest_version: int, rules: Rules) -> int:
    """Number of the last batch that may hold this finished group: with `mask`, by its newest token."""
    return deadline(newest_version if rules.late == "mask" else start_version, rules.max_staleness)


def young_enough(versions: IntArray, version: int, max_staleness: int) -> BoolArray:
    """Which tokens of these token versions may be trained on in batch `version`."""
    kept: BoolArray = version - versions <= max_staleness
    return kept


def fresh_to_take(
    finished: Sequence[int], running: Iterable[int], reusable: int, version: int, rules: Rules
) -> int | None:
    """How many fresh groups batch `version` takes, beside used ones; None while the learner has to wait.

    Args:
        finished: deadline of every fresh group that is finished, in any order.
        running: deadline of every running group; only the policy `wait` looks at them.
        reusable: number of used groups that may be in this batch.
    """
    least = max(rules.fresh_per_step, rules.prompts_per_step - reusable)
    if len(finished) < least:
        return None
    match rules.late:
        case "wait":
            needed = _needed_by_deadlines(finished, running, version, rules)
            if any(short > 0 for _, short in needed.values()):
                return None
            least = max(least, *(number for number, _ in needed.values()))
        case "drop":
            expiring = sum(d <= version for d in finished)
            least = max(least, min(expiring, rules.prompts_per_step))
        case "mask":
            pass
    return least if least <= min(len(finished), rules.prompts_per_step) else None


def overfull_deadline(finished: Sequence[int], running: Iterable[int], version: int, rules: Rules) -> int | None:
    """The first deadline that keeps batch `version` waiting: too many groups share it of which too few are finished."""
    needed = _needed_by_deadlines(finished, running, version, rules)
    return next((d for d, (_, short) in needed.items() if short > 0), None)


def _needed_by_deadlines(
    finished: Iterable[int], running: Iterable[int], version: int, rules: Rules
) -> dict[int, tuple[int, int]]:
    """[d in v..v+M] (groups with deadline <= d that batch v has to take, how many of them are not finished).

    Taking n of the earliest leaves live(d) - min(n, finished(d)), so live(d) - (d - v) F is what must be taken.
    """
    done, live = Counter(finished), Counter(running)
    live.update(done)
    needed = {}
    live_by = sum(number for d, number in live.items() if d < version)
    done_by = sum(number for d, number in done.items() if d < version)
    for ahead in range(rules.max_staleness + 1):
        live_by += live[version + ahead]
        done_by += done[version + ahead]
        must = max(0, live_by - ahead * rules.fresh_per_step)
        needed[version + ahead] = (must, must - done_by)
    return needed


def kept_at(deadlines: Iterable[int], version: int, rules: Rules) -> list[bool]:
    """Which of the finished groups of these ascending deadlines may go on in a run that resumes at `version`.

    With the policy `wait` as many as (*) allows; the others need only that none has missed its deadline.
    """
    kept: list[bool] = []
    number = 0
    for d in deadlines:
        fits = rules.late != "wait" or number < (d - version + 1) * rules.fresh_per_step
        kept.append(d >= version and fits)
        number += kept[-1]
    return kept


def exact_start_version(batch: int, max_staleness: int, first_version: int) -> int:
    """The version that samples all of batch number `batch` in exact mode.

    Args:
        first_version: the oldest that could; 0, or that of a resume.
    """
    return max(first_version, batch - max_staleness)


def vacant_places(members: Counter[int], number: int, first_batch: int, rules: Rules) -> list[int]:
    """Batch numbers for the next `number` groups in exact mode: the lowest batches with a vacant place.

    Args:
        members: [batch number] groups that are in it, dropped ones not counted.
        first_batch: the lowest batch that is not handed out yet.
    """
    places: list[int] = []
    batch = first_batch
    while len(places) < number:
        vacant = rules.prompts_per_step - members[batch]
        places += [batch] * min(vacant, number - len(places))
        batch += 1
    return places
