"""Pushes weights into the servers of a pool as a state machine, which also recovers from deaths of servers.

States on rank 0 (`PushState`):

                  push              ready to send            all received               resumed
    serving ──────────> gathering ───────────────> sending ──────────────> verifying ──────────> serving
                          │  ^                        │                        │
                    error │  │ push again             │ error                  │ error
                          v  │                        v                        v
                          lost <──────────────────────┴────────────────────────┘

    gathering   The servers generate with the old weights, unless a failed attempt has paused them or they have released
                their memory. The transport connects to exactly the current members, and gathers the first tensors or
                stages all of them.
    sending     The servers are paused and receive the weights. With weight_sync.double_buffer they first receive them
                next to the weights in use, and are paused after that.
    verifying   Each server has loaded the new weights and is still paused. A verified push compares the sums of the
                server's weights with the learner's; the first one checks that every weight was loaded. Then the servers
                resume.
    serving     Every member serves the version.
    lost        An attempt failed. Either an error is raised, or members that died, hang or have other weights are
                removed, the others have ended an update that had begun, and the report asks for another push. Servers
                that were paused stay paused: no server ever samples from half-loaded weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.errors import ServersSilentError, WaitTimeoutError, WeightSyncError
from async_rl.base.seams import TRANSPORTS, working_transports
from async_rl.base.telemetry.timeline import Span
from async_rl.base.weights.servers import LOST_WITHIN_S, Member, Members, ServerAdmin, start_together, wait_for_silent
from async_rl.base.weights.sums import value_sums
from async_rl.base.weights.transport import Transport, serving_dtype

if TYPE_CHECKING:
    from async_rl.base.weights.cuda_ipc import FreedMemory
    from async_rl.base.weights.parcels import ChangedWeights

_log = logging.getLogger(__name__)

VERIFICATION = "weight verification"
SUMS_AGREE = 1e-11
"""The largest difference between equal weights' sums, relative to the sum of absolute values. Rounding in float64 is
smaller; a single missing expert makes a far larger difference."""
SILENCES = 3
"""The most pushes in a row that are repeated because servers did not answer and then answered again."""


class PushState(Enum):
    """The state of a publisher; the module's docstring has the diagram."""

    GATHERING = "gathering"
    SENDING = "sending"
    VERIFYING = "verifying"
    SERVING = "serving"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The result of one attempt to push. On other ranks than 0 all fields are zero."""

    seconds: float = 0.0
    """Time from the first gather until every server generates again."""
    pause_s: float = 0.0
    """The time for which the servers were paused."""
    num_bytes: int = 0
    spans: tuple[Span, ...] = ()
    """The pause as a span of state `sync` for each server's pool."""
    lost: tuple[Member, ...] = ()
    """Members that were removed because they died or hang. If there are any, the push failed: repeat it on every rank.
    """
    cause: str = ""
    """The error of a failed push."""
    repeats: bool = False
    """The push has failed although every server answers: repeat it on every rank. For example, a server could not
    use a sparse push and gets whole weights now, or a new process answers at the URL of a server that died."""
    num_repeats: int = 0
    """How often the push was repeated with the same servers before it succeeded."""
    num_compared: int = 0
    """The number of servers whose weights were compared with the learner's by their sums, and were equal."""
    num_unequal: int = 0
    """The number of servers in `lost` that answer, but have other weights."""
    changed_share: float = 1.0
    """The share of values that had changed in a sparse push. 1: whole weights or adapters were pushed."""

    @property
    def has_failed(self) -> bool:
        """Whether the push must be repeated, on every rank."""
        return bool(self.lost) or self.repeats


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed differences between logprobs of server and learner at equal weights: the mean and the largest."""

    mean: float
    largest: float


class WeightPublisher:
    """One learner rank's part of all pushes to a pool. Every rank calls `push`; only rank 0 has states.

    Args:
        later: the publisher that pushes to the same servers after this one. Both know the same facts about servers, and
            weights that this one has pushed are the base of the other's sparse pushes.
    """

    def __init__(self, transport: Transport, later: WeightPublisher | None = None) -> None:
        config, rank, device = transport.config, transport.rank, transport.device
        self.config = config
        self.rank = rank
        self.transport = transport
        self.members = transport.members
        """The servers that get the next push. The driver reports here, from other threads, who joins and leaves."""
        self.state = PushState.SERVING
        self.outlives_servers = False
        """What happens if servers refuse, a call takes longer than `members.limit`, or servers are silent before more
        than SILENCES pushes in a row. True: those servers are lost, or all if nobody knows which. False: it is an
        error."""
        self.lost_within_s = LOST_WITHIN_S
        self._changes: ChangedWeights | None = None
        if later:
            self._changes = later._changes
        elif config.weight_sync.delta:
            from async_rl.base.weights.parcels import ChangedWeights

            self._changes = ChangedWeights(serving_dtype(config, device.type))
        self._memory: FreedMemory | None = None
        if config.shares_gpus:
            from async_rl.base.weights.cuda_ipc import FreedMemory

            self._memory = FreedMemory(config, rank, device)
        self._compared: set[Member] = later._compared if later else set()
        """The members whose weights were compared since they joined."""
        self._comparable: dict[str, bool] = later._comparable if later else {}
        """For each server: whether the sums of its weights equalled the learner's at the first comparison. If not, the
        server stores other weights than the model folder has, such as packed ones, and is not compared again."""
        self._silences = 0
        self._has_repeated = False
        """Whether the push was repeated already because it broke while every server answered."""

    def push(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, erases: bool = False, compares: bool = False
    ) -> PushReport:
        """Make one attempt to push the weights to every member; return once all of them serve `version`. Collective.

        If the report `has_failed`, push again on all ranks, with a new iterable.

        Args:
            named_tensors: the weights, with the names of model folders. They may be gathered from all ranks one by one.
                With weight_sync.lora adapter they are parcels (parcels.py).
            erases: fill the servers' weights with NaN before the push, and check after it that none is left. The
                tensors must be finite.
            compares: compare the sums of each server's weights with the tensors' sums. A server whose sums differ,
                although they were equal in the first comparison, is lost. If false, only servers that have joined since
                the last comparison are compared.

        Raises:
            WeightSyncError: a live server refused the weights twice, or did not load some. It stays paused and must
                not be used.
            WaitTimeoutError: a call took longer than `members.limit` although every server is alive.
            With `outlives_servers` neither is raised.
        """
        tensors = iter(named_tensors)
        if self._memory:
            self._memory.begin_push()
        try:
            if self.rank == 0:
                return self._push(tensors, version, erases, compares)
            self.transport.help(tensors, version)
            return PushReport()
        finally:
            if self.rank == 0:
                self.transport.end_push(version if self.state is PushState.SERVING else None)
            deque(tensors, maxlen=0)  # every rank gathers to the end; a loop would hold on to the last tensor
            if self.rank > 0 and self._memory:
                self._memory.free(self._memory.GATHERED)

    def _push(
        self, tensors: Iterator[tuple[str, Tensor]], version: int, erases: bool, compares: bool
    ) -> PushReport:
        """Do the work of `push` on rank 0, except that after an error the remaining tensors are not gathered."""
        self.members.apply_reports()
        self.state = PushState.GATHERING
        is_staged = self.config.weight_sync.double_buffer != "none"
        sums = _Sums(serving_dtype(self.config, self.transport.device.type))
        compared = self._to_compare(compares)
        if compared:
            tensors = sums.over(tensors)
        try:
            if self._changes is not None:
                self._changes.is_sparse = False  # as of the push before
            self.transport.connect()
            start_s = time.monotonic()
            if self._changes is not None:
                tensors = self._changes.parcels(tensors, version, self.members.current)
            staged = self.transport.stage(tensors, version)
            self.state = PushState.SENDING
            if is_staged:  # the servers sample meanwhile, with the old weights
                self.members.call(lambda admin: admin.begin_update(), "begin of a weight push")
                num_bytes = self.transport.send(staged, version)
            paused_s = time.monotonic()
            self._pause(erases)
            if not is_staged:
                self.members.call(lambda admin: admin.begin_update(), "begin of a weight push")
                num_bytes = self.transport.send(staged, version)
            deque(tensors, maxlen=0)  # also what was not sent: the end may wait for ranks that gather it
            self.members.call(lambda admin: admin.end_update(), "end of a weight push")
            self.state = PushState.VERIFYING
            if erases:
                check_loaded(self.members.call(lambda admin: admin.unloaded_weights(), VERIFICATION))
            if unequal := self._unequal(compared, sums.total):
                self.state = PushState.LOST
                lost = self.members.remove(unequal)
                return PushReport(lost=lost, cause="; ".join(unequal.values()), num_unequal=len(lost))
            self._resume()
            end_s = time.monotonic()
        except (WeightSyncError, WaitTimeoutError) as error:
            return self._recover(error)
        self._succeed()
        if self._changes is not None:
            self._changes.delivered(self.members.current)
        return PushReport(
            changed_share=1.0 if self._changes is None else self._changes.changed_share,
            seconds=end_s - start_s, pause_s=end_s - paused_s, num_bytes=num_bytes,
            num_compared=sum(self._comparable[member.name] for member in compared),
            spans=tuple(Span(name, "sync", paused_s, end_s, "weights") for name in self.members.names),
        )

    def _to_compare(self, compares: bool) -> list[Member]:
        """Return the members whose weights this push compares: all, or only those not compared before."""
        sync, current = self.config.weight_sync, self.members.current
        # Adapters are no weights that a server keeps, and a server that the run did not start may know no sums.
        if not sync.verify_every or sync.lora == "adapter" or self.config.rollout.server_url:
            return []
        return [
            member for member in current
            if (compares or (self._comparable and member not in self._compared))
            and self._comparable.get(member.name, True)
        ]

    def _unequal(self, compared: Sequence[Member], learners: tuple[float, float]) -> dict[str, str]:
        """Return {name: how its weights differ} of the members whose weights have other sums than the learner's.

        Args:
            compared: the members to compare.
            learners: the learner's sums.
        """
        if not compared:
            return {}
        calls = self.members.calls(lambda admin: admin.value_sums())
        found = start_together({m.name: calls[m.name] for m in compared}, self.members.limit, VERIFICATION)()
        unequal = {
            name: f"{VERIFICATION}: the weights of {name} are not the learner's: their values add up to {served[0]!r}, "
            f"their sizes to {served[1]!r}, the learner's to {learners[0]!r} and {learners[1]!r}"
            for name, served in found.items()
            if not all(abs(a - b) <= SUMS_AGREE * learners[1] for a, b in zip(served, learners, strict=True))
        }
        for member in compared:
            is_equal = member.name not in unequal
            if not self._comparable.setdefault(member.name, is_equal) and unequal.pop(member.name, ""):
                _log.info("%s keeps other weights than its model folder has: their sums are not compared", member.name)
        self._compared.update(member for member in compared if member.name not in unequal)
        return unequal

    def _pause(self, erases: bool) -> None:
        """Pause all servers, and allocate memory for their weights if they have released it."""
        on_update = self.config.weight_sync.on_update
        self.members.call(lambda admin: admin.pause(on_update), "pause before a weight push")
        if self._memory:
            self._memory.await_others(self._memory.STEP, self.members.limit)
            self.members.call_to_the_end(lambda admin: admin.resume_memory("weights"))
        if erases:
            self.members.call(lambda admin: admin.erase_weights(), "erasing the weights before a push is verified")

    def _resume(self) -> None:
        """Allocate the servers' KV caches if they have released them, then resume all servers."""
        if self._memory:
            self._memory.free(self._memory.GATHERED)
            self._memory.await_others(self._memory.GATHERED, self.members.limit)
            self.members.call_to_the_end(lambda admin: admin.resume_memory("kv_cache"))
        self.members.call(lambda admin: admin.resume(), "resume after a weight push")

    def _succeed(self) -> None:
        self.state = PushState.SERVING
        self._silences, self._has_repeated = 0, False

    def _recover(self, error: WeightSyncError | WaitTimeoutError) -> PushReport:
        """After a failed attempt, remove the members that died or hang, and end the update at the others.

        Raises `error` if no member is lost and repeating the push would not help.
        """
        was_sending = self.state is PushState.SENDING
        self.state = PushState.LOST
        lost = wait_for_silent(self.members.probes(), self.lost_within_s)
        repeats = not lost and self._may_repeat(error)
        if not (lost or repeats) and self.outlives_servers:
            named = tuple(sorted({*self.members.names} & {*error.names}))
            if isinstance(error, WaitTimeoutError):
                # while weights are sent, servers wait for each other: who is late may not be who hangs
                named = self._give_up(was_sending) or (() if was_sending else named)
            lost = named or self.members.names
        if not (lost or repeats):
            raise error
        dead = self.members.remove(lost)
        hanging = self.members.remove(self._give_up(was_sending))
        return PushReport(lost=(*dead, *hanging), cause=str(error), repeats=repeats)

    def _may_repeat(self, error: WeightSyncError | WaitTimeoutError) -> bool:
        """Whether a push that failed with `error`, although every server lives, may succeed if it is repeated."""
        if isinstance(error, ServersSilentError):
            self._silences += 1
            return self._silences <= SILENCES
        if not isinstance(error, WeightSyncError):
            return False
        if self._changes is not None and self._changes.is_sparse:
            return True
        may, self._has_repeated = not self._has_repeated, True
        return may

    def _give_up(self, was_sending: bool) -> tuple[str, ...]:
        """Free the servers that hang in a failed push and end its update. Returns those that did not answer in time.

        A paused server stays paused, with the weights in use. If no server can be in an update, no server is asked to
        end one: SGLang would do so only when it is paused or idle.
        """
        hanging = self.transport.give_up(was_sending)
        if not was_sending:
            return hanging
        is_staged = self.config.weight_sync.double_buffer != "none"

        def end(admin: ServerAdmin) -> None:
            if is_staged:  # drop the staged weights, maybe all of them: it may still sample with the old ones
                with suppress(WeightSyncError):
                    admin.begin_update()
            admin.end_update()

        return self.members.tell(end, self.members.names)

    def release_server_memory(self) -> None:
        """Make every server free its GPU memory for the learner until the next push. Rank 0 calls this before a step.

        Answers to an evaluation wait and continue with the new weights. If a server is dead, the next push finds out.
        """

        def release(admin: ServerAdmin) -> None:
            try:
                admin.release_memory()
            except WeightSyncError:
                if admin.is_ready():
                    raise

        self.members.apply_reports()
        self.members.call_to_the_end(release)

    def verify(self, tokens: Sequence[int], learner_logprobs: Sequence[float], tolerance: Tolerance) -> bool:
        """Check that every server's logprobs of `tokens` agree with the learner's. Only rank 0 calls this.

        Returns whether any server was compared. See `compare` for the arguments.

        Raises:
            WeightSyncError: they differ by more than `tolerance`, so a server does not have the learner's weights.
        """
        found = self.compare(tokens, learner_logprobs, tolerance)
        for difference in found.values():
            if difference:
                raise WeightSyncError(difference)
        return bool(found)

    def compare(
        self, tokens: Sequence[int], learner_logprobs: Sequence[float], tolerance: Tolerance
    ) -> dict[str, str]:
        """Compare every server's logprobs of `tokens` with the learner's. Only rank 0 calls this.

        Returns {server: how they differ, "" if they agree}. Servers that have died since the push are left to the next
        push. With `outlives_servers` one that can't compute them differs.

        Args:
            learner_logprobs: log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1, one fewer than `tokens`.

        Raises:
            WeightSyncError, WaitTimeoutError: a live server can't compute them, or does not answer.
        """
        calls, scores = self.members.calls(lambda admin: admin.score_tokens(tokens)), dict[str, list[float]]()
        while calls and not scores:
            try:
                scores = start_together(calls, self.members.limit, VERIFICATION)()
            except (WeightSyncError, WaitTimeoutError) as error:
                probes = self.members.probes()
                dead = wait_for_silent({name: probes[name] for name in calls}, self.lost_within_s)
                if not dead:
                    if not self.outlives_servers:
                        raise
                    return dict.fromkeys(calls.keys() & {*error.names} or calls, str(error))
                calls = {name: call for name, call in calls.items() if name not in dead}
        return {name: difference(name, served, learner_logprobs, tolerance) for name, served in scores.items()}

    def close(self) -> None:
        self.transport.close()


