"""The base class of weight transports: pausing servers, pushing, comparing their logprobs with the learner's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.errors import ServersSilentError, WaitTimeoutError, WeightSyncError
from async_rl.telemetry.timeline import Span
from async_rl.weights.freed_memory import LEFT_BY_GATHERING, LEFT_BY_STEP, FreedMemory
from async_rl.weights.members import start_together, wait_for_silent
from async_rl.weights.parcels import ChangedWeights
from async_rl.weights.server_admin import ServerAdmin

LOST_WITHIN_S = 10.0
"""A server that died in a push stops answering within this time after the push has failed."""
SILENCES = 3
"""So often in a row a push is repeated because servers that did not answer before it answer again."""


class WeightPublisher(ABC):
    """The learner's side of a transport. Every learner rank calls `push`; only rank 0 talks to servers."""

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        self.config = config
        self.settings = config.weight_sync.settings
        """The settings of the transport's entry, with the values of weight_sync.params; None: it has none."""
        self.servers = {f"rollout/{index}": url for index, url in enumerate(engine_urls)}
        """Base URLs of the servers that get the next push, by name; rank 0 may change them between two pushes."""
        self.rank = rank
        self.device = device
        self.bucket_bytes = config.weight_sync.bucket_bytes
        self.push_limit = config.timeouts.limit("push_s")
        """How long each part of a push may take; rank 0 may change it between two pushes."""
        self.loses_slow_servers = False
        """Whether a part of a push that takes longer costs the servers that hang, or all, and silence before more than
        SILENCES pushes in a row the servers that were silent. If not, each is an error."""
        self.dtype = torch.uint8 if config.weight_sync.is_compact else serving_dtype(config, device.type)
        """The type in which tensors travel: that of the servers' weights, or bytes in a compact push."""
        self._changes = ChangedWeights(serving_dtype(config, device.type)) if config.weight_sync.delta else None
        self._memory = FreedMemory(config, rank, device)
        self._admins: dict[tuple[str, str], ServerAdmin] = {}
        self.is_updating = False
        """Whether a server may be in an update: the push under way, if any, has begun some, and not ended all."""
        self._starts = Counter[str]()
        """How often each server was started again since the publisher was made, by name."""
        self._silences = 0
        self._has_repeated = False
        """Whether the push that is being made was repeated already because it broke while every server answered."""

    def members(self) -> dict[str, tuple[str, int]]:
        """Return {name: (URL, starts)} of the servers of the next push.

        A server that was started again is another member than before, also at the same URL.
        """
        return {name: (url, self._starts[name]) for name, url in self.servers.items()}

    def connect(self) -> None:  # noqa: B027 - a transport may need none
        """Prepare the next push to every server of `servers`; does nothing if they are connected already.

        Rank 0 waits for all of them. WeightSyncError: one does not answer, or refuses. WaitTimeoutError: not all have
        joined after `timeouts.push_s`.
        """

    def connect_living(self) -> PushReport:
        """Connect before the first push. Servers that died are removed and reported, as by `push`: call it again."""
        self.is_updating = False
        try:
            self.connect()
        except (WeightSyncError, WaitTimeoutError) as error:
            return self._report_lost(error)
        self._silences, self._has_repeated = 0, False
        return PushReport()

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> Any:
        """Prepare a push while the servers still generate, and return what `send` gets; by default the tensors.

        A transport may gather the first tensors here, or write all of them to files. `push` calls this on rank 0.
        """
        return named_tensors

    @abstractmethod
    def send(self, staged: Any, version: int) -> int:
        """Move the weights into every server, and return the number of bytes moved.

        `push` calls this on rank 0 with the result of `stage`. It has paused every server before, or with
        weight_sync.staging it pauses them after it, and resumes them with the new version.
        """

    def help(  # noqa: B027 - in most transports only rank 0 sends
        self, named_tensors: Iterator[tuple[str, Tensor]], version: int
    ) -> None:
        """Take part in a push on another rank than 0. What this does not gather of the tensors, `push` gathers."""

    def end_push(self) -> None:  # noqa: B027 - in most transports only rank 0 sends
        """Release other ranks that wait in `help`. `push` calls this on rank 0 at its end, also after an error."""

    def admin(self, name: str) -> ServerAdmin:
        """Return the ServerAdmin, of the engine's class, that pauses, updates and resumes the server `name`."""
        key = (name, self.servers[name])
        if key not in self._admins:
            config = self.config.of_server(name)
            self._admins[key] = config.rollout.engine_entry.load_admin()(config, self.servers[name])
        return self._admins[key]

    def give_up(self) -> tuple[str, ...]:
        """After a failed push, end the update at each server, which stays paused if it is, with the weights in use.

        If none can be in an update, it asks for nothing: SGLang would end one only when it is paused or idle.

        Returns the names of servers that did not answer within `push_limit`: they hang in the failed push.
        """
        if not self.is_updating:
            return ()
        stages = self.config.weight_sync.staging != "none"

        def end(admin: ServerAdmin) -> None:
            if stages:  # it forgets what has come, maybe all of it: the server may still sample with the old weights
                with suppress(WeightSyncError):
                    admin.begin_update()
            admin.end_update()

        return self.tell_servers(end, self.servers)

    def forget(self, names: Iterable[str]) -> None:
        """Note that the servers `names` left or were started again since the last push, maybe at the same URL."""
        for name in names:
            self._starts[name] += 1
            self._admins = {key: admin for key, admin in self._admins.items() if key[0] != name}
            if self._changes is not None:
                self._changes.forget(name)

    def push(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, *, erases: bool = False
    ) -> PushReport:
        """Pause every server, send the weights, resume, and return when all servers serve `version`.

        With weight_sync.staging servers are paused only when they have all weights beside those in use.

        If a server has died, it is removed from `servers`, the others stay paused, and the report names it: push
        again on all ranks. So is one that still hangs in the failed push, as NCCL may let it, after timeouts.push_s.
        The tensors have the names of model folders, and may be gathered from all ranks one by one. With
        weight_sync.lora adapter they are parcels (async_rl/weights/parcels.py). The report `repeats` if a server can't
        use a sparse push, if one did not answer before the push and answers again, and once if the push failed for
        another reason although every server answers: a new process may answer at the URL of one that died.

        Args:
            erases: fill the servers' weights with NaN before the push, and check after it that none is left. The
                tensors must be finite.

        Raises:
            WeightSyncError: a live server refused the weights twice, or did not load some; it stays paused and must
                not be used.
            WaitTimeoutError: after `push_limit`, with every server alive, unless `loses_slow_servers`.
        """
        tensors = iter(named_tensors)
        self._memory.begin_push()
        try:
            if self.rank == 0:
                return self._push(tensors, version, erases)
            self.help(tensors, version)
            return PushReport()
        finally:
            if self.rank == 0:
                self.end_push()
            deque(tensors, maxlen=0)  # every rank gathers to the end; a loop would hold on to the last tensor
            if self.rank > 0:
                self._memory.free(LEFT_BY_GATHERING)

    def _push(self, tensors: Iterator[tuple[str, Tensor]], version: int, erases: bool) -> PushReport:
        """Do the work of `push` on rank 0, but for gathering what is left after an error."""
        self.is_updating = False
        try:
            if self._changes is not None:
                self._changes.is_sparse = False  # as of the push before
            self.connect()
            start_s = time.monotonic()
            if self._changes is not None:
                tensors = self._changes.parcels(tensors, version, self.servers)
            staged, beside = self.stage(tensors, version), self.config.weight_sync.staging != "none"
            self.is_updating = True
            if beside:  # the servers sample meanwhile, with the old weights
                self._begin_update()
                num_bytes = self.send(staged, version)
            paused_s = time.monotonic()
            self._pause(erases)
            if not beside:
                self._begin_update()
                num_bytes = self.send(staged, version)
            deque(tensors, maxlen=0)  # also what was not sent: the end may wait for ranks that gather it
            self._end_update(erases)
            end_s = time.monotonic()
        except (WeightSyncError, WaitTimeoutError) as error:
            return self._report_lost(error)
        self._silences, self._has_repeated = 0, False
        if self._changes is not None:
            self._changes.delivered(self.servers)
        return PushReport(
            changed_share=1.0 if self._changes is None else self._changes.changed_share,
            seconds=end_s - start_s, pause_s=end_s - paused_s, num_bytes=num_bytes,
            spans=tuple(Span(name, "sync", paused_s, end_s, "weights") for name in self.servers),
        )

    def _report_lost(self, error: WeightSyncError | WaitTimeoutError) -> PushReport:
        """Remove the servers that died, or hang, and end the update at the others; the report names what `error` cost.

        If no server is lost and the push is not to be repeated, `error` is raised.
        """
        lost = wait_for_silent(self.probes(), LOST_WITHIN_S)
        repeats = not lost and self._may_repeat(error)
        if not (lost or repeats) and self.loses_slow_servers:
            if isinstance(error, ServersSilentError):
                lost = error.names
            elif isinstance(error, WaitTimeoutError):
                late = () if self.is_updating else tuple(sorted(self.servers.keys() & error.names))
                lost = self.give_up() or late or tuple(self.servers)  # in an update servers wait for each other
        if not (lost or repeats):
            raise error
        self._remove(lost)
        hanging = self.give_up()
        self._remove(hanging)
        return PushReport(lost=(*lost, *hanging), cause=str(error), repeats=repeats)

    def _may_repeat(self, error: WeightSyncError | WaitTimeoutError) -> bool:
        """Whether a push that failed with `error`, while every server lives, may succeed when it is repeated."""
        if isinstance(error, ServersSilentError):
            self._silences += 1
            return self._silences <= SILENCES
        if not isinstance(error, WeightSyncError):
            return False
        if self._changes is not None and self._changes.is_sparse:
            return True
        may, self._has_repeated = not self._has_repeated, True
        return may

    def release_server_memory(self) -> None:
        """Make every server give its GPU memory to the learner until the next push; rank 0 calls this before a step.

        Answers to an evaluation wait and continue with the new weights. A dead server is found by the next push.
        """

        def release(admin: ServerAdmin) -> None:
            try:
                admin.release_memory()
            except WeightSyncError:
                if admin.is_ready():
                    raise

        self._call_all(release)

    def calls(self, call: Callable[[ServerAdmin], Any]) -> dict[str, Callable[[], Any]]:
        """Return {name of a server: function that makes `call` with the server's ServerAdmin}."""
        return {name: partial(call, self.admin(name)) for name in self.servers}

    def probes(self) -> dict[str, Callable[[], bool]]:
        """Return {name of a server: function that returns whether it answers}."""
        return self.calls(lambda admin: admin.is_ready())

    def call_servers(self, call: Callable[[ServerAdmin], Any], what: str) -> dict[str, Any]:
        """Make `call` for all servers in parallel and return {name: result}. The first error is raised at once."""
        return start_together(self.calls(call), self.push_limit, what)()

    def tell_servers(self, call: Callable[[ServerAdmin], None], names: Iterable[str]) -> tuple[str, ...]:
        """Make `call` for the named servers in parallel, and wait for the answers; refusals are ignored.

        Returns:
            The names of the servers that did not answer within `push_limit`.
        """
        answered: set[str] = set()
        names = tuple(names)

        def tell(name: str) -> None:
            with suppress(WaitTimeoutError):
                with suppress(WeightSyncError):
                    call(self.admin(name))
                answered.add(name)

        with suppress(WaitTimeoutError):
            start_together({name: partial(tell, name) for name in names}, self.push_limit, "end of a push")()
        return tuple(name for name in names if name not in answered)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            del self.servers[name]

    def _call_all(self, call: Callable[[ServerAdmin], Any]) -> list[Any]:
        """Make `call` for all servers in parallel; return the results when all calls have ended."""
        admins = [self.admin(name) for name in self.servers]
        with ThreadPoolExecutor(max(1, len(admins))) as threads:
            return list(threads.map(call, admins))

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Release what the transport holds in this process and at the servers, such as process groups or folders."""

    def verify(self, tokens: Sequence[int], learner_logprobs: Sequence[float], tolerance: Tolerance) -> bool:
        """Check that every server's logprobs of `tokens` agree with the learner's. Only rank 0 calls this.

        `learner_logprobs` are log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1, one fewer than `tokens`.
        Servers that have died since the push are left to the next one. Returns whether any other was compared.

        Raises:
            WeightSyncError: they differ by more than `tolerance`, so a server does not hold the learner's weights.
        """
        calls, scores = self.calls(lambda admin: admin.score_tokens(tokens)), dict[str, list[float]]()
        while calls and not scores:
            try:
                scores = start_together(calls, self.push_limit, "weight verification")()
            except (WeightSyncError, WaitTimeoutError):
                probes = self.probes()
                dead = wait_for_silent({name: probes[name] for name in calls}, LOST_WITHIN_S)
                if not dead:
                    raise
                calls = {name: call for name, call in calls.items() if name not in dead}
        for name, served in scores.items():
            check_logprobs(name, served, learner_logprobs, tolerance)
        return bool(scores)

    def _pause(self, erases: bool) -> None:
        """Pause each server, and allocate its weights again if they were released."""
        on_update = self.config.weight_sync.on_update
        self.call_servers(lambda admin: admin.pause(on_update), "pause before a weight push")
        if self.config.shares_gpus:
            self._memory.await_others(LEFT_BY_STEP, self.push_limit)
            self._call_all(lambda admin: admin.resume_memory("weights"))
        if erases:
            self.call_servers(lambda admin: admin.erase_weights(), "erasing the weights before a push is verified")

    def _begin_update(self) -> None:
        self.call_servers(lambda admin: admin.begin_update(), "begin of a weight push")

    def _end_update(self, was_erased: bool) -> None:
        """End the update at each server, allocate its KV cache again if that was released, then resume all servers."""
        self.call_servers(lambda admin: admin.end_update(), "end of a weight push")
        self.is_updating = False
        if was_erased:
            check_loaded(self.call_servers(lambda admin: admin.unloaded_weights(), "weight verification"))
        if self.config.shares_gpus:
            self._memory.free(LEFT_BY_GATHERING)
            self._memory.await_others(LEFT_BY_GATHERING, self.push_limit)
            self._call_all(lambda admin: admin.resume_memory("kv_cache"))
        self.call_servers(lambda admin: admin.resume(), "resume after a weight push")


def serving_dtype(config: Config, device_type: str) -> torch.dtype:
    """Return the dtype of the servers' weights: `model.dtype`, where auto is bfloat16 on GPUs and float32 on a CPU."""
    name = config.model.dtype
    if name == "auto":
        name = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """The result of one weight push: its times, bytes and lost servers on rank 0; other ranks get zeros."""

    seconds: float = 0.0
    """Time from the first gather to the moment at which every server generates again."""
    pause_s: float = 0.0
    """Time for which the servers were paused."""
    num_bytes: int = 0
    spans: tuple[Span, ...] = ()
    """The pause as a span of state `sync` for each server's pool."""
    lost: tuple[str, ...] = ()
    """Servers that died and were removed. If there are any, the push has failed: repeat it on every rank."""
    cause: str = ""
    """The error with which the push failed, if servers were lost or `repeats` is set."""
    repeats: bool = False
    """Repeat the push on every rank. A server could not use a sparse push and gets whole weights now, or it did not
    answer before the push and answers again, or the push broke although every server answers."""
    num_repeats: int = 0
    """How often the push was repeated before it succeeded, with the same servers."""
    changed_share: float = 1.0
    """The share of the values that a sparse push found changed; 1: whole weights or adapters were pushed."""

    @property
    def has_failed(self) -> bool:
        """Whether the push must be repeated, on every rank."""
        return bool(self.lost) or self.repeats


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed absolute difference between logprobs of server and learner at equal weights: its mean and largest."""

    mean: float
    largest: float


def check_logprobs(name: str, served: Sequence[float], learners: Sequence[float], tolerance: Tolerance) -> None:
    """Check that the logprobs of a text that the server `name` computed agree with the learner's.

    Raises:
        WeightSyncError: they differ by more than `tolerance`.
    """
    if len(served) != len(learners):
        raise WeightSyncError(
            f"weight verification: {name} returned {len(served)} logprobs, the learner {len(learners)} for the same "
            "tokens: they must be as many"
        )
    differences = [abs(a - b) for a, b in zip(served, learners, strict=True)]
    mean, largest = sum(differences) / len(differences), max(differences)
    if not (mean <= tolerance.mean and largest <= tolerance.largest):
        raise WeightSyncError(
            f"weight verification: after the push {name} gives logprobs that differ from the learner's by "
            f"{mean:.2e} in the mean (allowed {tolerance.mean:.0e}) and up to {largest:.2e} (allowed "
            f"{tolerance.largest:.0e}): it does not serve the learner's weights, or rounds far more than "
            "other models in bfloat16. Check that model.path holds the same model on its host and the learner's; if it "
            "does, set another weight_sync.transport, or weight_sync.verify: false."
        )


def check_loaded(unloaded: Mapping[str, Sequence[str]]) -> None:
    """Check that no server has `unloaded` weights, {name of a server: names of weights}: all were NaN before the push.

    Raises:
        WeightSyncError: one has.
    """
    for name, weights in unloaded.items():
        if weights:
            raise WeightSyncError(
                f"weight verification: the push did not reach {len(weights)} weights of {name}, which would stay "
                f"as they were for the whole run: {', '.join(weights[:3])}. Its server does not load this model's "
                "weights under the names of its folder. Set another rollout.engine; if you know that training "
                "never changes these weights, set weight_sync.verify: false"
            )
