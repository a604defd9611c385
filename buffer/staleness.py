"""The rules that bound staleness, as pure functions, and the proof that they bound it.

Summary: no token is more than `staleness.max` versions old when the learner trains on it. Two rules ensure this.
Admission limits the number of groups that exist at a time, so that the coming batches have room for all of them before
they are too old; `staleness.depth` limits it further, so that most groups are younger than that. Hand-out chooses the
groups of a batch, those with the earliest deadline first. With the default, `staleness.on_late: wait`, the learner
waits for a running group if a batch without it would leave later batches too little room. The proof comes first; the
policies `drop` and `mask` and the exact mode, which have other rules, come after it. buffer/modes.py has a class for
each of the four: Wait, Drop, Mask and Exact.

Notation:
    M  staleness.max                    B  learner.prompts_per_step
    F  ceil(buffer.fresh_fraction * B), the lowest number of fresh groups in a batch. A fresh group was in no batch
       yet; a used group was in one. Without replay F = B
    E  weight_sync.every_steps          v  number of the next batch to choose: v batches were chosen before it
    S  the number of slots, ceil((staleness.depth + 1) F), at most (M + 1) F
    p  served version; it never falls, and p <= v
    s  start version of a group: p at its admission. Its tokens have versions >= s, because every server serves >= p
    d  deadline of a group: d = s + M, the last batch that may hold it. In batch b <= s + M its tokens are at most
       b - s <= M versions old
    live(d)  number of live groups with deadline <= d. Live: running, or finished and in no batch yet

Admission:   a group may start while slots_held < S. It holds its slot until it is dropped or until the
             version that its first batch yields is served (batch b yields version b + 1). A used group holds no slot.
Hand-out:    with the policy `wait`, batch v consists of the n fresh groups with the earliest deadlines, ties broken
             by id, and of B - n used groups that are within their deadlines. n is the smallest number >= F for which
             there are that many used groups and for which live(d) <= (d - v) F holds afterwards for every d in
             v..v+M. While no n <= B satisfies this, the learner waits.

Claim: whenever the number of the next batch is v,   live(d) <= (d - v + 1) F   for every d >= v,              (*)
and live(v - 1) = 0: no live group has missed its deadline. So no token of a batch is older than M versions.

Proof, by induction over events. At the start nothing is live.
  Hand-out: batch v leaves live(d) <= (d - v) F for every d in v..v+M. That is (*) for the next batch number v + 1; for
      d = v it says live(v) = 0. No deadline is later than v + M, because s <= p <= v.
  Finishing a group does not change live(d), and dropping one lowers it. Neither does training or serving a version.
  Admission at served version p: the deadline of the new group is p + M, so only live(d) with d >= p + M grows. The
      batches p..v-1 yield the versions p+1..v. None of these is served yet, so their fresh groups, at least (v - p) F,
      hold slots. After it slots_held <= S <= (M + 1) F. Hence live(d) <= slots_held - (v - p) F
      <= (M + 1) F - (v - p) F = (p + M - v + 1) F <= (d - v + 1) F.
  Resuming from a checkpoint of version w: the batches from w on are discarded. Of the groups that were live at the
      checkpoint, those continue that finished with tokens of versions <= w, up to the number that (*) allows
      (`within_capacity`; that is all of them unless M or F was changed). The others are dropped. Nothing else holds a
      slot.
The learner never waits without need: if the n groups with the earliest deadlines fail the condition, every other choice
of n finished groups fails it too, because none removes more groups with deadline <= d, for any d.

No deadlock: a wait for a batch ends at the latest when every running group has finished. Then the earliest F of the
live groups leave max(0, live(d) - F) <= (d - v) F by (*). And there are B live groups, or there is room to admit more:
of the S slots at most (v - p) B are held by trained groups, and the learner waits with v - p < E, so S >= E B leaves at
least B. The configuration refuses S < E B. The refusal is necessary for E = 1 (the first batch has no used groups to
fill up with) and for F = B. For E > 1 with replay it may go further than necessary, because the number of used groups
depends on how many expire. Running groups wait for nothing but their engine.

Depth: the mean staleness is about S / F - 1. In each step F groups start and F are trained, so by Little's law a group
holds its slot for S / F steps in the mean. The last of these steps is the training on its batch. At S = F generation
and training take turns. The largest staleness is M all the same: with S < (M + 1) F the look-ahead has room to spare,
so the learner waits only for groups that have run for nearly M versions, and short ones are trained meanwhile.

Mode `drop` (`staleness.on_late: drop`): the learner does not wait for running groups, so (*) need not hold. Batch v is
taken from finished groups with deadline >= v, so it is within the bound. After its hand-out every live group with
deadline <= v would miss its deadline and is dropped; no other group is dropped. A batch needs nothing but B finished
groups, and v does not change while the learner waits: no deadlock.

Mode `mask` (`staleness.on_late: mask`): the learner does not wait for running groups, and there are no deadlines. A
finished group may be in batch v while it has a token of version >= v - M. Its older tokens are masked (`young_enough`),
so none of them is trained on. Groups with the oldest start version go first, ties broken by id. As with `drop`, there
is no deadlock.

Exact mode (`staleness.mode: exact`; k = M, E = 1, F = B): every token of batch t is exactly min(t, k) versions old.
    Admission: a group gets its batch number t, the lowest with a vacancy among the batches that may start: those with
        max(0, t - k) <= p, that is t <= p + k.
    Hand-out: batch t consists of the B groups with number t.
    Push: it waits until no group runs and none of the batches <= p + k has a vacancy. So a group of batch t starts and
        ends at version max(0, t - k): when p = t - k > 0 is served, the batches up to t - 1 are full and stay full.
    Slots: S = (M + 1) F, because while p is served the batches p..p+k hold (k + 1) B slots.
    Resume at version w: if the batches w..w+k-1 could not be restored completely, w takes the place of 0 in these
        formulas, because earlier versions are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from async_rl.base.config import Config
from async_rl.base.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of admission and hand-out. The first five are M, B, F, E and S in the proof."""

    max_staleness: int
    prompts_per_step: int
    fresh_per_step: int
    every_steps: int
    slots: int
    max_uses: int = 1
    late: Literal["wait", "drop", "mask"] = "wait"
    exact: bool = False
    drain: bool = False
    """Whether a push waits until no group runs, while no group may start."""

    @classmethod
    def from_config(cls, config: Config) -> Rules:
        return cls(
            max_staleness=config.staleness.max, prompts_per_step=config.learner.prompts_per_step,
            fresh_per_step=config.fresh_per_step, every_steps=config.weight_sync.every_steps, slots=config.slots,
            max_uses=config.buffer.max_uses, late=config.staleness.on_late, exact=config.staleness.mode == "exact",
            drain=config.weight_sync.on_update == "drain",
        )