def open_publisher(
    config: Config, engine_urls: Sequence[str], rank: int, device: torch.device
) -> WeightPublisher:
    """Return the publisher for weight_sync.transport, with which each learner rank pushes weights to servers.

    The driver, which knows the placement, has replaced `auto`. Without a driver, `auto` means the transport for learner
    and server on one device.

    Args:
        engine_urls: URLs of rollout/0, rollout/1, ...; empty: servers join later.
    """
    members = Members(config, {f"rollout/{number}": url for number, url in enumerate(engine_urls)})
    return WeightPublisher(_open_transport(config, members, rank, device))


def open_filler(publisher: WeightPublisher) -> WeightPublisher:
    """Return a publisher that brings servers their first weights, before `publisher` pushes to them.

    It has a transport of its own. So a server that can't be reached delays no other server.
    """
    config, rank, device = publisher.config, publisher.rank, publisher.transport.device
    transport = _open_transport(config, Members(config, purpose="fill"), rank, device)
    filler = WeightPublisher(transport, later=publisher)
    filler.outlives_servers = True
    return filler


def _open_transport(config: Config, members: Members, rank: int, device: torch.device) -> Transport:
    entry = config.weight_sync.transport_entry or TRANSPORTS[
        working_transports(config.engine_entries.values(), device.type, one_device=True, own_gpus=False)[0]
    ]
    transport: Transport = entry.load()(config, members, rank, device)
    return transport


