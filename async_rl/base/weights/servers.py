"""The rollout servers of a push: the interface to one of them, the members of a pool, and calls to all in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from async_rl.base.config import Config, Limit
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.errors import ConfigError, WaitTimeoutError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

    from async_rl.base.seams import EngineEntry

PROBES = 2
"""A server that misses this many probes in a row counts as dead. A busy one may miss a single probe."""
PAUSE_S = 0.2
LOST_WITHIN_S = 10.0
"""A server that dies in a push stops answering within this time after the push has failed."""
Probes = Mapping[str, Callable[[], bool]]
"""For each server, by name: a function that returns whether it answers."""
_IN_EACH_PUSH = ("is_ready", "pause", "resume", "begin_update", "end_update")
_OF_VERIFICATION = ("erase_weights", "unloaded_weights", "value_sums", "score_tokens")
_FOR_BROADCASTS = ("join_group", "receive_bucket", "leave_group")
_OF_A_WAY = {
    "nccl": _FOR_BROADCASTS, "gloo": _FOR_BROADCASTS, "shared_memory": ("map_bucket", "note_mapped"),
    "folder": ("load_folder",),
}
"""For each way of delivery in an engine's `receives`: the calls that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Part of a model's weights: tensors packed one after the other in `data`, in the order of `names`."""

    names: list[str]
    dtypes: list[str]
    """Torch names without the prefix, e.g. `float32`."""
    shapes: list[list[int]]
    data: Tensor  # [bytes] uint8
    is_last: bool


class ServerAdmin(Protocol):
    """Administers one rollout server. The entry of the engine in ENGINES names the implementation.

    All calls block until the server has done what was requested, and may come from any thread. All except `is_ready`
    raise WeightSyncError if the server refuses or can't be reached, and WaitTimeoutError if it does not answer within
    timeouts.push_s.

    New weights arrive between `begin_update` and `end_update`, in the way that the transport's entry names in
    `delivers`: nccl and gloo use `join_group`, `receive_bucket` and `leave_group`; shared_memory uses `map_bucket` and,
    on several GPUs, `note_mapped`; folder uses `load_folder`. An engine needs only the calls of the ways that it
    `receives`. The call with the last weights also gets their policy version, all others get None. If the last call
    never comes, the push has failed, and the server is not resumed before another push has sent all weights.

    With weight_sync.double_buffer, `begin_update` and the calls that bring weights come while the server samples with
    the old weights. Then follow `pause`, `erase_weights` if at all, and `end_update`. If that push fails before the
    pause, the server continues with the old weights. The engine's entry declares which values of double_buffer it
    supports.
    """

    def is_ready(self) -> bool:
        """Return whether the server answers. A paused server answers too."""

    def pause(self, on_update: str) -> None:
        """Stop sampling. Later requests must not read KV of the old weights, unless `on_update` is in_place.

        Args:
            on_update: weight_sync.on_update, what happens to running requests.
        """

    def resume(self) -> None:
        """Resume sampling after `pause`, with the weights and the version of the last complete update."""

    def begin_update(self) -> None:
        """Prepare to receive weights. Drop the weights of an earlier, incomplete update."""

    def end_update(self) -> None:
        """Load the weights received since `begin_update`, with their version. Sampling uses them after `resume`."""

    def join_group(
        self, *, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str
    ) -> None:
        """Make all ranks of the server join a torch.distributed group, as `first_rank` and the following ranks.

        Args:
            host, port: where the learner serves the group's TCPStore.
            backend: nccl or gloo.
        """

    def receive_bucket(self, bucket: Bucket, version: int | None, group_name: str) -> None:
        """Make the server receive a bucket, whose bytes rank 0 of the group broadcasts. `bucket.data` is not read here.
        """

    def leave_group(self, name: str) -> None:
        """Make all ranks of the server leave the torch.distributed group `name` and destroy it."""

    def map_bucket(self, bucket: Bucket, version: int | None) -> None:
        """Make the server load weights from the memory of `bucket`, which is on the server's own device or host."""

    def note_mapped(self, version: int) -> None:
        """Record that another process, a learner rank on the server's GPU, has mapped all buckets of `version`."""

    def load_folder(self, folder: Path, version: int | None) -> None:
        """Make the server load the safetensors files of a model folder."""

    def release_memory(self) -> None:
        """Pause, and free the memory of weights and KV cache.

        Called only if the engine's entry declares `releases_memory`.
        """

    def resume_memory(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory of weights or KV cache again, with undefined contents. Do nothing if it was not released.
        """

    def erase_weights(self) -> None:
        """Fill the weights in use with NaN. Called before `end_update` of a verified push, while the server is paused.

        A weight that the push does not contain, or that the server does not load, then stays NaN.
        """

    def unloaded_weights(self) -> list[str]:
        """Return the server's names of all weights that contain a NaN."""

    def value_sums(self) -> tuple[float, float]:
        """Return (sum of x, sum of |x|) over all values of the weights in use, in float64.

        The server may be paused or not.
        """

    def score_tokens(self, tokens: Sequence[int]) -> list[float]:
        """Return log p(tokens[i + 1] | tokens[: i + 1]) at temperature 1 by the server: len(tokens) - 1 values."""


def check_admin(engine: str, entry: EngineEntry, *, verifies: bool) -> None:
    """Check that the ServerAdmin class of an engine defines all calls that pushes need.

    Args:
        engine: the engine's name.
        entry: its entry.
        verifies: whether weight_sync.verify_every is set.

    Raises:
        ConfigError: its open_admin is no class, or the class lacks calls. The message says what needs each of them.
    """
    admin = entry.load_admin()
    if not isinstance(admin, type):
        raise ConfigError(f"rollout.engine {engine}: its open_admin must be a class, or load one, got {admin!r}")
    needed = dict.fromkeys(_IN_EACH_PUSH, "every push")
    for way in entry.receives:
        needed |= dict.fromkeys(_OF_A_WAY.get(way, ()), f"`receives` {way}")
    if entry.releases_memory:
        needed |= dict.fromkeys(("release_memory", "resume_memory"), "`releases_memory`")
    if verifies:
        needed |= dict.fromkeys(_OF_VERIFICATION, "weight_sync.verify_every")
    lacking = ", ".join(
        f"{call} (for {why})" for call, why in needed.items()
        if getattr(admin, call, None) in (None, getattr(ServerAdmin, call))  # a subclass of the Protocol inherits stubs
    )
    if lacking:
        raise ConfigError(f"rollout.engine {engine}: {admin!r} must define {lacking}, see base/weights/servers.py")


class Member(NamedTuple):
    """One start of a server. After a restart the server is another member, even at the same URL.

    A process group or a base of changed weights is valid only for the members with which it was made.
    """

    name: str
    url: str
    start: int
    """The number of this start of the server in the run, from 1."""


class Members:
    """The servers that get the next push, and those that have joined since.

    The driver reports new and lost servers from other threads. The learner applies the reports between two pushes, on
    rank 0. Other ranks get the members from rank 0 in the pushes that need them.

    Args:
        urls: URLs of the first servers, by name. Each is in its first start.
        purpose: why weights are pushed to these members. Ranks use it to tell the pushes of two transports apart.
    """

    def __init__(self, config: Config, urls: Mapping[str, str] | None = None, purpose: str = "push") -> None:
        self.purpose = purpose
        self.limit = config.timeouts.limit("push_s")
        """How long one call to a server may take. Rank 0 may change it between two pushes."""
        self._config = config
        self._lock = threading.Lock()
        self._current = {name: Member(name, url, 1) for name, url in (urls or {}).items()}
        self._joining: dict[str, Member] = {}
        """The servers that have joined and do not get pushes yet, by name."""
        self._left: set[tuple[str, int]] = set()
        """(name, start) of each lost server that may still be a member."""
        self._admins: dict[Member, ServerAdmin] = {}

    def join(self, name: str, url: str, start: int) -> None:
        """Report a new server. The driver calls it."""
        with self._lock:
            self._joining[name] = Member(name, url, start)

    def leave(self, name: str, start: int) -> None:
        """Report that a server is lost or leaves: it gets no further push. The driver calls it."""
        with self._lock:
            self._left.add((name, start))
            if name in self._joining and self._joining[name].start == start:
                del self._joining[name]

    def someone_waits(self) -> bool:
        """Return whether a new server waits for its first weights."""
        return bool(self._joining)

    def take_joining(self) -> tuple[Member, ...]:
        """Return the servers that have joined since the last call. The caller pushes weights to them."""
        with self._lock:
            joining, self._joining = tuple(self._joining.values()), {}
        return joining

    def admit(self, members: Iterable[Member]) -> None:
        """Make `members` get the next push, unless they have left. Call it only between two pushes."""
        self._current |= {member.name: member for member in members}
        self.apply_reports()

    def apply_reports(self) -> None:
        """Remove the members that the driver has reported as lost. Call it only between two pushes."""
        with self._lock:
            kept = [each for each in self._current.values() if (each.name, each.start) not in self._left]
            self._left.clear()
        self.replace(kept)

    def replace(self, members: Iterable[Member]) -> None:
        """Set the current members."""
        self._current = {member.name: member for member in members}
        current = set(self._current.values())
        self._admins = {member: admin for member, admin in self._admins.items() if member in current}

    def remove(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Remove members that a push has lost, and return them."""
        lost = tuple(self._current[name] for name in names)
        self.replace(member for member in self.current if member not in lost)
        return lost

    def __bool__(self) -> bool:
        return bool(self._current)

    @property
    def current(self) -> tuple[Member, ...]:
        """The members of the next push, or of the running one."""
        return tuple(self._current.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._current)

    def admin(self, name: str) -> ServerAdmin:
        """Return the ServerAdmin of the server `name`. Its class depends on the server's engine."""
        member = self._current[name]
        if member not in self._admins:
            config = resolve(self._config, engine_of(self._config, name))
            self._admins[member] = config.rollout.engine_entry.load_admin()(config, member.url)
        return self._admins[member]

    def calls(self, call: Callable[[ServerAdmin], Any]) -> dict[str, Callable[[], Any]]:
        """Return for each server, by name, a function that calls `call` with its ServerAdmin."""
        return {name: partial(call, self.admin(name)) for name in self._current}

    def probes(self) -> dict[str, Callable[[], bool]]:
        return self.calls(lambda admin: admin.is_ready())

    def call(self, call: Callable[[ServerAdmin], Any], what: str) -> dict[str, Any]:
        """Call `call` for all servers in parallel, and return the results by name. Raises the first error immediately.

        Args:
            what: describes the calls in errors, as in "pause before a weight push".
        """
        return start_together(self.calls(call), self.limit, what)()

    def call_to_the_end(self, call: Callable[[ServerAdmin], Any]) -> None:
        """Call `call` for all servers in parallel. An error is raised only after all calls have ended."""
        admins = [self.admin(name) for name in self._current]
        with ThreadPoolExecutor(max(1, len(admins))) as threads:
            list(threads.map(call, admins))

    def tell(self, call: Callable[[ServerAdmin], None], names: Iterable[str]) -> tuple[str, ...]:
        """Call `call` for the named servers in parallel, ignoring refusals.

        Returns the names of the servers that did not answer within `limit`: they hang.
        """
        answered: set[str] = set()
        names = tuple(names)

        def tell_one(name: str) -> None:
            with suppress(WaitTimeoutError):
                with suppress(WeightSyncError):
                    call(self.admin(name))
                answered.add(name)

        with suppress(WaitTimeoutError):
            start_together({name: partial(tell_one, name) for name in names}, self.limit, "end of a push")()
        return tuple(name for name in names if name not in answered)


def find_silent(probes: Probes) -> tuple[str, ...]:
    """Return the names of the servers that miss PROBES probes in a row."""
    silent = dict(probes)
    with ThreadPoolExecutor(max(1, len(probes))) as threads:
        for _ in range(PROBES):
            answers = list(threads.map(lambda probe: probe(), silent.values()))
            silent = {name: silent[name] for name, is_alive in zip(silent, answers, strict=True) if not is_alive}
    return tuple(silent)


def wait_for_silent(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until any server stops answering, and return the names of all that do not answer; () after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def wait_for_all(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until all servers answer, and return (); after `limit_s`, the names of those that still do not."""
    deadline = time.monotonic() + limit_s
    while (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def start_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> Callable[[], dict[str, Any]]:
    """Start each call in a thread of its own. Returns a function that waits for the results and returns them by name.

    The threads are daemons: a collective that can no longer complete must not keep the process from ending.

    Args:
        what: describes the calls in errors.

    Raises (the returned function does):
        WeightSyncError: a call failed; message and `names` name it. Other calls may still run.
        WaitTimeoutError: a call raised it, or calls still run after `limit`; message and `names` name them.
    """
    futures: dict[str, Future[Any]] = {name: Future() for name in calls}
    deadline = time.monotonic() + limit.seconds

    def work(name: str) -> None:
        try:
            futures[name].set_result(calls[name]())
        except BaseException as error:
            futures[name].set_exception(error)

    def wait_for_results() -> dict[str, Any]:
        done, running = wait(futures.values(), max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        for name, future in futures.items():
            if future in done and (error := future.exception()):
                kind = WaitTimeoutError if isinstance(error, WaitTimeoutError) else WeightSyncError
                raise kind(f"{what}: {name} failed: {error}", (name,)) from error
        if running:
            names = tuple(sorted(name for name, future in futures.items() if future in running))
            raise WaitTimeoutError(f"{what}: the learner waited {limit} for {', '.join(names)}", names)
        return {name: future.result() for name, future in futures.items()}

    for name in calls:
        threading.Thread(target=work, args=(name,), name=f"{what}: {name}", daemon=True).start()
    return wait_for_results