def admission_capacity(slots_held: int, slots: int) -> int:
    """Return how many groups may start while `slots_held` of `slots` are held: the free slots, at least 0."""
    return max(0, slots - slots_held)


def young_enough(versions: IntArray, version: int, max_staleness: int) -> BoolArray:
    """Return which tokens batch `version` may train on: a bool array in the shape of `versions`, the tokens' versions.
    """
    trainable: BoolArray = version - versions <= max_staleness
    return trainable


def fresh_to_take(
    finished: Counter[int], running: Counter[int], reusable: int, version: int, rules: Rules
) -> int | None:
    """Return how many groups of batch `version` are fresh (n in the hand-out rule); None while the learner must wait.

    This is the rule of the policy `wait`.

    Args:
        finished: [deadline] number of finished groups that are fresh: in no batch yet.
        running: [deadline] number of running groups.
        reusable: number of used groups that may be in this batch.
    """
    required = _required_by_deadlines(finished, running, version, rules)
    if any(missing > 0 for _, missing in required.values()):
        return None
    return fresh_at_least(max(number for number, _ in required.values()), finished.total(), reusable, rules)


def fresh_at_least(number: int, num_finished: int, reusable: int, rules: Rules) -> int | None:
    """Return the smallest allowed number of fresh groups in a batch, at least `number`.

    None: too few have finished, or a batch has no room for so many. Used groups fill up the batch; `reusable` is their
    number.
    """
    fresh = max(number, rules.fresh_per_step, rules.prompts_per_step - reusable)
    return fresh if fresh <= min(num_finished, rules.prompts_per_step) else None


def overfull_deadline(finished: Counter[int], running: Counter[int], version: int, rules: Rules) -> int | None:
    """Return the first deadline d that makes batch `version` wait for running groups with deadlines <= d; None if none.
    """
    required = _required_by_deadlines(finished, running, version, rules)
    return next((d for d, (_, missing) in required.items() if missing > 0), None)


def _required_by_deadlines(
    finished: Counter[int], running: Counter[int], version: int, rules: Rules
) -> dict[int, tuple[int, int]]:
    """Return {d: (number, missing)} for d in v..v+M: batch v must take `number` groups with deadline <= d.

    Taking the n earliest leaves live(d) - min(n, finished(d)), so at least live(d) - (d - v) F must be taken.
    `missing` of these groups still run; if it is 0 or below, all have finished.
    """
    required = {}
    done_by = sum(number for d, number in finished.items() if d < version)
    live_by = done_by + sum(number for d, number in running.items() if d < version)
    for ahead in range(rules.max_staleness + 1):
        done_by += finished[version + ahead]
        live_by += finished[version + ahead] + running[version + ahead]
        number = max(0, live_by - ahead * rules.fresh_per_step)
        required[version + ahead] = (number, number - done_by)
    return required


def within_capacity(deadlines: Iterable[int], version: int, rules: Rules) -> list[bool]:
    """Return which finished groups may continue after a resume at `version`: as many as (*) of the proof allows.

    Args:
        deadlines: the deadline of each group, in ascending order.
    """
    fit: list[bool] = []
    number = 0
    for d in deadlines:
        has_room = number < (d - version + 1) * rules.fresh_per_step
        fit.append(d >= version and has_room)
        number += fit[-1]
    return fit


def exact_start_version(batch: int, max_staleness: int, first_version: int) -> int:
    """Return the version that samples every token of batch number `batch` in exact mode.

    Args:
        first_version: the oldest version that can be sampled from: 0, or the version of a resume.
    """
    return max(first_version, batch - max_staleness)


def vacant_batches(members: Counter[int], number: int, first_batch: int, rules: Rules) -> list[int]:
    """Return a batch number for each of the next `number` groups in exact mode: the lowest batches that are not full.

    Args:
        members: [batch number] number of its groups, without dropped ones.
        first_batch: the lowest number of a batch that is not handed out yet.
    """
    batches: list[int] = []
    batch = first_batch
    while len(batches) < number:
        vacant = rules.prompts_per_step - members[batch]
        batches += [batch] * min(vacant, number - len(batches))
        batch += 1
    return batches