def check_loaded(unloaded: Mapping[str, Sequence[str]]) -> None:
    """Check that no server has unloaded weights. All weights were set to NaN before the push.

    Args:
        unloaded: the names of the weights that still contain a NaN, by server.

    Raises:
        WeightSyncError: a server has such weights.
    """
    for name, weights in unloaded.items():
        if weights:
            raise WeightSyncError(
                f"{VERIFICATION}: the push did not reach {len(weights)} weights of {name}, which would stay "
                f"as they were for the whole run: {', '.join(weights[:3])}. Its server does not load this model's "
                "weights under the names of its folder. Set another rollout.engine; if you know that training "
                "never changes these weights, set weight_sync.verify_every: 0", (name,),
            )


def difference(name: str, served: Sequence[float], learners: Sequence[float], tolerance: Tolerance) -> str:
    """Return how a server's logprobs of a text differ from the learner's, as an error message; "" if they agree.

    Args:
        name: the server.
        served, learners: the logprobs of the server and of the learner.
        tolerance: the differences that still count as agreement.
    """
    if len(served) != len(learners):
        return (
            f"{VERIFICATION}: {name} returned {len(served)} logprobs, the learner {len(learners)} for the same "
            "tokens: they must be as many"
        )
    differences = [abs(a - b) for a, b in zip(served, learners, strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences)
    if mean <= tolerance.mean and largest <= tolerance.largest:
        return ""
    return (
        f"{VERIFICATION}: after the push {name} gives logprobs that differ from the learner's by {mean:.2e} in the "
        f"mean (allowed {tolerance.mean:.0e}) and up to {largest:.2e} (allowed {tolerance.largest:.0e}): it does not "
        "serve the learner's weights, or rounds far more than other models in bfloat16. Check that model.path holds "
        "the same model on its host and the learner's; if it does, set another weight_sync.transport, or "
        "weight_sync.verify_every: 0."
    )


class _Sums:
    """Adds up all values of the pushed weights, and their absolute values, after conversion to the servers' type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parts: list[tuple[float, float]] = []

    def over(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and add each to the sums."""
        for name, tensor in named_tensors:
            self._parts.append(value_sums([tensor.to(self._dtype)]))
            yield name, tensor

    @property
    def total(self) -> tuple[float, float]:
        return math.fsum(values for values, _ in self._parts), math.fsum(sizes for _, sizes in self._parts)
